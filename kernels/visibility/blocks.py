"""Block ranges: the key blocks that a block of queries visits, and the converse.

Four numbers describe the blocks that one block visits: start <= full_start <= full_stop <= stop. Those in
[start, stop) hold some visible pair; those in [full_start, full_stop) are visible in every pair, so that a
kernel compares nothing there. Blocks outside are hidden, so that skipping them changes nothing (clause S18).

Masks and biases are not read: with one of them every block that is visited must be compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.call.call import Call
from attest.kernels.visibility.intervals import Rows


@dataclass(frozen=True)
class _Tiles:
    """The facts of every (query block, key block): arrays [N, query blocks, key blocks] or broadcast."""

    visited: jax.Array  # some pair may be visible
    full: jax.Array  # every pair is visible


def key_blocks(call: Call, rows: Rows, block_q: int, block_k: int) -> jax.Array | None:
    """Return the key blocks that each block of queries visits: [N, query blocks, 4] int32, N as in `Rows`.

    None where at most a mask or bias restricts the call. A NumPy array if the arrays of `Rows` are.
    """
    xp = _module(rows)
    tiles = _tiles(call, rows, block_q, block_k, xp)
    return None if tiles is None else _describe(tiles, 2, xp)


def query_blocks(call: Call, rows: Rows, block_q: int, block_k: int) -> jax.Array | None:
    """Return the query blocks that visit each block of keys: [N, key blocks, 4] int32, or None likewise."""
    xp = _module(rows)
    tiles = _tiles(call, rows, block_q, block_k, xp)
    return None if tiles is None else _describe(tiles, 1, xp)


def _module(rows: Rows) -> Any:
    """Return the module of the arrays of rows."""
    some = rows.last if rows.first is None else rows.first
    return np if isinstance(some, np.ndarray) else jnp


def _tiles(call: Call, rows: Rows, block_q: int, block_k: int, xp: Any) -> _Tiles | None:
    k_length = call.key.shape[1]
    if rows.first is None and rows.last is None and call.q_segment_ids is None:
        return None
    some = rows.first if rows.first is not None else rows.last
    if some is None:
        some = xp.zeros((1, call.query.shape[1]), np.int32)
    first = xp.zeros_like(some) if rows.first is None else xp.maximum(rows.first, 0)
    last = xp.full_like(some, k_length - 1) if rows.last is None else xp.minimum(rows.last, k_length - 1)
    # A row that sees nothing widens no range, and leaves its block nothing that all rows see.
    sees = first <= last
    lowest = _blockwise(xp.where(sees, first, k_length), block_q, xp.min, k_length, xp)
    highest = _blockwise(xp.where(sees, last, -1), block_q, xp.max, -1, xp)
    last_start = _blockwise(xp.where(sees, first, k_length), block_q, xp.max, 0, xp)
    first_stop = _blockwise(xp.where(sees, last, -1), block_q, xp.min, k_length - 1, xp)
    # A block past the end of the keys is none: its keys' indices begin at k_length.
    block = xp.arange(-(-k_length // block_k), dtype=np.int32)[None, None, :] * block_k
    visited = (lowest[..., None] < block + block_k) & (block <= highest[..., None])
    full = (last_start[..., None] <= block) & (block + block_k - 1 <= first_stop[..., None])
    if call.q_segment_ids is not None and call.kv_segment_ids is not None:
        # Ids below 0 are padding; they meet nothing.
        q_low, q_high = _extremes(call.q_segment_ids, block_q, xp)
        k_low, k_high = _extremes(call.kv_segment_ids, block_k, xp)
        q_low, q_high, k_low, k_high = q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None]
        visited = visited & (q_low <= k_high) & (k_low <= q_high) & (q_high >= 0) & (k_high >= 0)
        full = full & (q_low == q_high) & (k_low == k_high) & (q_low == k_low) & (q_low >= 0)
    return _Tiles(visited, full & visited)


def _describe(tiles: _Tiles, axis: int, xp: Any) -> jax.Array:
    """Return [N, blocks, 4] int32: the span of visited blocks along an axis, and its run of full blocks."""
    start, stop, _ = _span(tiles.visited, axis, xp)
    full_start, full_stop, count = _span(tiles.full, axis, xp)
    # Full blocks with a gap among them count as partial, all of them.
    run = (count > 0) & (count == full_stop - full_start)
    full_start = xp.where(run, full_start, start)
    full_stop = xp.where(run, full_stop, start)
    return xp.stack((start, full_start, full_stop, stop), axis=-1)


def _span(flags: jax.Array, axis: int, xp: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the first True along an axis, one past the last, and how many; 0, 0, 0 where there is none."""
    size = flags.shape[axis]
    index = xp.arange(size, dtype=np.int32).reshape((1, -1, 1) if axis == 1 else (1, 1, -1))
    start = xp.where(flags, index, size).min(axis=axis)
    stop = xp.where(flags, index + 1, 0).max(axis=axis)
    return xp.where(stop == 0, 0, start), stop, flags.sum(axis=axis, dtype=np.int32)


def _extremes(ids: jax.Array, block: int, xp: Any) -> tuple[jax.Array, jax.Array]:
    """Return the smallest and largest segment id of every block of tokens: two [B, blocks] int32."""
    info = np.iinfo(np.int32)
    return _blockwise(ids, block, xp.min, info.max, xp), _blockwise(ids, block, xp.max, info.min, xp)


def _blockwise(
    x: jax.Array, block: int, reduce: Callable[..., jax.Array], neutral: int, xp: Any
) -> jax.Array:
    """Return [N, S] int32 reduced within every block of S: [N, blocks]; the last block may be short."""
    blocks = -(-x.shape[1] // block)
    x = xp.pad(x, ((0, 0), (0, blocks * block - x.shape[1])), constant_values=neutral)
    return reduce(x.reshape(x.shape[0], blocks, block), axis=2)
