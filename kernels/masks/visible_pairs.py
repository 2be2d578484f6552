"""Positions and visibility of a MaskInfo, as arrays (clauses S5 to S9, S23, S24, S28)."""

from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attest.kernels.masks.conditions import Conditions
from attest.kernels.masks.sizes import Sizes

# Positions lie in [-2**30, 2**30): their differences reach no farther, and larger sizes change nothing.
_FARTHEST = 2**31 - 1
_LARGEST_CHUNK = 2**30


class Tokens(NamedTuple):
    """The place of tokens in their sequences, int32 [B or 1, S] both."""

    sequence: jax.Array  # its number, -1 past the sequences
    place: jax.Array  # the index in the sequence


def tokens_of(cum: jax.Array, packed: bool, length: int) -> Tokens:
    """Return the sequence and the index in it of each of `length` tokens (S9)."""
    index = jnp.arange(length, dtype=jnp.int32)
    count = cum.shape[0] - 1
    if packed:
        sequence = jnp.searchsorted(cum, index, side="right").astype(jnp.int32) - 1
        sequence = jnp.clip(sequence, 0, count - 1)
        inside = index < cum[-1]
        return Tokens(jnp.where(inside, sequence, jnp.int32(-1))[None], (index - cum[sequence])[None])
    numbers = jnp.arange(count, dtype=jnp.int32)[:, None]
    inside = index[None] < jnp.diff(cum)[:, None]
    return Tokens(jnp.where(inside, numbers, jnp.int32(-1)), jnp.broadcast_to(index[None], (count, length)))


def positions_of(info: Conditions, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Return the positions of rows and keys, int32 [B or 1, Sq] and [B or 1, Sk] (S23)."""
    return _row_positions(info, sizes), _key_positions(info, sizes)


def _key_positions(info: Conditions, sizes: Sizes) -> jax.Array:
    if info.kv_positions is not None:
        return info.kv_positions
    if info.cum_seqlens_k is not None:
        return tokens_of(info.cum_seqlens_k, info.packed, sizes.keys()).place
    return jnp.arange(sizes.keys(), dtype=jnp.int32)[None]


def _row_positions(info: Conditions, sizes: Sizes) -> jax.Array:
    if info.q_positions is not None:
        return info.q_positions
    rows = jnp.arange(sizes.queries(), dtype=jnp.int32)[None]
    if info.cum_seqlens_q is None or info.cum_seqlens_k is None:
        if info.q_offset is not None:
            return rows + info.q_offset[:, None]
        return rows + jnp.int32(sizes.keys() - sizes.queries())
    tokens = tokens_of(info.cum_seqlens_q, info.packed, sizes.queries())
    offset = info.q_offset
    if offset is None:
        offset = jnp.diff(info.cum_seqlens_k) - jnp.diff(info.cum_seqlens_q)
    elif offset.shape[0] == 1:
        return tokens.place + offset[:, None]
    if info.packed:
        return tokens.place + offset[jnp.maximum(tokens.sequence, 0)]
    return tokens.place + offset[:, None]


def same_chunk(chunk: int, rows: jax.Array, keys: jax.Array) -> jax.Array:
    """Return which pairs lie in one chunk of positions, [B or 1, 1, Sq, Sk] bool (S24)."""
    return down(chunk_of(rows, chunk)) == across(chunk_of(keys, chunk))


def chunk_of(positions: jax.Array, chunk: int) -> jax.Array:
    """Return the number of the chunk that each position is in, rounded down: -1 lies in chunk -1."""
    return positions // jnp.int32(min(chunk, _LARGEST_CHUNK))


def visible_pairs(info: Conditions, sizes: Sizes) -> jax.Array | None:
    """Return which pairs are visible, [B or 1, H or 1, Sq or 1, Sk or 1] bool; None where all are (S5)."""
    conditions: list[jax.Array] = []
    if info.attention_mask is not None:
        conditions.append(info.attention_mask)
    if info.q_segment_ids is not None and info.kv_segment_ids is not None:
        conditions.append(_same(info.q_segment_ids, info.kv_segment_ids))
    if info.cum_seqlens_q is not None and info.cum_seqlens_k is not None:
        rows = tokens_of(info.cum_seqlens_q, info.packed, sizes.queries())
        keys = tokens_of(info.cum_seqlens_k, info.packed, sizes.keys())
        conditions.append(_same(rows.sequence, keys.sequence))
    if info.kv_lengths is not None:
        conditions.append(across(within(info.kv_lengths, sizes.keys())))
    if info.kv_start is not None:
        conditions.append(down(info.kv_start) <= _index(sizes))
    if info.kv_end is not None:
        conditions.append(_index(sizes) < down(info.kv_end))
    conditions += _by_position(info, sizes)
    return reduce(jnp.logical_and, conditions) if conditions else None


def _index(sizes: Sizes) -> jax.Array:
    return across(jnp.arange(sizes.keys(), dtype=jnp.int32)[None])


def within(lengths: jax.Array, length: int) -> jax.Array:
    """Return which of `length` tokens come before the length of their batch entry, [B or 1, S] bool."""
    return jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None]


def _by_position(info: Conditions, sizes: Sizes) -> list[jax.Array]:
    """Return the conditions that compare positions: causal order, windows and chunks."""
    left, right = info.sliding_window
    if not (info.causal or info.chunk_sizes or left is not None or right is not None):
        return []
    rows, keys = positions_of(info, sizes)
    ahead = across(keys) - down(rows)
    conditions = [same_chunk(chunk, rows, keys) for chunk in info.chunk_sizes]
    if info.causal:
        conditions.append(ahead <= 0)
    if left is not None:
        conditions.append(ahead >= -min(left, _FARTHEST))
    if right is not None:
        conditions.append(ahead <= min(right, _FARTHEST))
    return conditions


def _same(q_ids: jax.Array, kv_ids: jax.Array) -> jax.Array:
    """Return pairs of equal ids that are not padding (S8)."""
    return (down(q_ids) == across(kv_ids)) & (across(kv_ids) >= 0)


def down(x: jax.Array) -> jax.Array:
    """Return what rows have, [B or 1, Sq], as [B or 1, 1, Sq, 1]."""
    return x[:, None, :, None]


def across(x: jax.Array) -> jax.Array:
    """Return what keys have, [B or 1, Sk], as [B or 1, 1, 1, Sk]."""
    return x[:, None, None, :]
