"""One tile in the TPU kernels: its logits, its hidden pairs and the pairs that dropout keeps.

A tile is [keys, queries]: keys along sublanes, queries along lanes. What belongs to a query row (maximum,
normaliser, lse, Delta) is then a line, reductions over keys run down the sublanes, and the four keys of a
call of dropout's generator are neighbours where interleaving is cheap. Arrays of queries come to a kernel as
[channels, queries], those of keys as [keys, channels].
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attest.kernels.call.alibi import alibi_term
from attest.kernels.numerics.philox import least_kept, philox4x32
from attest.kernels.pallas.tpu.blocks import LANES

type Refs = Mapping[str, Any]


@dataclass(frozen=True)
class Tile:
    """The static settings of every kernel.

    q, k: its size in query rows and keys. k_length: keys from here on only fill up the last block; None where
    none do. rows: what each line of the operand `rows` is, of "first", "last", "ids" and "stand".
    slope_heads: how many slopes of ALiBi each batch entry has of its own; 0 where all share them.
    dropout_shared: as `Call` has it.
    """

    q: int
    k: int
    k_length: int | None
    rows: tuple[str, ...]
    slope_heads: int
    scale: float
    cap: float | None
    logits_dtype: str
    dropout_prob: float
    dropout_shared: str
    precision: lax.Precision


def dot(tile: Tile, left: jax.Array, right: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Return the product of two matrices over one axis of each, summed in float32."""
    return lax.dot_general(
        left,
        right,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=tile.precision,
        preferred_element_type=jnp.float32,
    )


def logits(tile: Tile, refs: Refs, at: Any) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return (logits, visible, slope) of the tile of a step, [k, q] (clauses S1 to S9, S25).

    Logits are float32, -inf where hidden; visible is None where nothing may be hidden; slope is the
    derivative of the cap, None without one.
    """
    t = dot(tile, refs["key"][...], refs["query"][...], (1, 0)) * jnp.float32(tile.scale)
    if tile.logits_dtype != "float32":
        info = jnp.finfo(tile.logits_dtype)
        t = lax.reduce_precision(t, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    bias = None
    if "bias" in refs:
        bias = _transposed(tile, refs["bias"])
        t = t + bias
    keys = at.k * tile.k + lax.broadcasted_iota(jnp.int32, (tile.k, tile.q), 0)
    if "slopes" in refs:
        line = tile.rows.index("stand")
        slope_of = refs["slopes"][at.batch * tile.slope_heads + at.head]
        t = t + alibi_term(slope_of, refs["rows"][line : line + 1, :], keys)
    slope = None
    if tile.cap is not None:
        bounded = jnp.tanh(t * jnp.float32(1 / tile.cap))
        t, slope = jnp.float32(tile.cap) * bounded, 1 - bounded * bounded
    visible = _visible(tile, refs, keys, bias)
    return (t if visible is None else jnp.where(visible, t, -jnp.inf)), visible, slope


def _visible(tile: Tile, refs: Refs, keys: jax.Array, bias: jax.Array | None) -> jax.Array | None:
    """Return which pairs of a tile are visible (clauses S4 to S9): where every given condition permits it."""
    conditions: list[jax.Array] = []
    for line, name in enumerate(tile.rows):
        row = refs["rows"][line : line + 1, :]
        if name == "first":
            conditions.append(row <= keys)
        elif name == "last":
            conditions.append(keys <= row)
        elif name == "ids":
            conditions.append(row == refs["key_ids"][...])
    if tile.k_length is not None and "last" not in tile.rows:
        conditions.append(keys < tile.k_length)
    if "mask" in refs:
        conditions.append(_transposed(tile, refs["mask"]) != 0)
    if bias is not None:
        conditions.append(bias != -jnp.inf)
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def hide(visible: jax.Array | None, x: jax.Array) -> jax.Array:
    """Return x, 0 where a pair is hidden, whatever x holds there (S4)."""
    return x if visible is None else jnp.where(visible, x, jnp.float32(0))


def drop(tile: Tile, refs: Refs, at: Any, x: jax.Array) -> jax.Array:
    """Return x [k, q], 0 at dropped pairs; kept ones are scaled later, by `keep_scale` (clauses S12, S29)."""
    if "seed" not in refs:
        return x
    low, high, of_batch, of_head, of_row, of_key = (refs["seed"][word] for word in range(6))
    seed = (low.astype(jnp.uint32), high.astype(jnp.uint32))
    first_group = at.k * (tile.k // 4) + lax.shift_right_logical(of_key, 2)
    # The origin of what is shared is 0, too (S29).
    head = of_head if "h" in tile.dropout_shared else at.head + of_head
    batch = of_batch if "b" in tile.dropout_shared else at.batch + of_batch
    threshold = jnp.uint32(least_kept(tile.dropout_prob))
    kept = refs["kept"]
    columns, _, lanes = kept.shape
    shape = (tile.k // 4, lanes)
    groups, rows = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    # Zeros, each of its own: Mosaic gives a loop's carry that begins as copies of one row a layout that
    # cannot hold what the loop makes of it.
    zeros = (groups + rows) >> 31
    for column in range(columns):
        row = at.q * tile.q + column * lanes + of_row
        counter = (first_group + groups, row + rows, head, batch)
        c0, c1, c2, c3 = ((zeros + word).astype(jnp.uint32) for word in counter)
        # Word w of group g decides about key 4 g + w: stored with a stride, and read back in order.
        for number, word in enumerate(philox4x32((c0, c1, c2, c3), seed)):
            keeps = jnp.where(word >= threshold, jnp.float32(1), jnp.float32(0))
            kept[column, pl.ds(number, tile.k // 4, stride=4), :] = keeps
    keeps = jnp.concatenate([kept[column] for column in range(columns)], axis=1)
    return jnp.where(keeps > 0, x, jnp.float32(0))


def kept_scratch(tile: Tile) -> tuple[int, int, int]:
    """Return the shape of what `drop` writes to: as many lanes at a time as a strided store takes."""
    lanes = math.gcd(tile.q, LANES)
    return tile.q // lanes, tile.k, lanes


def keep_scale(tile: Tile) -> jax.Array:
    """Return the factor of a kept pair."""
    return jnp.float32(1 / (1 - tile.dropout_prob))


def _transposed(tile: Tile, ref: Any) -> jax.Array:
    """Return a tile of a mask or bias, [q or 1, k or 1] in memory, as [k, q] float32."""
    return jnp.broadcast_to(ref[...].astype(jnp.float32), (tile.q, tile.k)).T
