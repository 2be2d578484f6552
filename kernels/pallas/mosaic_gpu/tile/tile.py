"""One tile in the Hopper kernels: logits, hidden pairs and, in the backward passes, weights.

A warpgroup holds 64 rows by some columns in the layout of its products: a thread has two neighbouring columns
of every eight, in two rows. The rows are queries and the columns keys; in the kernels that sum over queries
it is the other way round, and the tile is called transposed.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attest.kernels.pallas.mosaic_gpu.blocks import ROWS
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tile.pairs import TILE, load_tile, widened
from attest.kernels.pallas.mosaic_gpu.tile.tanh import any_above, tanh

BY_ROW = TILE.reduce(1)
BY_COLUMN = TILE.reduce(0)
COLUMNS = 8  # the columns of which every thread of a product has some

OPAQUE_ABOVE = 64  # the largest head dim whose addresses the registers hold


@dataclass(frozen=True)
class Bounds:
    """The bounds of the keys that each query of a tile sees: int32 vectors, None where the spec has none.

    stand: where it stands among the keys, for ALiBi.
    """

    first: Any = None
    last: Any = None
    ids: Any = None
    stand: Any = None


@dataclass(frozen=True)
class Tile:
    """A tile: where its pairs are, and what of each query decides which keys it sees.

    arrays: by name, in memory. batch, head, row, key: int32 scalars, row and key the first of the tile's.
    words: those of dropout, as `dropout.load_words` has them.
    pairs: mask and bias of every pair, [queries, keys] in shared memory, by name. strict: whether hidden
    pairs must be exactly 0 even where something hidden is not finite; no repair follows.
    """

    spec: KernelSpec
    arrays: Mapping[str, Any]
    batch: Any
    head: Any
    row: Any
    key: Any
    bounds: Bounds = Bounds()
    words: tuple[Any, ...] | None = None
    transposed: bool = False
    pairs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    strict: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape: the rows of a warpgroup, and the columns of a block."""
        return ROWS, self.spec.shape.q_block if self.transposed else self.spec.shape.k_block

    @property
    def queries(self) -> Any:
        """The queries of the tile, a slice."""
        return pl.ds(self.row, self.shape[self.transposed])

    @property
    def keys(self) -> Any:
        """The keys of the tile, a slice."""
        return pl.ds(self.key, self.shape[not self.transposed])

    def by_query(self, x: Any) -> jax.Array:
        """Return a value of each query, for every key."""
        return (over_columns if self.transposed else over_rows)(x, self.shape)

    def by_key(self, x: Any) -> jax.Array:
        """Return a value of each key, for every query."""
        return (over_rows if self.transposed else over_columns)(x, self.shape)

    def load_by_query(self, ref: Any) -> jax.Array:
        """Load a value of each query."""
        return load(ref, BY_COLUMN if self.transposed else BY_ROW)

    def load_by_key(self, ref: Any) -> jax.Array:
        """Load a value of each key."""
        return load(ref, BY_ROW if self.transposed else BY_COLUMN)

    def load_pairs(self, name: str) -> jax.Array:
        """Return the tile of a mask or bias."""
        if name in self.pairs:
            return load_tile(self.pairs[name], self.transposed)
        of = self.spec.pair_arrays[name]
        ref = self.arrays[name].at[self.batch if of.by_batch else 0, self.head if of.by_head else 0, 0]
        if of.by_query:
            return self.by_query(self.load_by_query(ref.at[self.queries]))
        return self.by_key(self.load_by_key(ref.at[self.keys]))

    def load_bias(self) -> jax.Array:
        """Return the tile of the bias, float32."""
        bias = self.load_pairs("bias")
        return widened(bias) if "bias" in self.pairs else bias.astype(jnp.float32)


@dataclass(frozen=True)
class Hiding:
    """The hidden pairs of a tile: where a condition is false, or outside the columns [low, high].

    conditions: (compare, left, right), two tiles or a tile and a number. low, high: of each row, counted
    from the tile's first column.
    """

    conditions: tuple[tuple[Callable[[Any, Any], jax.Array], jax.Array, Any], ...] = ()
    low: Any = None
    high: Any = None

    def apply(self, x: jax.Array, hidden: float) -> jax.Array:
        """Return x, with `hidden` where a pair is hidden, whatever x holds there (S4).

        Bounds are compared eight columns at a time: moved to the columns they take no registers, where the
        index of every element would for good.
        """
        for compare, left, right in self.conditions:
            x = jnp.where(compare(left, right), x, hidden)
        bounds = [(operator.le, self.high), (operator.ge, self.low)]
        bounds = [(compare, bound) for compare, bound in bounds if bound is not None]
        if not bounds:
            return x
        column = plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 1, layout=TILE)
        # Once for all eights: each broadcast would cost Mosaic's inference of layouts a step of its search.
        bounds = [(compare, over_rows(bound, column.shape) - column) for compare, bound in bounds]
        parts: list[jax.Array] = []
        for i in range(0, x.shape[1], COLUMNS):
            part = x[:, i : i + COLUMNS]
            for compare, bound in bounds:
                part = jnp.where(compare(i, bound), part, hidden)
            parts.append(part)
        return jnp.concatenate(parts, axis=1)


