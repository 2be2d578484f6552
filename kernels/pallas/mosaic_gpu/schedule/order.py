"""The order of tiles: which tile each program of a Hopper kernel takes, so that all programs end together.

In causal order tiles differ in length, and long ones come first: `attest.kernels.visibility.tile_order`.
"""

from functools import lru_cache
from heapq import heapify, heapreplace
from typing import Any

import numpy as np

from attest.kernels.pallas.mosaic_gpu.blocks import TILE_BLOCKS
from attest.kernels.pallas.mosaic_gpu.schedule.integers import div, minimum, rem
from attest.kernels.pallas.mosaic_gpu.schedule.spans import key_span, locate
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.visibility.tile_order import (
    balanced_heads_together,
    key_heads_together,
    query_heads_together,
)


def locate_query_tile(spec: KernelSpec, tile: Any) -> tuple[Any, Any, Any]:
    """Return the entry, the query head and the block of queries of a tile, a block that sees most first."""
    shape = spec.shape
    sizes = (shape.q_blocks, shape.heads, shape.entries)
    if _by_length(spec):
        together = query_heads_together(shape.k_length, shape.group, _row_bytes(spec))
        entry, head, nth = _longest_first(tile, *sizes, together)
    else:
        entry, head, nth = locate_sharers(spec, tile, *sizes)
    return entry, head, shape.q_blocks - 1 - nth


def locate_key_tile(spec: KernelSpec, tile: Any) -> tuple[Any, Any, Any]:
    """Return the entry, the key head and the block of keys of a tile, a block that most rows see first."""
    shape = spec.shape
    sizes = (shape.k_blocks, shape.key_heads, shape.entries)
    if not _by_length(spec):
        return locate_sharers(spec, tile, *sizes)
    return _longest_first(tile, *sizes, _key_heads_together(spec, _row_bytes(spec)))


def locate_fused_tile(spec: KernelSpec, tile: Any) -> tuple[Any, Any, Any]:
    """Return the place of a tile of a kernel whose programs of a head add to dquery one after another.

    Programs of other heads start between them, so that fewer wait. The sums, too, are to be in the cache.
    """
    shape = spec.shape
    row_bytes = _row_bytes(spec) + np.dtype(np.float32).itemsize * shape.head_dim
    together = _key_heads_together(spec, row_bytes)
    return _longest_first(tile, shape.k_blocks, shape.key_heads, shape.entries, together)


def locate_sharers(
    spec: KernelSpec, tile: Any, blocks: int, heads: int, entries: int
) -> tuple[Any, Any, Any]:
    """Return the entry, the head and the place of a tile: sharers of tiles of a mask or bias run together.

    The first of them then reads a tile from memory, and the others from the cache.
    """
    tiled = spec.tiled_pairs.values()
    if not tiled:
        return locate(tile, blocks, heads)
    by_batch, by_head = any(x.by_batch for x in tiled), any(x.by_head for x in tiled)
    # A stable sort: what shares is first, and else blocks are, then heads.
    axes = sorted(
        [("block", blocks, True), ("head", heads, by_head), ("entry", entries, by_batch)],
        key=lambda axis: axis[2],
    )
    found: dict[str, Any] = {}
    for name, size, _ in axes:
        found[name], tile = rem(tile, size), div(tile, size)
    return found["entry"], found["head"], found["block"]


@lru_cache(maxsize=256)
def schedule(spec: KernelSpec, programs: int) -> np.ndarray:
    """Return the tiles of each program of a persistent forward kernel in causal order: [programs, n] int32.

    The first number of a row is how many tiles follow, of `locate_query_tile`. Each tile goes to the program
    that has least to do so far.
    """
    shape = spec.shape
    tiles = np.arange(shape.entries * shape.heads * shape.q_blocks)
    _, _, block = locate_query_tile(spec, tiles)
    start, _, _, stop = key_span(spec, {}, None, block)
    blocks = np.broadcast_to(np.maximum(stop - start, 1), block.shape).tolist()
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


def _by_length(spec: KernelSpec) -> bool:
    """Return whether long tiles come first: not where sharing tiles of a mask or bias decides the order."""
    return spec.visibility.causal and not spec.tiled_pairs


def _key_heads_together(spec: KernelSpec, row_bytes: int) -> int:
    """Return how many key heads are taken together: those that fit the cache, or more in causal order."""
    shape = spec.shape
    together = key_heads_together(shape.q_length, shape.group, row_bytes)
    if not spec.visibility.causal:
        return together
    return balanced_heads_together(together, shape.entries * shape.key_heads, shape.k_blocks)


def _row_bytes(spec: KernelSpec) -> int:
    """Return the bytes of a row of two operands: one of head_dim, one of value_dim."""
    return (spec.shape.head_dim + spec.shape.value_dim) * np.dtype(spec.dtype).itemsize


def _longest_first(tile: Any, blocks: int, heads: int, entries: int, together: int) -> tuple[Any, Any, Any]:
    """Return the entry, head and place of a tile: by groups of `together` heads, then place, then head."""
    total = entries * heads
    together = min(together, total)
    group = div(tile, together * blocks)
    rest = rem(tile, together * blocks)
    # The last group may have fewer heads.
    members = together if total % together == 0 else minimum(together, total - group * together)
    at = group * together + rem(rest, members)
    return div(at, heads), rem(at, heads), div(rest, members)
