"""Block ranges: the key blocks that a block of queries visits, and the converse.

Four numbers describe the blocks that one block visits: start <= full_start <= full_stop <= stop. Those in
[start, stop) hold some visible pair; those in [full_start, full_stop) are visible in every pair, so that a
kernel compares nothing there. Blocks outside are hidden, so that skipping them changes nothing (clause S18).

Masks and biases are not looked at: with one of them every block that is visited must be compared.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attest.kernels.arguments import Call
from attest.kernels.visibility import Rows


@dataclass(frozen=True)
class _Tiles:
    """What is known of every (query block, key block): arrays [N, query blocks, key blocks] or broadcast."""

    visited: jax.Array  # some pair may be visible
    full: jax.Array  # every pair is visible


def key_blocks(call: Call, rows: Rows, block_q: int, block_k: int) -> jax.Array | None:
    """Per block of queries, the key blocks it visits: [N, query blocks, 4] int32, N as in `Rows`.

    None where the call restricts nothing but by mask or bias.
    """
    tiles = _tiles(call, rows, block_q, block_k)
    return None if tiles is None else _describe(tiles, axis=2)


def query_blocks(call: Call, rows: Rows, block_q: int, block_k: int) -> jax.Array | None:
    """Per block of keys, the query blocks that visit it: [N, key blocks, 4] int32, or None likewise."""
    tiles = _tiles(call, rows, block_q, block_k)
    return None if tiles is None else _describe(tiles, axis=1)


def _tiles(call: Call, rows: Rows, block_q: int, block_k: int) -> _Tiles | None:
    k_length = call.key.shape[1]
    if rows.first is None and rows.last is None and call.q_segment_ids is None:
        return None
    some = rows.first if rows.first is not None else rows.last
    if some is None:
        some = jnp.zeros((1, call.query.shape[1]), jnp.int32)
    first = jnp.zeros_like(some) if rows.first is None else jnp.maximum(rows.first, 0)
    last = jnp.full_like(some, k_length - 1) if rows.last is None else jnp.minimum(rows.last, k_length - 1)
    # A row that sees nothing widens no range, and leaves its block nothing that all rows see.
    sees = first <= last
    lowest = _blockwise(jnp.where(sees, first, k_length), block_q, jnp.min, k_length)
    highest = _blockwise(jnp.where(sees, last, -1), block_q, jnp.max, -1)
    last_start = _blockwise(jnp.where(sees, first, k_length), block_q, jnp.max, 0)
    first_stop = _blockwise(jnp.where(sees, last, -1), block_q, jnp.min, k_length - 1)
    # A block past the end of the keys is none: its keys' indices begin at k_length.
    block = jnp.arange(-(-k_length // block_k), dtype=jnp.int32)[None, None, :] * block_k
    visited = (lowest[..., None] < block + block_k) & (block <= highest[..., None])
    full = (last_start[..., None] <= block) & (block + block_k - 1 <= first_stop[..., None])
    if call.q_segment_ids is not None and call.kv_segment_ids is not None:
        # Ids below 0 are padding; they meet nothing.
        q_low, q_high = _extremes(call.q_segment_ids, block_q)
        k_low, k_high = _extremes(call.kv_segment_ids, block_k)
        q_low, q_high, k_low, k_high = q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None]
        visited = visited & (q_low <= k_high) & (k_low <= q_high) & (q_high >= 0) & (k_high >= 0)
        full = full & (q_low == q_high) & (k_low == k_high) & (q_low == k_low) & (q_low >= 0)
    return _Tiles(visited, full & visited)


def _describe(tiles: _Tiles, axis: int) -> jax.Array:
    """[N, blocks, 4] int32: the span of what is visited along an axis, and the run of full blocks in it."""
    start, stop, _ = _span(tiles.visited, axis)
    full_start, full_stop, count = _span(tiles.full, axis)
    # Full blocks with a gap among them count as partial, all of them.
    run = (count > 0) & (count == full_stop - full_start)
    full_start = jnp.where(run, full_start, start)
    full_stop = jnp.where(run, full_stop, start)
    return jnp.stack((start, full_start, full_stop, stop), axis=-1)


def _span(flags: jax.Array, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first True along an axis, one past the last, and how many; 0, 0, 0 where there is none."""
    size = flags.shape[axis]
    index = jnp.arange(size, dtype=jnp.int32).reshape((1, -1, 1) if axis == 1 else (1, 1, -1))
    start = jnp.where(flags, index, size).min(axis=axis)
    stop = jnp.where(flags, index + 1, 0).max(axis=axis)
    return jnp.where(stop == 0, 0, start), stop, flags.sum(axis=axis, dtype=jnp.int32)


def _extremes(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The smallest and largest segment id of every block of tokens: two [B, blocks] int32."""
    info = jnp.iinfo(jnp.int32)
    return _blockwise(ids, block, jnp.min, info.max), _blockwise(ids, block, jnp.max, info.min)


def _blockwise(x: jax.Array, block: int, reduce: Callable[..., jax.Array], neutral: int) -> jax.Array:
    """[N, S] int32 reduced within every block of S: [N, blocks]; the last block may be short."""
    blocks = -(-x.shape[1] // block)
    x = jnp.pad(x, ((0, 0), (0, blocks * block - x.shape[1])), constant_values=neutral)
    return reduce(x.reshape(x.shape[0], blocks, block), axis=2)
