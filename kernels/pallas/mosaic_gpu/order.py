"""The order of tiles: which tile each program of a Hopper kernel takes, so that all programs end together.

In causal order tiles differ in length. Long tiles come first, so that short ones fill the gaps at the end.
Tiles of all heads at once would read the keys and values of all heads at once, so heads are taken in groups
whose keys and values the L2 cache holds, as in FlashAttention-3 (Shah and others, arXiv 2407.08608).
"""

from functools import cache
from heapq import heapify, heapreplace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attest.kernels.pallas.mosaic_gpu.blocks import L2_BYTES, TILE_BLOCKS
from attest.kernels.pallas.mosaic_gpu.spans import key_span
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec


def rows_first(spec: KernelSpec, tile: Any) -> tuple[Any, Any, Any]:
    """Return the entry, the query head and the block of queries of a tile, a block that sees most first."""
    entry, head, nth = _longest_first(tile, spec.entries, spec.heads, spec.q_blocks, _query_heads(spec))
    return entry, head, spec.q_blocks - 1 - nth


def keys_first(spec: KernelSpec, tile: Any) -> tuple[Any, Any, Any]:
    """Return the entry, the key head and the block of keys of a tile, a block that most rows see first."""
    visited = spec.group * _bytes(spec, spec.q_length)
    together = max(1, L2_BYTES // visited) if spec.causal else 1
    return _longest_first(tile, spec.entries, spec.key_heads, spec.k_blocks, together)


@cache
def schedule(spec: KernelSpec, programs: int) -> np.ndarray:
    """Return the tiles of each program of a persistent forward kernel in causal order: [programs, n] int32.

    The first number of a row is how many tiles follow; `rows_first` locates them. Each tile goes to the
    program that has least to do so far.
    """
    tiles = np.arange(spec.entries * spec.heads * spec.q_blocks)
    with jax.ensure_compile_time_eval():
        _, _, block = rows_first(spec, jnp.asarray(tiles, jnp.int32))
        start, _, _, stop = key_span(spec, {}, None, block)
        blocks = np.broadcast_to(jnp.maximum(stop - start, 1), block.shape).tolist()
    mine: list[list[int]] = [[] for _ in range(programs)]
    ends = [(0, program) for program in range(programs)]
    heapify(ends)
    for tile, length in enumerate(blocks):
        end, program = ends[0]
        mine[program].append(tile)
        heapreplace(ends, (end + length + TILE_BLOCKS, program))
    table = np.zeros((programs, 1 + max(map(len, mine))), np.int32)
    for row, own in zip(table, mine, strict=True):
        row[0], row[1 : 1 + len(own)] = len(own), own
    return table


def _query_heads(spec: KernelSpec) -> int:
    """How many query heads are taken together: those that read as many key heads as the L2 cache holds."""
    return max(1, L2_BYTES // _bytes(spec, spec.k_length)) * spec.group if spec.causal else 1


def _bytes(spec: KernelSpec, length: int) -> int:
    """The bytes of two operands of a head: of head_dim and of value_dim."""
    return max(1, length) * (spec.head_dim + spec.value_dim) * np.dtype(spec.dtype).itemsize


def _longest_first(tile: Any, entries: int, heads: int, blocks: int, together: int) -> tuple[Any, Any, Any]:
    """The entry, the head and the place of a tile: by groups of `together` heads, then place, then head."""
    total = entries * heads
    together = min(together, total)
    group = lax.div(tile, together * blocks)
    rest = lax.rem(tile, together * blocks)
    # The last group may have fewer heads.
    members = together if total % together == 0 else jnp.minimum(together, total - group * together)
    at = group * together + lax.rem(rest, members)
    return lax.div(at, heads), lax.rem(at, heads), lax.div(rest, members)