def load_bounds(tile: Tile) -> Bounds:
    """Load what decides which keys the tile's queries see, and where they stand."""
    entry = tile.batch if tile.spec.visibility.by_batch else 0

    def of(name: str, entry: Any) -> Any:
        arrays = tile.arrays
        return tile.load_by_query(arrays[name].at[entry, tile.queries]) if name in arrays else None

    # In causal order alone a row's number says it, and registers are few.
    stand = None if tile.spec.visibility.causal and not tile.transposed else of("stands", entry)
    return Bounds(of("first", entry), of("last", entry), of("q_ids", tile.batch), stand)


def hidden_pairs(tile: Tile, bias: Any, compared: bool) -> Hiding:
    """Return which pairs of a tile are hidden. bias: the tile of it, None where its -inf needs no comparing.

    compared: whether bounds or segments may hide any; a mask may always.
    """
    spec = tile.spec
    conditions: list[tuple[Callable[[Any, Any], jax.Array], jax.Array, Any]] = []
    if bias is not None:
        conditions.append((operator.ne, bias, -jnp.inf))
    if spec.visibility.mask is not None:
        conditions.append((operator.ne, tile.load_pairs("mask"), 0))
    if not compared:
        return Hiding(tuple(conditions))
    bounds = tile.bounds
    if spec.visibility.segments:
        ids = tile.load_by_key(tile.arrays["kv_ids"].at[tile.batch, tile.keys])
        conditions.append((operator.eq, tile.by_query(bounds.ids), tile.by_key(ids)))
    shift = spec.shape.k_length - spec.shape.q_length
    if tile.transposed:
        for compare, bound in ((operator.le, bounds.last), (operator.ge, bounds.first)):
            if bound is not None:
                keys = tile.by_key(_row_index() + tile.key)
                conditions.append((compare, keys, tile.by_query(bound)))
        # Keys past the end are nobody's: what is summed for them is not written.
        low = _row_index() + (tile.key - shift - tile.row) if spec.visibility.causal else None
        high = None
        if tile.strict and "bias" in tile.pairs:
            # Rows past the end see nothing, and the bias, which is read as 0 there, does not say so.
            high = by_row(spec.shape.q_length - 1 - tile.row)
        return Hiding(tuple(conditions), low=low, high=high)
    high: Any = None
    if bounds.last is not None:
        high = bounds.last - tile.key
    elif spec.visibility.causal:
        high = _row_index() + (tile.row + shift - tile.key)
    if spec.shape.ragged and bounds.last is None:
        end = by_row(spec.shape.k_length - 1 - tile.key)
        high = end if high is None else jnp.minimum(high, end)
    low = None if bounds.first is None else bounds.first - tile.key
    return Hiding(tuple(conditions), low=low, high=high)


def logits(tile: Tile, s: jax.Array, compared: bool) -> tuple[jax.Array, Hiding]:
    """Return u float32 of a tile from the product s, and what is hidden: by bounds, segments if compared.

    A bias of -inf makes -inf of every finite u: it is compared where a cap follows, or if the tile is strict.
    """
    spec = tile.spec
    bias = None if spec.logits.bias is None else tile.load_bias()
    hiding = hidden_pairs(tile, bias if tile.strict or spec.logits.cap is not None else None, compared)
    if spec.logits.factor != 1.0:
        s = s * spec.logits.factor
    if spec.logits.dtype is not None:
        s = s.astype(spec.logits.dtype).astype(jnp.float32)
    if bias is not None:
        s = s + bias
    if spec.logits.alibi:
        s = with_alibi(tile, s)
    if spec.logits.cap is not None:
        s = tanh(s, spec.logits.cap_scale, TILE, spec.logits.approximate, beside_pairs=spec.pairwise)
    return s, hiding


