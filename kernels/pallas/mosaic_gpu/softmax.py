"""Decides what the weights of a tile are in the forward pass, and when a row's reference moves.

The reference of a row is what its exponents are relative to, in bits: P = 2^(bits - reference). Were it
always the maximum so far, most blocks would reduce their rows to find it, and multiply the sums anew. So it
stays where it is until a logit is SLACK bits past it. A row's reference depends on that row alone: a warp
takes the longer way when one of its rows asks for it, which changes no bit of the others (S4).

Paper: Milakov and Gimelshein, arXiv 1805.02867 (online softmax).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.pallas.mosaic_gpu.blocks import ROWS
from kernels.pallas.mosaic_gpu.tanh import Cap, any_above
from kernels.pallas.mosaic_gpu.tile import BY_ROW, COLUMNS, TILE, Tile, hidden_pairs, logits, over_rows

SLACK = 8.0  # P is at most 2^8, which sums of float32 and P in float16 have room for
LOWEST = -3.4e38  # the reference of a row that has seen nothing, from which a difference is still a number

# More than rounding takes from the polynomial of a larger logit: no vote misses a row that asks to be moved.
_ROUNDING = 0.01


class Softmax(NamedTuple):
    """What is known of 64 rows so far.

    reference: [64] float32, in bits. norm: the sum of P, [64], or [64, 8] where it is kept in parts.
    """

    reference: jax.Array
    norm: jax.Array

    def whole_norm(self) -> jax.Array:
        """[64], its parts summed."""
        return jnp.sum(self.norm, axis=1) if self.norm.ndim == 2 else self.norm


class Weights(NamedTuple):
    """P [64, k] float32 of a tile, what is known behind it, and what earlier sums are multiplied by.

    alpha: [64] float32. moved: int32, 0 where alpha is 1 in all rows of this warp.
    """

    p: jax.Array
    known: Softmax
    alpha: jax.Array
    moved: Any


type _Step = tuple[jax.Array, jax.Array, jax.Array, Any]  # the logits in bits, the reference, alpha, moved


def nothing_known(partial_sums: bool) -> Softmax:
    """The softmax of 64 rows that have seen nothing."""
    if partial_sums:
        return Softmax(_by_row(LOWEST), plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), TILE))
    return Softmax(_by_row(LOWEST), _by_row(0.0))


def online_softmax(tile: Tile, s: jax.Array, compared: bool, known: Softmax) -> Weights:
    """The weights of a tile from the product s, and what is known once they are counted."""
    problem = tile.problem
    step = _of_cap if problem.bare_cap and not problem.pairwise else _of_logits
    bits, reference, alpha, moved = step(tile, s, compared, known.reference)
    p, norm = jnp.exp2(bits - over_rows(reference, bits.shape)), known.norm
    if norm.ndim == 2:
        norm = norm * over_rows(alpha, norm.shape) + _by_column(jnp.add, p)
    else:
        norm = norm * alpha + jnp.sum(p, axis=1)
    return Weights(p, Softmax(reference, norm), alpha, moved)


def rescaled(acc: jax.Array, weights: Weights) -> jax.Array:
    """Earlier sums of P V, relative to the reference as it is now."""
    alpha = weights.alpha
    return lax.cond(
        weights.moved, lambda acc, alpha: acc * over_rows(alpha, acc.shape), lambda acc, _: acc, acc, alpha
    )


def _of_logits(tile: Tile, s: jax.Array, compared: bool, reference: jax.Array) -> _Step:
    u, hidden = logits(tile, s, compared)
    u, unit, slack = hidden.apply(u, -jnp.inf), tile.problem.unit, _slack(tile)
    highest = _by_column(jnp.maximum, u) * unit
    moved = any_above(slack, highest - over_rows(reference, highest.shape), TILE)
    reference, alpha = lax.cond(moved, partial(_moved, slack), _unmoved, highest, reference)
    return u * unit, reference, alpha, moved


def _of_cap(tile: Tile, s: jax.Array, compared: bool, reference: jax.Array) -> _Step:
    """The same where the tanh is of s itself: it keeps the order, so one vote of |s| answers for all.

    The short way is for small logits that move no reference. A compared tile, whose hidden pairs may hold
    anything, takes the long one.
    """
    cap, slack = Cap(tile.problem.cap_scale, tile.problem.unit), _slack(tile)

    def long(s: jax.Array, reference: jax.Array) -> _Step:
        bits = cap.of_any(s)
        if compared:
            bits = hidden_pairs(tile, None).apply(bits, -jnp.inf)
        return bits, *_moved(slack, _by_column(jnp.maximum, bits), reference), jnp.int32(1)

    def short(s: jax.Array, reference: jax.Array) -> _Step:
        return cap.of_small(s), *_unmoved(None, reference), jnp.int32(0)

    if compared:
        return long(s, reference)
    largest = _by_column(lambda x, y: jnp.maximum(jnp.abs(x), jnp.abs(y)), s)
    past = cap.of_small(largest) - over_rows(reference, largest.shape)
    asked = any_above(0.0, jnp.maximum(past - (slack - _ROUNDING), largest - cap.small), TILE)
    return lax.cond(asked, long, short, s, reference)


def _slack(tile: Tile) -> float:
    """An out that is not normalised is relative to the maximum itself (S10)."""
    return SLACK if tile.problem.normalize else 0.0


def _moved(slack: float, highest: jax.Array, reference: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The reference, now that the highest logits [64, 8] of these rows are known, and alpha."""
    top = jnp.max(highest, axis=1)
    now = jnp.where(top - reference > slack, top, reference)
    return now, jnp.exp2(reference - now)


def _unmoved(_: Any, reference: jax.Array) -> tuple[jax.Array, jax.Array]:
    return reference, _by_row(1.0)


def _by_row(x: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), BY_ROW)


def _by_column(combine: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """[64, 8] from a tile: every eighth column combined."""
    parts = [x[:, i : i + COLUMNS] for i in range(0, x.shape[1], COLUMNS)]
    while len(parts) > 1:
        pairs = [combine(*parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(parts) - len(parts) % 2 :]
    return parts[0]
