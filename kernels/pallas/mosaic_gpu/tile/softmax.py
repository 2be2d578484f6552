"""The online softmax of the Hopper forward kernel, and when a row's reference moves.

The reference of a row is what its exponents are relative to, in bits: P = 2^(bits - reference). Were it
always the maximum so far, most blocks would reduce their rows to find it, and multiply the sums anew. So it
stays where it is until a logit is SLACK bits past it. A row's reference depends on that row alone: a warp
takes the longer way when one of its rows needs it, which changes no bit of the others (S4).

Paper: Milakov and Gimelshein, arXiv 1805.02867 (online softmax).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from attest.kernels.numerics.exponents import LOG2E, LOWEST
from attest.kernels.pallas.mosaic_gpu.blocks import ROWS
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tile.tanh import Cap, any_above
from attest.kernels.pallas.mosaic_gpu.tile.tile import (
    BY_ROW,
    COLUMNS,
    TILE,
    Tile,
    hidden_pairs,
    logits,
    over_rows,
)

SLACK = 8.0  # P is at most 2^8, which sums of float32 and P in float16 have room for
# The reference in bits of a row that has seen nothing: a difference is still a number. With a bias a logit
# may be lower, and a row begins at the lowest number.
_LOWEST = -3.4e38
# Bits of a reference from which on its own rounding is past what P has room for: see `_row_unit`.
_HUGE = {"bfloat16": 2.0**29, "float16": 2.0**27}

# More than rounding takes from the polynomial of a larger logit: no vote misses a row that must be moved.
_ROUNDING = 0.01


class Softmax(NamedTuple):
    """The state of the softmax of 64 rows so far.

    reference: [64] float32, in units of u, or in bits where the cap is bare. unit: [64] float32, what u is
    multiplied by in exponents; None where the cap is bare, and beside a bias, which leaves no registers for
    it: there every step computes it. norm: the sum of P, [64], or [64, 8] where it is kept in parts.
    """

    reference: jax.Array
    unit: jax.Array | None
    norm: jax.Array

    def level(self, spec: KernelSpec) -> jax.Array:
        """Return [64], the reference in units of `Logits.reference_unit`."""
        return self.reference if _bare(spec) or spec.logits.in_nats else self.reference * spec.logits.unit

    def whole_norm(self) -> jax.Array:
        """Return [64], its parts summed."""
        return jnp.sum(self.norm, axis=1) if self.norm.ndim == 2 else self.norm


class Weights(NamedTuple):
    """P [64, k] float32 of a tile, what is known behind it, and what earlier sums are multiplied by.

    alpha: [64] float32. moved: int32, 0 where alpha is 1 in all rows of this warp.
    """

    p: jax.Array
    known: Softmax
    alpha: jax.Array
    moved: Any


class _Row(NamedTuple):
    """The reference and the unit of 64 rows, as `Softmax` has them."""

    reference: jax.Array
    unit: jax.Array | None


type _Step = tuple[jax.Array, _Row, jax.Array, Any]  # the exponents, what of rows is known, alpha, moved


def nothing_known(spec: KernelSpec, partial_sums: bool) -> Softmax:
    """Return the softmax of 64 rows that have seen nothing."""
    norm = _by_row(0.0)
    if partial_sums:
        norm = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), TILE)
    if _bare(spec):
        return Softmax(_by_row(_LOWEST), None, norm)
    if spec.logits.in_nats:
        return Softmax(_by_row(LOWEST), None, norm)
    return Softmax(_by_row(_LOWEST / max(spec.logits.unit, 1.0)), _by_row(spec.logits.unit), norm)


def online_softmax(tile: Tile, s: jax.Array, compared: Any, known: Softmax) -> Weights:
    """Return the weights of a tile from the product s, and the softmax that includes them.

    compared: whether bounds and segments may hide pairs, a bool; or a number of the kernel, where only they
    may and no cap follows.
    """
    step = _of_cap if _bare(tile.spec) else _of_logits
    exponents, row, alpha, moved = step(tile, s, compared, _Row(known.reference, known.unit))
    p, norm = jnp.exp2(exponents), known.norm
    if norm.ndim == 2:
        norm = norm * over_rows(alpha, norm.shape) + _by_column(jnp.add, p)
    else:
        norm = norm * alpha + jnp.sum(p, axis=1)
    return Weights(p, Softmax(row.reference, row.unit, norm), alpha, moved)


def rescaled[T](acc: T, weights: Weights) -> T:
    """Return earlier sums of P V, an array or several, rescaled to the reference as it is now."""

    def by(acc: T, alpha: jax.Array) -> T:
        return jax.tree.map(lambda x: x * over_rows(alpha, x.shape), acc)

    return lax.cond(weights.moved, by, lambda acc, _: acc, acc, weights.alpha)


def _of_logits(tile: Tile, s: jax.Array, compared: Any, row: _Row) -> _Step:
    spec = tile.spec
    u, slack = _visible_logits(tile, s, compared), _slack(tile) / spec.logits.unit
    highest = _by_column(jnp.maximum, u)
    moved = _any_past(slack, highest, row)
    if spec.logits.in_nats:
        u, row, alpha = lax.cond(
            moved, partial(_moved_beside_bias, tile, slack), _unmoved_beside_bias, u, row
        )
    else:
        row, alpha = lax.cond(moved, partial(_moved, spec, slack), _unmoved, highest, row)
    unit = _row_unit(spec, row.reference) if row.unit is None else row.unit
    bits = u * over_rows(unit, u.shape)
    return bits - over_rows(row.reference * unit, u.shape), row, alpha, moved


def _visible_logits(tile: Tile, s: jax.Array, compared: Any) -> jax.Array:
    """Return u of a tile, -inf where hidden."""
    if isinstance(compared, bool):
        u, hiding = logits(tile, s, compared)
        return hiding.apply(u, -jnp.inf)
    u, _ = logits(tile, s, False)
    return lax.cond(compared, lambda u: hidden_pairs(tile, None, True).apply(u, -jnp.inf), lambda u: u, u)


def _of_cap(tile: Tile, s: jax.Array, compared: bool, row: _Row) -> _Step:
    """Return the same where the tanh is of s itself.

    The tanh keeps the order, so one vote of |s| answers for all. The short way is for small logits that move
    no reference. A compared tile, whose hidden pairs may hold anything, takes the long one.
    """
    cap, slack = Cap(tile.spec.logits.cap_scale, tile.spec.logits.unit), _slack(tile)

    def visible(bits: jax.Array) -> jax.Array:
        return hidden_pairs(tile, None, compared).apply(bits, -jnp.inf) if compared else bits

    if tile.spec.logits.approximate:
        bits = visible(cap.by_instruction(s))
        highest = _by_column(jnp.maximum, bits)
        moved = _any_past(slack, highest, row)
        row, alpha = lax.cond(moved, partial(_moved, tile.spec, slack), _unmoved, highest, row)
        return bits - over_rows(row.reference, bits.shape), row, alpha, moved

    def long(s: jax.Array, row: _Row) -> _Step:
        bits = visible(cap.of_any(s))
        return bits, *_moved(tile.spec, slack, _by_column(jnp.maximum, bits), row), jnp.int32(1)

    def short(s: jax.Array, row: _Row) -> _Step:
        return cap.of_small(s), *_unmoved(None, row), jnp.int32(0)

    def exponents(step: _Step) -> _Step:
        bits, row, alpha, moved = step
        return bits - over_rows(row.reference, bits.shape), row, alpha, moved

    if compared:
        return exponents(long(s, row))
    largest = _by_column(lambda x, y: jnp.maximum(jnp.abs(x), jnp.abs(y)), s)
    past = cap.of_small(largest) - over_rows(row.reference, largest.shape)
    asked = any_above(0.0, jnp.maximum(past - (slack - _ROUNDING), largest - cap.small), TILE)
    return exponents(lax.cond(asked, long, short, s, row))


def _bare(spec: KernelSpec) -> bool:
    """Return whether the logits come in bits, from the polynomial of a bare cap."""
    return spec.logits.bare_cap and not spec.pairwise


def _slack(tile: Tile) -> float:
    """Return the slack: 0 for an out that is not normalised, which is relative to the maximum (S26)."""
    return 0.0 if tile.spec.results.exact_reference else SLACK


def _any_past(slack: float, highest: jax.Array, row: _Row) -> Any:
    """Return whether this warp has a row whose highest logits [64, 8] are past its reference and the slack.

    A maximum with a NaN is NaN, and the vote is for it.
    """
    return any_above(slack, highest - over_rows(row.reference, highest.shape), TILE)


def _moved(spec: KernelSpec, slack: float, highest: jax.Array, row: _Row) -> tuple[_Row, jax.Array]:
    """Return the rows, now that their highest logits [64, 8] are known, and alpha."""
    top = jnp.max(highest, axis=1)
    now = jnp.where(top - row.reference > slack, top, row.reference)
    if _bare(spec):
        return _Row(now, None), jnp.exp2(row.reference - now)
    unit = None if row.unit is None else _row_unit(spec, now)
    return _Row(now, unit), jnp.exp2((row.reference - now) * spec.logits.unit)


def _moved_beside_bias(
    tile: Tile, slack: float, u: jax.Array, row: _Row
) -> tuple[jax.Array, _Row, jax.Array]:
    """Return the same, and u without the non-finite values that a bias hides (S4)."""
    u = jnp.where(tile.load_pairs("bias").astype(jnp.float32) == -jnp.inf, -jnp.inf, u)
    return u, *_moved(tile.spec, slack, _by_column(jnp.maximum, u), row)


def _unmoved_beside_bias(u: jax.Array, row: _Row) -> tuple[jax.Array, _Row, jax.Array]:
    return u, *_unmoved(None, row)


def _row_unit(spec: KernelSpec, reference: jax.Array) -> jax.Array:
    """Return the factor of u in rows of a reference, for u * unit - reference * unit.

    The compiler fuses the first product with the subtraction, and rounds the second. Where its last bits are
    whole numbers that makes 0 or inf of the largest weight. There a power of two, of which both are exact,
    stands in for the unit: logits that differ at all are far apart.
    """
    huge = jnp.abs(reference * spec.logits.unit) > _HUGE[jnp.dtype(spec.dtype).name]
    return jnp.where(huge, _power(spec), spec.logits.unit)


def _power(spec: KernelSpec) -> float:
    """Return the unit of rows of a huge reference."""
    return 2.0 ** math.floor(math.log2(spec.logits.unit / LOG2E))


def _unmoved(_: Any, row: _Row) -> tuple[_Row, jax.Array]:
    return row, _by_row(1.0)


def _by_row(x: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), BY_ROW)


def _by_column(combine: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return [64, 8] from a tile: every eighth column combined."""
    parts = [x[:, i : i + COLUMNS] for i in range(0, x.shape[1], COLUMNS)]
    while len(parts) > 1:
        pairs = [combine(*parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(parts) - len(parts) % 2 :]
    return parts[0]