def with_alibi(tile: Tile, s: jax.Array) -> jax.Array:
    """Return s less the slope of the head times the distance of each pair (S25).

    As in `Hiding`, distances of queries along the rows are made eight columns at a time.
    """
    slope = tile.arrays["slopes"][tile.batch if tile.spec.logits.slopes_by_batch else 0, tile.head]
    stand = tile.bounds.stand
    if tile.transposed:
        distance = tile.by_query(stand) - tile.by_key(_row_index() + tile.key)
        return s - slope * jnp.abs(distance).astype(jnp.float32)
    if tile.spec.visibility.causal:
        stand = _row_index() + (tile.row + tile.spec.shape.k_length - tile.spec.shape.q_length)
    column = plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 1, layout=TILE)
    # Without the barrier registers hold what no step changes in it, and spill at head dim 256.
    first = over_rows(lax.optimization_barrier(stand - tile.key), column.shape) - column
    parts: list[jax.Array] = []
    for i in range(0, s.shape[1], COLUMNS):
        distance = jnp.abs(first - i).astype(jnp.float32)
        parts.append(s[:, i : i + COLUMNS] - slope * distance)
    return jnp.concatenate(parts, axis=1)


def weights(tile: Tile, s: jax.Array, lse: Any, compared: bool) -> tuple[jax.Array, jax.Array | None]:
    """Return P of a tile, 0 where hidden, and the slope of the cap or None: float32, from the product s.

    lse: of each query, in units of `Logits.reference_unit`; None where it has been subtracted already
    (`Logits.folds_lse`).
    """
    u, hiding = logits(tile, s, compared)
    return weights_of(tile, u, hiding, lse), cap_slope(tile.spec, u)


def weights_of(tile: Tile, u: jax.Array, hiding: Hiding, lse: Any) -> jax.Array:
    """Return P of a tile from what `logits` returns. lse: as in `weights`."""
    spec = tile.spec
    if spec.logits.in_nats:
        exponents = (u - tile.by_query(lse)) * spec.logits.unit
    else:
        bits = u * spec.logits.unit
        exponents = bits if lse is None else bits - tile.by_query(lse)
    # No weight is above 1, or above `kept_scale` under dropout: see `attest.kernels.numerics.exponents`.
    return hiding.apply(jnp.exp2(jnp.minimum(exponents, math.log2(spec.kept_scale))), 0.0)


def cap_slope(spec: KernelSpec, u: jax.Array) -> jax.Array | None:
    """Return the derivative of the cap, None without one."""
    return None if spec.logits.cap is None else 1.0 - u * u


def cotangents(p: jax.Array, slope: jax.Array | None, dp: jax.Array, compared: bool) -> jax.Array:
    """Return dS from dP less delta, through the cap; if compared, 0 where P is 0, whatever dP is there (S4).

    Under dropout P is multiplied by `KernelSpec.kept_scale`, and delta is divided by it.
    """
    ds = p * dp
    if slope is not None:
        ds = ds * slope
    return jnp.where(p == 0.0, 0.0, ds) if compared else ds


def without_keys_past_end(tile: Tile, ds: jax.Array) -> jax.Array:
    """Return dS of a transposed tile, 0 for keys past the end, whatever queries hold: nobody sees them."""
    if not tile.spec.shape.ragged or tile.spec.visibility.causal:
        return ds
    return jnp.where(tile.by_key(_row_index() + tile.key) < tile.spec.shape.k_length, ds, 0.0)


def opaque(spec: KernelSpec, *indices: Any) -> tuple[Any, ...]:
    """Return the indices of tiles in shared memory, so that addresses are computed anew in every step.

    At large head dims the compiler else keeps the addresses of all parts of all tiles in registers.
    """
    return lax.optimization_barrier(indices) if spec.shape.head_dim > OPAQUE_ABOVE else indices


def leaked(acc: jax.Array) -> jax.Array:
    """Return [64] float32: 0 for a row that is finite, else NaN."""
    return jnp.sum(acc * 0.0, axis=1)


def nonfinite_rows(*parts: jax.Array) -> jax.Array:
    """Return [64] float32: 0, or NaN for the rows of a warp with anything non-finite in one of the parts."""
    found = sum(any_above(0.0, part * 0.0, TILE) for part in parts)
    return plgpu.layout_cast(lax.broadcast(jnp.where(found > 0, jnp.nan, 0.0), (ROWS,)), BY_ROW)


def zeros(shape: tuple[int, ...]) -> jax.Array:
    """Return a tile of zeros, as an accumulator holds it."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE)


def load(ref: Any, layout: Any) -> jax.Array:
    """Load from memory into registers of a layout, without staging through shared memory."""
    return plgpu.load(ref, layout=layout, optimized=False)


def by_row(x: Any) -> jax.Array:
    """Return [64], a number for each row."""
    return plgpu.layout_cast(lax.broadcast(x, (ROWS,)), BY_ROW)


def over_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a value of each row, in every column."""
    return lax.broadcast_in_dim(x, shape, (0,))


def over_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a value of each column, in every row."""
    return lax.broadcast_in_dim(x, shape, (1,))


def _row_index() -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW)
