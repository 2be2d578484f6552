"""Decides what a block of logits becomes before and in the softmax: scale, bias, cap, hidden pairs, weights.

A consumer holds 64 rows by a block of keys in the layout of its products: a thread has two neighbouring
columns of every eight, in two rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.pallas.mosaic_gpu.blocks import ROWS
from kernels.pallas.mosaic_gpu.problem import Problem

TILE = plgpu.Layout.WGMMA
BY_ROW = TILE.reduce(1)
BY_COLUMN = TILE.reduce(0)
COLUMNS = 8  # the columns of which every thread of a product has some

# tanh is x * p(x * x) / q(x * x) within this bound and 1 beyond it: the rational function of Eigen and XLA.
_TANH_BOUND = 7.90531110763549805
_TANH_P = (
    *(-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08),
    *(1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03),
)
_TANH_Q = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


@dataclass(frozen=True)
class Tile:
    """The 64 query rows of a consumer: where they are, and what of each row decides which keys it sees.

    arrays: by name, in memory. batch, head, row: int32 scalars, row the first of the 64. first, last, ids:
    [64] int32, None where the problem has none.
    """

    problem: Problem
    arrays: Mapping[str, Any]
    batch: Any
    head: Any
    row: Any
    first: Any
    last: Any
    ids: Any


def load_tile(problem: Problem, arrays: Mapping[str, Any], batch: Any, head: Any, row: Any) -> Tile:
    """The tile, with what is read once of each row."""

    def by_row(name: str, entry: Any) -> Any:
        return load(arrays[name].at[entry, _rows(row)], BY_ROW) if name in arrays else None

    entry = batch if problem.by_batch else 0
    first, last, ids = by_row("first", entry), by_row("last", entry), by_row("q_ids", batch)
    return Tile(problem, arrays, batch, head, row, first, last, ids)


def logits(tile: Tile, s: jax.Array, block: Any, compared: bool) -> jax.Array:
    """u [64, k] float32 of a block of keys, from the product s; -inf where hidden, if pairs are compared."""
    problem, arrays = tile.problem, tile.arrays
    key_start = block * problem.blocks.k
    rows, keys = _rows(tile.row), pl.ds(key_start, problem.blocks.k)
    if problem.factor != 1.0:
        s = s * problem.factor
    conditions: list[jax.Array] = []
    if problem.bias is not None:
        by_batch, by_head, by_row = problem.bias
        at = (tile.batch if by_batch else 0, tile.head if by_head else 0)
        if by_row:
            bias = load(arrays["bias"].at[(*at, rows, keys)], TILE)
        else:
            bias = over_columns(load(arrays["bias"].at[(*at, 0, keys)], BY_COLUMN), s.shape)
        bias = bias.astype(jnp.float32)
        s = s + bias
        conditions.append(bias != -jnp.inf)
    if problem.cap is not None:
        s = _tanh(s * (1.0 / problem.cap))
    if compared and problem.segments:
        ids = load(arrays["kv_ids"].at[tile.batch, keys], BY_COLUMN)
        conditions.append(over_rows(tile.ids, s.shape) == over_columns(ids, s.shape))
    if compared and problem.mask is not None:
        by_batch, by_head, _ = problem.mask
        at = (tile.batch if by_batch else 0, tile.head if by_head else 0)
        conditions.append(load(arrays["mask"].at[(*at, rows, keys)], TILE) != 0)
    if conditions:
        visible, *others = conditions
        for condition in others:
            visible = visible & condition
        s = jnp.where(visible, s, -jnp.inf)
    return _within(tile, s, key_start) if compared else s


def softmax(
    tile: Tile, u: jax.Array, m: jax.Array, norm: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """P [64, k] float32, the new maximum in bits, the new norm, and what earlier sums are multiplied by."""
    unit = tile.problem.unit
    m_new = jnp.maximum(m, jnp.max(u, axis=1) * unit)
    p = jnp.exp2(u * unit - over_rows(m_new, u.shape))
    alpha = jnp.exp2(m - m_new)
    if tile.problem.blocks.partial_sums:
        parts = p[:, :COLUMNS]
        for i in range(COLUMNS, u.shape[1], COLUMNS):
            parts = parts + p[:, i : i + COLUMNS]
        norm = norm * over_rows(alpha, parts.shape) + parts
    else:
        norm = norm * alpha + jnp.sum(p, axis=1)
    return p, m_new, norm, alpha


def load(ref: Any, layout: Any) -> jax.Array:
    """From memory into registers of a layout, without staging through shared memory."""
    return plgpu.load(ref, layout=layout, optimized=False)


def over_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value of each row, in every column."""
    return lax.broadcast_in_dim(x, shape, (0,))


def over_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value of each column, in every row."""
    return lax.broadcast_in_dim(x, shape, (1,))


def _rows(row: Any) -> Any:
    return pl.ds(row, ROWS)


def _within(tile: Tile, s: jax.Array, key_start: Any) -> jax.Array:
    """s with -inf outside the rows' intervals of keys.

    Eight columns at a time, each compared with bounds moved to them: written with the key's index of every
    element, the compiler computes those once and keeps them in registers for good.
    """
    problem = tile.problem
    high: Any = None
    if problem.last:
        high = tile.last - key_start
    elif problem.causal:
        rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW)
        high = rows + (tile.row + (problem.k_length - problem.q_length) - key_start)
    if problem.ragged and not problem.last:
        end = problem.k_length - 1 - key_start
        high = end if high is None else jnp.minimum(high, end)
    low = tile.first - key_start if problem.first else None
    if high is None and low is None:
        return s
    column = plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 1, layout=TILE)

    def moved(bound: Any, by: int) -> jax.Array:
        bound = bound - by
        return over_rows(bound, column.shape) if bound.ndim else lax.broadcast(bound, column.shape)

    parts: list[jax.Array] = []
    for i in range(0, s.shape[1], COLUMNS):
        part = s[:, i : i + COLUMNS]
        if high is not None:
            part = jnp.where(column <= moved(high, i), part, -jnp.inf)
        if low is not None:
            part = jnp.where(column >= moved(low, i), part, -jnp.inf)
        parts.append(part)
    return jnp.concatenate(parts, axis=1)


def _tanh(x: jax.Array) -> jax.Array:
    """To 2^-21 of itself; the instruction is off by 2^-11."""
    x = jnp.minimum(jnp.maximum(x, -_TANH_BOUND), _TANH_BOUND)
    p, q = (_polynomial(terms, x * x) for terms in (_TANH_P, _TANH_Q))
    root = lax.rsqrt(q)
    return x * p * (root * root)


def _polynomial(terms: tuple[float, ...], x: jax.Array) -> jax.Array:
    leading, second, *rest = terms
    total = leading * x + second
    for term in rest:
        total = total * x + term
    return total
