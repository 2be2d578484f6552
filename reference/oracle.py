"""The oracle: out, lse and all gradients in float64, with a backward pass written by hand.

The backward is the published one (Dao et al., FlashAttention, 2022, appendix B), extended by the clauses
for lse cotangents, sinks, caps, bias and dropout. Nothing here is differentiated automatically, and no
code is shared with a kernel.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from attest.reference.annotations import (
    BiasGradient,
    KeyGradient,
    Keys,
    Lse,
    LseCotangent,
    Out,
    OutCotangent,
    QueryGradient,
    Rows,
    SinksGradient,
    ValueGradient,
)
from attest.reference.problem import Problem
from attest.reference.rows import Floats, RowBlock, contract, row_blocks
from attest.reference.semantics import STANDARD, Semantics
from attest.reference.visibility import Ints

OUTPUTS = ("out", "lse")
GRADIENT_OUTPUTS = ("dquery", "dkey", "dvalue", "dbias", "dsoftmax_aux")


@dataclass(frozen=True)
class Cotangents:
    """The inputs of the backward pass: out [B, Sq, Hq, Dv], lse [B, Hq, Sq] or None for zeros."""

    out: OutCotangent
    lse: LseCotangent | None = None


@dataclass(frozen=True)
class Sample:
    """The rows to compute, in every batch row and head, where the whole answer is too large.

    query_rows: those of out, lse and dquery. key_rows: those of dkey and dvalue; they need every query
    row that sees them and whose cotangents are not all zero, so a verification at production size
    uses cotangents that are zero outside a few query rows.
    """

    query_rows: Rows
    key_rows: Keys


@dataclass(frozen=True)
class Answer:
    """float64 arrays named and shaped as in docs/reference/semantics.md; None where not asked for.

    Under a Sample, the sequence axes hold the sampled rows in the order given, and dbias and
    dsoftmax_aux, which need all rows, are None.
    """

    out: Out
    lse: Lse
    dquery: QueryGradient | None = None
    dkey: KeyGradient | None = None
    dvalue: ValueGradient | None = None
    dbias: BiasGradient | None = None
    dsoftmax_aux: SinksGradient | None = None

    def items(self) -> dict[str, Floats]:
        """Return the arrays that there are, by name."""
        return {name: array for name, array in vars(self).items() if array is not None}


def effective(problem: Problem, semantics: Semantics) -> Problem:
    """Return the problem without the arguments that a dialect silently drops (S20)."""
    fields = Problem.__dataclass_fields__
    return replace(problem, **{name: fields[name].default for name in semantics.ignored_arguments})


def attention(
    problem: Problem,
    semantics: Semantics = STANDARD,
    cotangents: Cotangents | None = None,
    sample: Sample | None = None,
) -> Answer:
    """Return the exact answer to a problem; gradients (S14) if cotangents are given.

    Raises ValueError if the cotangents or the sample do not fit the problem.
    """
    problem = effective(problem, semantics)
    _check(problem, cotangents, sample)
    rows = np.arange(problem.q_len, dtype=np.int64) if sample is None else sample.query_rows
    natural = None if cotangents is None else natural_cotangents(cotangents, semantics)
    with np.errstate(all="ignore"):
        of_query = natural if "query" in semantics.gradients else None
        answer = _attend(problem, row_blocks(problem, semantics, rows), len(rows), of_query)
        if semantics.lse_base == "two":
            answer = replace(answer, lse=answer.lse / np.log(2.0))
        if cotangents is None or natural is None:
            return answer
        # No cotangent silences a row that is NaN.
        every = np.arange(problem.q_len, dtype=np.int64)
        live = every if semantics.empty_rows == "nan" else live_rows(cotangents)
        key_rows = None if sample is None else sample.key_rows
        gradients = _by_keys(problem, row_blocks(problem, semantics, live), natural, key_rows)
    return replace(answer, **{name: d for name, d in gradients.items() if name[1:] in semantics.gradients})


def natural_cotangents(cotangents: Cotangents, semantics: Semantics) -> Cotangents:
    """Return the cotangents of out and of the natural lse, without what a dialect disregards (S13, S14)."""
    if cotangents.lse is None or not semantics.lse_gradient:
        return Cotangents(cotangents.out)
    lse = cotangents.lse.astype(np.float64)
    return Cotangents(cotangents.out, lse / np.log(2.0) if semantics.lse_base == "two" else lse)


def live_rows(cotangents: Cotangents) -> Ints:
    """Return query rows with a nonzero cotangent, in any batch row or head; the others add nothing."""
    live = (cotangents.out != 0).any(axis=(0, 2, 3))
    if cotangents.lse is not None:
        live |= (cotangents.lse != 0).any(axis=(0, 1))
    return np.flatnonzero(live)


@dataclass(frozen=True)
class BackwardBlock:
    """The terms of the gradients of one block of rows, [R, ...] in float64.

    d_out [R, Dv], d_lse [R]: cotangents, with respect to the normalised out and the natural lse.
    out [R, Dv]: normalised. row_dot: rowsum(d_out * out). d_weights: [R, N] dropout applied.
    d_logits: after the cap. d_uncapped: before it. d_sinks: [R, n].
    """

    d_out: Floats
    d_lse: Floats
    out: Floats
    row_dot: Floats
    d_weights: Floats
    d_logits: Floats
    d_uncapped: Floats
    d_sinks: Floats


def backward_block(problem: Problem, cotangents: Cotangents, block: RowBlock) -> BackwardBlock:
    """Differentiate one block of rows, given the `natural_cotangents`."""
    d_out, d_lse, out = _normalised_cotangents(problem, cotangents, block)
    d_weights = np.where(block.weighed, d_out @ np.where(np.isfinite(block.value), block.value, 0.0).T, 0.0)
    strange = ~np.isfinite(block.value).all(axis=1)
    d_weights[:, strange] = np.where(block.weighed[:, strange], d_out @ block.value[strange].T, 0.0)
    if block.keep is not None:
        d_weights = d_weights * block.keep
    row_dot = (d_out * out).sum(axis=1)
    d_row = d_lse - row_dot
    d_logits = np.where(block.seen, block.weights * (d_weights + d_row[:, None]), 0.0)
    d_sinks = block.sink_weights * d_row[:, None]
    if block.max_share is not None and block.sink_max_share is not None:
        # out = sum of exp(t - m) v has the derivative -out by the row maximum m.
        d_logits = d_logits - np.where(block.seen, _shared(row_dot, block.max_share), 0.0)
        d_sinks = d_sinks - _shared(row_dot, block.sink_max_share)
    d_uncapped = d_logits if block.cap_slope is None else d_logits * block.cap_slope
    d_uncapped = np.where(block.seen, d_uncapped, 0.0)
    return BackwardBlock(
        d_out, d_lse, out, row_dot, d_weights, d_logits, d_uncapped, d_sinks * block.sink_slope
    )


def _shared(total: Floats, share: Floats) -> Floats:
    """Return total [R] in the shares [R, N], 0 where there is none whatever the total."""
    return np.where(share > 0, share * total[:, None], 0.0)


def d_bias_block(block: RowBlock, backward: BackwardBlock) -> Floats:
    """Return the gradient of the bias before broadcast axes are summed: [R, N] (S2, S14)."""
    if block.bias_place == "after_cap":
        return backward.d_logits
    if block.bias_place == "before_scale":
        return backward.d_uncapped * block.dot_scale
    return backward.d_uncapped


def _check(problem: Problem, cotangents: Cotangents | None, sample: Sample | None) -> None:
    if cotangents is not None:
        out_shape = (problem.batch, problem.q_len, problem.q_heads, problem.value_dim)
        lse_shape = (problem.batch, problem.q_heads, problem.q_len)
        for name, array, shape in (("out", cotangents.out, out_shape), ("lse", cotangents.lse, lse_shape)):
            if array is not None and array.shape != shape:
                raise ValueError(f"cotangents.{name}: got shape {array.shape}, expected {shape}")
    if sample is not None:
        for name, rows, length in (
            ("query_rows", sample.query_rows, problem.q_len),
            ("key_rows", sample.key_rows, problem.kv_len),
        ):
            if rows.ndim != 1 or ((rows < 0) | (rows >= length)).any():
                raise ValueError(f"sample.{name}: got {rows.tolist()}, expected indices below {length}")


def _output(problem: Problem, block: RowBlock) -> tuple[Floats, Floats]:
    """Return out [R, Dv] of a block, and the factor [R] that `normalize_output=False` multiplies it by."""
    out = contract(block.dropped_weights(), block.weighed, block.value)
    out[np.isnan(block.lse)] = np.nan
    return out, np.ones(len(out)) if problem.normalize_output else block.normaliser


def _normalised_cotangents(
    problem: Problem, cotangents: Cotangents, block: RowBlock
) -> tuple[Floats, Floats, Floats]:
    """Return cotangents of the normalised out and the natural lse, 0 where they cannot move, and that out.

    An output o exp(lse - m) passes a share of its cotangent on to lse. What m passes on, where it is
    differentiated, is not in them.
    """
    out, factor = _output(problem, block)
    weighs = block.weighed.any(axis=1)
    live = weighs | (block.sink_weights > 0).any(axis=1)
    d_out = np.where(
        weighs[:, None], cotangents.out[block.batch, block.rows, block.head].astype(np.float64), 0.0
    )
    d_lse = np.zeros(len(out))
    if cotangents.lse is not None:
        d_lse = np.where(live, cotangents.lse[block.batch, block.head, block.rows], 0.0)
    d_out = d_out * factor[:, None]
    if not problem.normalize_output:
        d_lse = d_lse + (d_out * out).sum(axis=1)
    return d_out, d_lse, out


def _attend(problem: Problem, blocks: Iterable[RowBlock], rows: int, cotangents: Cotangents | None) -> Answer:
    """Return out, lse and, if cotangents are given, dquery of so many rows."""
    out = np.zeros((problem.batch, rows, problem.q_heads, problem.value_dim))
    lse = np.zeros((problem.batch, problem.q_heads, rows))
    d_query = np.zeros((problem.batch, rows, problem.q_heads, problem.head_dim))
    done = 0
    for block in blocks:
        here = slice(done, done + len(block.rows))
        done = here.stop % rows
        values, factor = _output(problem, block)
        out[block.batch, here, block.head] = values * factor[:, None]
        lse[block.batch, block.head, here] = block.lse
        if cotangents is not None:
            backward = backward_block(problem, cotangents, block)
            d_query[block.batch, here, block.head] = block.dot_scale * contract(
                backward.d_uncapped, block.seen, block.key
            )
    return Answer(out, lse, dquery=None if cotangents is None else d_query)


def _by_keys(
    problem: Problem, blocks: Iterable[RowBlock], cotangents: Cotangents, key_rows: Ints | None
) -> dict[str, Floats | None]:
    """Return the gradients that sum over query rows."""
    columns = np.arange(problem.kv_len, dtype=np.int64) if key_rows is None else key_rows
    d_key = np.zeros((problem.batch, len(columns), problem.kv_heads, problem.head_dim))
    d_value = np.zeros((problem.batch, len(columns), problem.kv_heads, problem.value_dim))
    d_bias = None if problem.bias is None or key_rows is not None else np.zeros(problem.bias.shape)
    d_sinks = None
    if problem.softmax_aux is not None and key_rows is None:
        d_sinks = np.zeros((problem.q_heads, problem.softmax_aux.shape[-1]))
    for block in blocks:
        backward = backward_block(problem, cotangents, block)
        at = (block.batch, slice(None), block.kv_head)
        seen, weighed = block.seen[:, columns].T, block.weighed[:, columns].T
        d_key[at] += block.dot_scale * contract(backward.d_uncapped[:, columns].T, seen, block.query)
        d_value[at] += contract(block.dropped_weights()[:, columns].T, weighed, backward.d_out)
        if d_bias is not None:
            _add_d_bias(d_bias, block, d_bias_block(block, backward))
        if d_sinks is not None:
            d_sinks[block.head] += backward.d_sinks.sum(axis=0)
    if d_sinks is not None and problem.softmax_aux is not None and problem.shares_sinks:
        d_sinks = d_sinks.sum(axis=0).reshape(problem.softmax_aux.shape)
    return {"dkey": d_key, "dvalue": d_value, "dbias": d_bias, "dsoftmax_aux": d_sinks}


def _add_d_bias(d_bias: Floats, block: RowBlock, gradient: Floats) -> None:
    """Sum a block into the bias's own shape; broadcast axes collect every row and key (S14)."""
    plane = d_bias[block.batch if d_bias.shape[0] > 1 else 0, block.head if d_bias.shape[1] > 1 else 0]
    if plane.shape[1] == 1:
        gradient = gradient.sum(axis=1, keepdims=True)
    if plane.shape[0] > 1:
        plane[block.rows] += gradient
    else:
        plane[0] += gradient.sum(axis=0)
