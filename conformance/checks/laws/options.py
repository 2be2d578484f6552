"""Laws of options: a call with an option equals another call without it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from attest.conformance.cases.build import Built
from attest.conformance.checks.laws.law import (
    NAMES,
    Array,
    Called,
    Equation,
    Rewrite,
    changed,
    mapped,
    output_of,
    same,
)
from attest.conformance.checks.positions import placed
from attest.conformance.judging.trial import Trial
from attest.reference.oracle import Cotangents
from attest.reference.problem import Problem
from attest.reference.visibility import key_positions, row_positions

# A cap so many times the largest logit changes none by as much as float32 rounds it.
_FAR = 2.0**14
_EXACT_DISTANCE = 256  # tokens; bfloat16 holds every integer up to it
_SHIFT = 1 << 10  # tokens
_PADDED_CHANNELS = 3


def pair(built: Built, other: Built, *equations: Equation) -> Rewrite:
    """Return the rewrite of two calls, of which these outputs are compared in another way than as equal."""
    special = {equation.output for equation in equations}
    return Rewrite(
        (Called(built), Called(other)),
        (*same(*(name for name in NAMES if name not in special)), *equations),
    )


def repeated_heads(trial: Trial) -> Rewrite | str:
    """Repeat each key head for the query heads that read it; their gradients sum over these (S15)."""
    problem = trial.built.problem
    group = problem.group
    if group == 1:
        return "no key head has several query heads"

    def summed(array: Array) -> Array:
        return array.reshape(*array.shape[:2], -1, group, array.shape[3]).sum(axis=3)

    key, value = (np.repeat(array, group, axis=2) for array in (problem.key, problem.value))
    other = changed(trial.built, key=key, value=value)
    return pair(trial.built, other, mapped("dkey", summed), mapped("dvalue", summed))


def window_past_ends(trial: Trial) -> Rewrite:
    """Give a window that reaches further than any key."""
    case = trial.case
    far = case.q_len + case.kv_len
    left_only = trial.subject.limits.window_sides == "left"
    return pair(trial.built, changed(trial.built, sliding_window=(far, None if left_only else far)))


def far_cap(trial: Trial) -> Rewrite | str:
    """Give a cap far above every logit."""
    largest = max(_largest_logit(trial.built), 1.0)
    cap = 2.0 ** math.ceil(math.log2(largest * _FAR))
    return pair(trial.built, changed(trial.built, logits_soft_cap=cap))


def _largest_logit(built: Built) -> float:
    """Return a number that no logit exceeds."""
    problem = built.problem
    query, key = (
        np.linalg.norm(x.astype(np.float64), axis=-1).max(initial=0.0) for x in (problem.query, problem.key)
    )
    scale = abs(_scale_of(problem))
    bias = np.zeros(1) if problem.bias is None else np.abs(problem.bias.astype(np.float64))
    return float(scale * query * key + bias[np.isfinite(bias)].max(initial=0.0))


def _scale_of(problem: Problem) -> float:
    return problem.head_dim**-0.5 if problem.softmax_scale is None else problem.softmax_scale


def sink_as_key(trial: Trial) -> Rewrite:
    """Replace each sink by a key of zero value, whose logit a bias gives."""
    built = trial.built
    problem = built.problem
    sinks = problem.softmax_aux
    assert sinks is not None
    aux = sinks if sinks.ndim == 2 else sinks[None]
    count, keys, heads, shared = aux.shape[1], problem.kv_len, problem.q_heads, len(aux) == 1
    bias = np.zeros((1, 1, 1, keys), aux.dtype) if problem.bias is None else problem.bias
    bias = np.broadcast_to(bias, (problem.batch, heads, problem.q_len, keys))
    columns = np.broadcast_to(aux[None, :, None, :], (problem.batch, heads, problem.q_len, count))
    mask = problem.attention_mask
    if mask is not None:
        mask = np.broadcast_to(mask, (*mask.shape[:3], keys))
        mask = np.concatenate([mask, np.ones((*mask.shape[:3], count), bool)], axis=3)

    def longer(array: Array) -> Array:
        return np.concatenate(
            [array, np.zeros_like(array, shape=(len(array), count, *array.shape[2:]))], axis=1
        )

    other = changed(
        built,
        key=longer(problem.key),
        value=longer(problem.value),
        bias=np.concatenate([bias, columns], axis=3),
        attention_mask=mask,
        softmax_aux=None,
    )

    def to_sinks(array: Array) -> Array:
        each = array[..., keys:].sum(axis=(0, 2))
        return (each.sum(axis=0, keepdims=True) if shared else each).reshape(sinks.shape)

    def to_bias(array: Array) -> Array:
        assert problem.bias is not None
        shared_axes = tuple(axis for axis, size in enumerate(problem.bias.shape) if size == 1)
        return array[..., :keys].sum(axis=shared_axes, keepdims=True)

    return pair(
        built,
        other,
        mapped("dkey", lambda array: array[:, :keys]),
        mapped("dvalue", lambda array: array[:, :keys]),
        mapped("dbias", to_bias),
        mapped("dsoftmax_aux", to_sinks, "dbias"),
    )


def permuted_keys(trial: Trial) -> Rewrite | str:
    """Put the keys into another order, each with its value, mask, bias, segment and position."""
    built, order = trial.built, np.random.default_rng(trial.case.seed).permutation(trial.case.kv_len)
    if trial.case.kv_len == 1:
        return "one key"
    problem = built.problem
    if "positions" in trial.subject.features and (
        problem.causal or problem.sliding_window or problem.chunk_size
    ):
        problem = placed(problem, trial.subject)
    back = np.argsort(order)
    changes: dict[str, Any] = {"key": problem.key[:, order], "value": problem.value[:, order]}
    for name, axis in (("kv_segment_ids", 1), ("kv_positions", 1), ("attention_mask", 3), ("bias", 3)):
        array = getattr(problem, name)
        if array is not None:
            changes[name] = array if array.shape[axis] == 1 else np.take(array, order, axis)
    changes |= {"q_positions": problem.q_positions, "q_offset": problem.q_offset}
    return pair(
        built,
        changed(built, **changes),
        mapped("dkey", lambda array: array[:, back]),
        mapped("dvalue", lambda array: array[:, back]),
        mapped("dbias", lambda array: array if array.shape[3] == 1 else array[..., back]),
    )


def shifted_positions(trial: Trial) -> Rewrite:
    """Move the positions of all queries and keys by the same number of tokens, a multiple of the chunk."""
    here = placed(trial.built.problem, trial.subject)
    shift = _SHIFT if here.chunk_size is None else here.chunk_size * 7
    moved = {name: (getattr(here, name) + shift).astype(np.int32) for name in ("q_positions", "kv_positions")}
    return pair(trial.built, changed(trial.built, **moved, q_offset=None))


def chunk_as_segments(trial: Trial) -> Rewrite:
    """Replace chunks by segment ids, the number of the chunk of each token."""
    problem = trial.built.problem
    size = problem.chunk_size
    assert size is not None
    entries = range(problem.batch)
    rows = np.stack([row_positions(problem, "bottom_right", entry) for entry in entries]) // size
    keys = np.stack([key_positions(problem, entry) for entry in entries]) // size
    least = min(rows.min(), keys.min())
    ids = {"q_segment_ids": rows - least, "kv_segment_ids": keys - least}
    changes = {name: numbers.astype(np.int32) for name, numbers in ids.items()}
    return pair(trial.built, changed(trial.built, chunk_size=None, **changes))


def alibi_as_bias(trial: Trial) -> Rewrite | str:
    """Replace slopes, powers of two so that all terms are exact, by the bias that they stand for."""
    problem = trial.built.problem
    assert problem.alibi_slopes is not None
    if problem.q_len + problem.kv_len > _EXACT_DISTANCE:
        return f"more than {_EXACT_DISTANCE} tokens, whose distances the dtype may not hold"
    slopes = np.exp2(-(np.arange(problem.alibi_slopes.size) % 4) - 1.0).reshape(problem.alibi_slopes.shape)
    rows, keys = row_positions(problem, "bottom_right", 0), key_positions(problem, 0)
    distance = np.abs(rows[:, None] - keys[None, :])
    bias = (-slopes[:, :, None, None] * distance).astype(problem.query.dtype)
    left = changed(trial.built, alibi_slopes=slopes.astype(np.float32))
    return pair(left, changed(trial.built, alibi_slopes=None, bias=bias))


def padded_head_dim(trial: Trial) -> Rewrite:
    """Append channels of zeros to queries, keys and values, with the scale of the shorter vectors."""
    built = trial.built
    problem = built.problem

    def padded(array: Array) -> Array:
        zeros = np.zeros_like(array, shape=(*array.shape[:3], _PADDED_CHANNELS))
        return np.concatenate([array, zeros], axis=3)

    arrays = {name: padded(getattr(problem, name)) for name in ("query", "key", "value")}
    wider = changed(built, **arrays, softmax_scale=_scale_of(problem)).problem
    other = Built(wider, Cotangents(padded(built.cotangents.out), built.cotangents.lse))
    return pair(
        built,
        other,
        *(
            mapped(name, lambda array: array[..., :-_PADDED_CHANNELS])
            for name in ("out", "dquery", "dkey", "dvalue")
        ),
    )


def doubled_query(trial: Trial) -> Rewrite | str:
    """Give queries of twice the size half of the scale: the gradient of the queries is halved."""
    problem = trial.built.problem
    query = problem.query * problem.query.dtype.type(2)
    if not np.isfinite(query.astype(np.float64)).all():
        return "a doubled query overflows"
    other = changed(trial.built, query=query, softmax_scale=_scale_of(problem) / 2)
    return pair(trial.built, other, mapped("dquery", lambda array: 2 * array))


def constant_rows(trial: Trial) -> Rewrite:
    """Add one number to all logits of a row, by a bias: only lse changes, by this number."""
    problem = trial.built.problem
    shift = (4.0 * (np.arange(problem.q_len) % 3 - 1)).astype(problem.query.dtype)
    bias = np.broadcast_to(shift[None, None, :, None], (1, 1, problem.q_len, problem.kv_len)).copy()
    shifted = shift.astype(np.float64)

    def lse(calls: Any, size: Callable[[Array], Array]) -> Array:
        # The shift is exact: it has no bound.
        return calls[1]["lse"] - (0.0 if size is np.abs else shifted)

    return pair(trial.built, changed(trial.built, bias=bias), Equation("lse", output_of("lse"), lse))
