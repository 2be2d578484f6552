"""The parts that Triton's backward kernels share: the terms of a row, and the gradient of a tile of logits.

P is recomputed from the lse, and dS = P * (dP - delta), through the cap 1 - tanh^2 (clauses S3, S14, S15).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attest.kernels.triton.tile import by_row, kept_pairs


class Cotangents(NamedTuple):
    """The pointers to what the backward pass knows of each row, of its own or of a block of R rows.

    d_out: [B, Sq, heads, value_dim], the cotangent of out. The others are [B, heads, Sq] float32. lse2: the
    lse in bits, +inf for rows that see no key, whose P is then 0; delta: rowsum(dO * O) less the cotangent of
    lse; weight, if SPEC.gradients.weighted: what out was not divided by.
    """

    d_out: Any
    lse2: Any
    delta: Any
    weight: Any


class RowTerms(NamedTuple):
    """[R] float32 of a block of rows: lse2, delta and weight, as `Cotangents` explains them."""

    lse2: Any
    delta: Any
    weight: Any


@triton.jit
def load_row_terms(cotangents, rows, inside, q_length, SPEC: tl.constexpr):
    """Load the `RowTerms` of `rows`; +inf, 0 and 0 where not `inside`. lse stands in for an absent weight."""
    at = (rows.batch * SPEC.shape.heads + rows.head).to(tl.int64) * q_length + rows.index
    lse2 = tl.load(cotangents.lse2 + at, mask=inside, other=float("inf"))
    delta = tl.load(cotangents.delta + at, mask=inside, other=0.0)
    weight = lse2
    if SPEC.gradients.weighted:
        weight = tl.load(cotangents.weight + at, mask=inside, other=0.0)
    return RowTerms(lse2, delta, weight)


@triton.jit
def weights_of_lse(u, L, SPEC: tl.constexpr):
    """Return P from u and the lse in bits (see `numerics.exponents`): no weight is above 1; NaN stays NaN."""
    return tl.math.exp2(tl.minimum(u * SPEC.logits.unit - L, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def through_cap(dS, u, SPEC: tl.constexpr, EDGE: tl.constexpr):
    """Return dS of the bare logits from dS of the capped ones; 0 where the pair is hidden."""
    if SPEC.logits.cap != 0.0:
        dS = dS * (1.0 - u * u)
    if EDGE:
        dS = tl.where(u == float("-inf"), 0.0, dS)
    return dS


@triton.jit
def tile_gradient(u, dO, V, terms, seed, rows, keys, SPEC: tl.constexpr, EDGE: tl.constexpr):
    """Return dS [queries, keys] float32 from u, dO and V of a tile; `terms`: the `RowTerms` of its rows."""
    P = weights_of_lse(u, by_row(terms.lse2, False), SPEC)
    dP = tl.dot(dO, tl.trans(V), input_precision=SPEC.logits.precision)
    if SPEC.dropout is not None:
        dP = tl.where(kept_pairs(seed, rows, keys, SPEC, False), dP * SPEC.kept_scale, 0.0)
    if SPEC.gradients.weighted:
        dP = dP * by_row(terms.weight, False)
    dS = P * (dP - by_row(terms.delta, False))
    return through_cap(dS, u, SPEC, EDGE)
