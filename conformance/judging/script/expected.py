"""The lines of a script that compute attention in float64 with NumPy, for the options of one call.

They compute on arrays [B, S, H, D] of the call, by their names in it, and on the cotangents d_out and d_lse.
"""

from collections.abc import Collection, Iterator

import numpy as np

from attest.conformance.judging.script.literals import ScriptError, literal
from attest.reference.problem import Problem
from attest.reference.rows import dot_scale
from attest.reference.semantics import Semantics

# Options that the lines do not compute, by the feature that a reader knows.
_LEFT_OUT = {
    "q_offset": "q_offset",
    "q_positions": "positions",
    "kv_positions": "positions",
    "alibi_slopes": "alibi",
}


def expected_lines(
    problem: Problem, semantics: Semantics, outputs: Collection[str], empty_rows: bool
) -> list[str]:
    """Return the lines, which leave the wanted outputs in variables of their names.

    outputs: out, lse, dquery and others. empty_rows: whether some row sees no key.
    Raises ScriptError for an option that they do not compute.
    """
    left_out = [feature for name, feature in _LEFT_OUT.items() if getattr(problem, name) is not None]
    left_out += ["dropout"] * (problem.dropout_prob > 0) + ["an output that is not normalized"] * (
        not problem.normalize_output
    )
    if left_out:
        raise ScriptError(f"a script does not compute {left_out[0]}")
    lines = [*_forward(problem, semantics, empty_rows, "lse" in outputs)]
    if any(name.startswith("d") for name in outputs):
        lines += _backward(problem, semantics, outputs)
    return lines


def _forward(problem: Problem, semantics: Semantics, empty_rows: bool, lse: bool) -> Iterator[str]:
    yield "q, k, v = (np.asarray(array, np.float64) for array in (query, key, value))"
    if problem.group > 1:
        yield f"k, v = (np.repeat(array, {problem.group}, axis=2) for array in (k, v))"
    scale = literal(dot_scale(problem, semantics))
    yield f'logits = {scale} * np.einsum("bihd,bjhd->bhij", q, k)'
    seen = [*_visible(problem, semantics)]
    if problem.bias is not None:
        yield "added = np.asarray(bias, np.float64)"
        if np.isneginf(problem.bias.astype(np.float64)).any():
            seen.append("~hidden")
            yield "hidden = np.isneginf(added)"
            yield "added = np.where(hidden, 0.0, added)"
        yield "logits = logits + added"
    if problem.logits_soft_cap is not None:
        cap = literal(problem.logits_soft_cap)
        yield f"tanh = np.tanh(logits / {cap})"
        yield f"logits = {cap} * tanh"
    yield from _positions(problem, semantics)
    if seen:
        yield f"logits = np.where({' & '.join(seen)}, logits, -np.inf)"
    yield "top = logits.max(axis=-1, keepdims=True, initial=-np.inf)"
    if problem.softmax_aux is not None:
        yield "sinks = np.asarray(softmax_aux, np.float64)"
        per_head = problem.softmax_aux.ndim == 2
        yield f"sinks = sinks{'[None, :, None, :]' if per_head else '[None, None, None, :]'}"
        yield "top = np.maximum(top, sinks.max(axis=-1, keepdims=True))"
    elif empty_rows:
        yield "top = np.where(np.isneginf(top), 0.0, top)"
    yield "weights = np.exp(logits - top)"
    yield "total = weights.sum(axis=-1, keepdims=True)"
    if problem.softmax_aux is not None:
        yield "total = total + np.exp(sinks - top).sum(axis=-1, keepdims=True)"
    # Where a row sees no key and there is no sink, total is 0.
    safe = "np.where(total > 0, total, 1.0)" if empty_rows and problem.softmax_aux is None else "total"
    yield f"weights = weights / {safe}"
    if lse:
        base = " / np.log(2.0)" if semantics.lse_base == "two" else ""
        natural = f"top + np.log({safe})"
        yield (
            f"lse = ({natural}){base}"
            if safe == "total"
            else (f"lse = np.where(total > 0, {natural}, -np.inf){base}")
        )
        yield "lse = lse[..., 0]"
    yield 'out = np.einsum("bhij,bjhd->bihd", weights, v)'


def _visible(problem: Problem, semantics: Semantics) -> Iterator[str]:
    """Yield the conditions under which row i sees key j (S5)."""
    if problem.causal:
        yield "(j <= i)" if semantics.causal == semantics.window else "(j <= i_causal)"
    if problem.sliding_window is not None:
        left, right = problem.sliding_window
        if left is not None:
            yield f"(j >= i - {left})"
        if right is not None:
            yield f"(j <= i + {right})"
    if problem.chunk_size is not None:
        yield f"(j // {problem.chunk_size} == i // {problem.chunk_size})"
    if problem.cum_seqlens_q is not None:
        yield "(q_sequence == k_sequence) & (q_sequence >= 0)"
    if problem.q_segment_ids is not None:
        same = "(q_segment_ids[:, None, :, None] == kv_segment_ids[:, None, None, :])"
        yield same + " & (kv_segment_ids[:, None, None, :] >= 0)" * (semantics.segments == "non_negative")
    if problem.kv_start is not None:
        yield "(np.arange(k.shape[1]) >= kv_start[:, None, :, None])"
    if problem.kv_end is not None:
        yield "(np.arange(k.shape[1]) < kv_end[:, None, :, None])"
    if problem.attention_mask is not None:
        yield "(np.asarray(attention_mask) != 0)"


