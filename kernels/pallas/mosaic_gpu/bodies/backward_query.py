"""The Hopper kernel of dquery: a program owns `consumers` * 64 query rows of a head.

One warpgroup, the producer, copies K and V blocks, into a ring of slots each; each of the others holds 64
rows of Q and dO, recomputes P from the lse, and sums dS K. Every sum has one owner and one order (S17).

`lse` is in units of `Logits.reference_unit`, +inf for rows that see no key, whose P is then 0; `delta` is
rowsum(dO * O) less the cotangent of lse. Both are subtracted before the products that they belong to, where
nothing comes between: accumulators begin at them. Under dropout delta waits, for the pairs that are kept.

Papers: Dao, arXiv 2307.08691; Shah and others, arXiv 2407.08608.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from attest.kernels.pallas.mosaic_gpu.blocks import ROWS, BackwardBlocks
from attest.kernels.pallas.mosaic_gpu.bodies import repair, repair_tile
from attest.kernels.pallas.mosaic_gpu.launch.scratch import (
    consumer_signal,
    key_copies,
    own_pieces,
    own_value_pieces,
    query_pair_full,
    ring_of_pieces,
    slot_empty,
    value_full,
    value_ring_of_pieces,
    value_slot_empty,
)
from attest.kernels.pallas.mosaic_gpu.launch.transfers import start_load, start_store, write_pieces
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import (
    PROGRAM,
    barriers,
    signal_next,
    start_key_value_copies,
    start_ping_pong,
    warp_specialize,
)
from attest.kernels.pallas.mosaic_gpu.schedule.integers import unknown
from attest.kernels.pallas.mosaic_gpu.schedule.order import locate_query_tile
from attest.kernels.pallas.mosaic_gpu.schedule.spans import Span, key_span, over_keys
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tile import pairs
from attest.kernels.pallas.mosaic_gpu.tile.dropout import kept_pairs, load_words, of_kept_pairs
from attest.kernels.pallas.mosaic_gpu.tile.products import accumulators, start_product, start_sums
from attest.kernels.pallas.mosaic_gpu.tile.tile import Tile, cotangents, leaked, load_bounds, opaque, weights

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private


def _key_full(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    """Return barriers of blocks of K, with the tiles of a mask and a bias."""
    return barriers(blocks.stages, key_copies(spec, blocks.step)[0] + pairs.copies_of_slot(spec, blocks))


@dataclass(frozen=True)
class Shared:
    """The shared state of a program's warpgroups: tiles, and barriers that tell when they are full or empty.

    query [consumers, 64, D]; d_out [consumers, 64, Dv]; key [stages, step, D]; value [value_slots, step, Dv];
    mask, bias: see `pairs`. A ring's barriers have an entry for each slot; own_full and ping_pong, for each
    consumer.
    """

    query: Annotated[Any, own_pieces]
    d_out: Annotated[Any, own_value_pieces]
    key: Annotated[Any, ring_of_pieces]
    value: Annotated[Any, value_ring_of_pieces]
    own_full: Annotated[Any, query_pair_full]
    key_full: Annotated[Any, _key_full]
    key_empty: Annotated[Any, slot_empty]
    value_full: Annotated[Any, value_full]
    value_empty: Annotated[Any, value_slot_empty]
    ping_pong: Annotated[Any, consumer_signal]
    mask: Annotated[Any, pairs.ring_of_queries("mask")] = None
    bias: Annotated[Any, pairs.ring_of_queries("bias")] = None
    marks: Annotated[Any, repair.marks] = None
    ended: Annotated[Any, repair.ended] = None
    of_repair: Annotated[Any, repair.room()] = None


def backward_query(
    spec: KernelSpec,
    blocks: BackwardBlocks,
    arrays: Mapping[str, Any],
    outputs: Mapping[str, Any],
    shared: Shared,
    tile: Any = None,
) -> None:
    """Run the body of the kernel. outputs: d_query. tile: if not that of the program."""
    batch, head, block = locate_query_tile(spec, lax.axis_index(PROGRAM) if tile is None else tile)
    span = key_span(spec, arrays, batch, block)

    def produce() -> None:
        _produce(spec, blocks, arrays, shared, (batch, head, block), span)

    def consume(warpgroup: Any) -> None:
        row = block * blocks.own + warpgroup * ROWS
        held = Tile(spec, arrays, batch, head, row, key=None, words=load_words(arrays))
        _consume(blocks, outputs, shared, warpgroup, held, span)
        repair.signal_end(spec, shared, warpgroup, blocks)

    of_tiles, own = repair.of_tiles(spec, blocks), (batch, head, block)
    compute = partial(repair_tile.d_query, None, of_tiles, {**arrays, **outputs}, shared.of_repair)
    after = repair.repair_of_tile(spec, shared, blocks, own, spec.shape.q_length, compute)
    warp_specialize(blocks, produce, consume, after=after)


def _produce(
    spec: KernelSpec,
    blocks: BackwardBlocks,
    arrays: Mapping[str, Any],
    shared: Shared,
    owner: tuple[Any, Any, Any],
    span: Span,
) -> None:
    """Start copies of the K and V blocks of a batch row, head and row block, each when its slot is empty."""
    batch, head, block = owner
    start, _, _, stop = span

    def step(j: Any, _: None) -> None:
        keys = pl.ds(j * blocks.step, blocks.step)

        def of_pairs(i: int) -> tuple[Any, Any, Any, Any]:
            return batch, head, pl.ds(block * blocks.own + i * ROWS, ROWS), keys

        at = (batch, keys, lax.div(head, spec.shape.group))
        beside_key = pairs.copies(spec, blocks, arrays, shared, of_pairs)
        # Else the compiler peels the first steps, and ptxas gave the second block of V wrong coordinates.
        (count,) = unknown(j - start)
        start_key_value_copies(blocks, arrays, shared, at, count, beside_key)

    lax.fori_loop(start, stop, step, None)


def _consume(
    blocks: BackwardBlocks, outputs: Mapping[str, Any], shared: Shared, warpgroup: Any, tile: Tile, span: Span
) -> None:
    """Sum and store dquery of 64 rows."""
    spec, arrays = tile.spec, tile.arrays
    own = (tile.batch, tile.queries, tile.head)
    for name, room in (("query", shared.query), ("d_out", shared.d_out)):
        start_load(arrays[name], own, room, warpgroup, shared.own_full.at[warpgroup])
    tile = replace(tile, bounds=load_bounds(tile))
    at = (tile.batch, tile.head, tile.queries)
    lse, delta = (tile.load_by_query(arrays[name].at[at]) for name in ("lse", "delta"))
    if blocks.ping_pong:
        start_ping_pong(shared.ping_pong, warpgroup, blocks.consumers)
    plgpu.barrier_wait(shared.own_full.at[warpgroup])

    def run(*accs: Any) -> tuple[jax.Array, ...]:
        step = partial(_step, blocks, shared, warpgroup, tile, span[0], lse, delta, accs)
        over_keys(spec, span, span[0], step, None)
        return tuple(acc[...] for acc in accs)

    total = pl.run_scoped(run, *accumulators(ROWS, spec.shape.head_pieces))
    if spec.hides:
        shared.marks.at[warpgroup][...] = sum(map(leaked, total))
    if spec.results.unrounded:
        write_pieces(outputs["d_query"], own, tuple(x * spec.logits.scale for x in total))
        return
    for room, x in zip(shared.query.tiles, total, strict=True):
        room.at[warpgroup][...] = (x * spec.logits.scale).astype(spec.dtype)
    plgpu.commit_smem()
    start_store(shared.query, warpgroup, spec.shape.head_dim, outputs["d_query"], own)
    plgpu.wait_smem_to_gmem(0)


def _step(
    blocks: BackwardBlocks,
    shared: Shared,
    warpgroup: Any,
    tile: Tile,
    start: Any,
    lse: jax.Array,
    delta: jax.Array,
    total: tuple[Any, ...],
    compared: bool,
    j: Any,
    _: None,
) -> None:
    """Add dS K of block j to the total."""
    spec = tile.spec
    count = j - start
    slots = lax.rem(count, blocks.stages), lax.rem(count, blocks.value_slots)
    me, slot, of_value = opaque(spec, warpgroup, *slots)
    held = pairs.tiles_of_slot(spec, blocks, shared, me, slot)
    tile = replace(tile, key=j * blocks.step, pairs=held)

    def run(s: Any, dp: Any) -> jax.Array:
        plgpu.barrier_wait(shared.key_full.at[slot])
        if blocks.ping_pong:
            plgpu.barrier_wait(shared.ping_pong.at[warpgroup])
        # Both before the first product: what is written between two holds up the first.
        if spec.logits.folds_lse:
            s[...] = tile.by_query(lse)
        if not spec.dropout:
            dp[...] = tile.by_query(delta)
        start_product(s, shared.query, me, shared.key, slot)
        plgpu.barrier_wait(shared.value_full.at[of_value])
        start_product(dp, shared.d_out, me, shared.value, of_value)
        if blocks.ping_pong:
            signal_next(shared.ping_pong, warpgroup, blocks.consumers)
        pairs_kept = kept_pairs(tile)
        score = plgpu.wgmma_accumulator_load(s, wait_n=len(spec.shape.value_pieces))
        p, slope = lax.optimization_barrier(
            weights(tile, score, None if spec.logits.folds_lse else lse, compared)
        )
        found = plgpu.wgmma_accumulator_load(dp, wait_n=0)
        plgpu.barrier_arrive(shared.value_empty.at[of_value])
        if spec.dropout:
            found = of_kept_pairs(found, pairs_kept, tile.by_query(delta))
        return cotangents(p, slope, found, compared).astype(spec.dtype)

    acc = plgpu.ACC(tile.shape, jnp.float32)
    ds = pl.run_scoped(run, acc, acc)
    start_sums(total, ds, shared.key, slot)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(shared.key_empty.at[slot])