def _positions(problem: Problem, semantics: Semantics) -> Iterator[str]:
    """Yield the positions i of rows and j of keys, and with lengths the sequences of both (S6, S9)."""
    if problem.cum_seqlens_q is not None:
        yield from _of_sequences(problem, semantics)
    elif problem.causal or problem.sliding_window is not None or problem.chunk_size is not None:
        yield "i, j = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])"
        shift = "k.shape[1] - q.shape[1]"
        if semantics.causal != semantics.window:
            yield f"i_causal = i + {shift if semantics.causal == 'bottom_right' else 0}"
        if semantics.window == "bottom_right":
            yield f"i = i + {shift}"


def _of_sequences(problem: Problem, semantics: Semantics) -> Iterator[str]:
    if semantics.causal != semantics.window:
        raise ScriptError("a script does not compute lengths with two diagonals")
    shifted = semantics.window == "bottom_right"
    yield "i, j = np.arange(q.shape[1]), np.arange(k.shape[1])"
    if problem.batch > 1:
        yield "q_lens, k_lens = np.diff(cum_seqlens_q)[:, None], np.diff(cum_seqlens_k)[:, None]"
        yield "q_sequence = np.where(i < q_lens, 0, -1)[:, None, :, None]"
        yield "k_sequence = np.where(j < k_lens, 0, -1)[:, None, None, :]"
        yield f"i = (i{' + k_lens - q_lens' if shifted else ' + 0 * q_lens'})[:, None, :, None]"
        return
    yield 'q_sequence = np.searchsorted(cum_seqlens_q, i, side="right") - 1'
    yield 'k_sequence = np.searchsorted(cum_seqlens_k, j, side="right") - 1'
    yield "last = len(cum_seqlens_q) - 1  # of tokens past the last sequence"
    yield "i = i - np.take(cum_seqlens_q, q_sequence)"
    if shifted:
        yield "shift = np.append(np.diff(cum_seqlens_k) - np.diff(cum_seqlens_q), 0)"
        yield "i = i + shift[q_sequence]"
    yield "i, j = i[:, None], j - np.take(cum_seqlens_k, k_sequence)"
    yield "q_sequence = np.where(q_sequence < last, q_sequence, -1)[:, None]"


def _backward(problem: Problem, semantics: Semantics, outputs: Collection[str]) -> Iterator[str]:
    scale = literal(dot_scale(problem, semantics))
    yield "g = np.asarray(d_out, np.float64)"
    yield 'd_weights = np.einsum("bihd,bjhd->bhij", g, v)'
    yield "d_row = -(weights * d_weights).sum(axis=-1, keepdims=True)"
    if semantics.lse_gradient and "lse" in outputs:
        base = " / np.log(2.0)" if semantics.lse_base == "two" else ""
        yield f"d_row = d_row + np.asarray(d_lse, np.float64)[..., None]{base}"
    yield "d_logits = weights * (d_weights + d_row)"
    if problem.softmax_aux is not None and "dsoftmax_aux" in outputs:
        yield "d_sinks = np.exp(sinks - top) / total * d_row"
        shared = {1: "(0, 1, 2)", 2: "(0, 2)"}[problem.softmax_aux.ndim]
        if problem.softmax_aux.shape[:-1] == (1,):
            shared = "(0, 1, 2), keepdims=True"
        yield f"dsoftmax_aux = d_sinks.sum(axis={shared})" + ("[0, 0]" if "keep" in shared else "")
    if problem.logits_soft_cap is not None:
        yield "d_logits = d_logits * (1 - tanh**2)"
    if problem.bias is not None and "dbias" in outputs:
        shape = (problem.batch, problem.q_heads, problem.q_len, problem.kv_len)
        axes = tuple(n for n, size in enumerate(problem.bias.shape) if size == 1 and shape[n] != 1)
        yield "dbias = d_logits" + (f".sum(axis={axes}, keepdims=True)" if axes else "")
    yield f'dquery = {scale} * np.einsum("bhij,bjhd->bihd", d_logits, k)'
    yield f'dkey = {scale} * np.einsum("bhij,bihd->bjhd", d_logits, q)'
    yield 'dvalue = np.einsum("bhij,bihd->bjhd", weights, g)'
    if problem.group > 1:
        grouped = f"{problem.kv_heads}, {problem.group}, -1"
        yield (
            "dkey, dvalue = (array.reshape(*array.shape[:2], "
            f"{grouped}).sum(axis=3) for array in (dkey, dvalue))"
        )
