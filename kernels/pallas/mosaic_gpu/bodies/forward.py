"""The Hopper forward kernel: out, lse and the row maximum by TMA, WGMMA and warp specialisation.

A program's tile is `consumers` * 64 query rows of a head. One warpgroup, the producer, only copies K and V
blocks, into a ring of `stages` slots each; the others, the consumers, take 64 rows each. A consumer starts
the next S before it adds P V of the block before, so that the matrix unit works during the softmax. Ping-pong
barriers let one consumer at a time start its products, so that its softmax overlaps another's products.

Papers: Milakov and Gimelshein, arXiv 1805.02867 (online softmax); Dao, arXiv 2307.08691; Shah and others,
arXiv 2407.08608 (the overlap and the ping-pong schedule, on Hopper).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from attest.kernels.pallas.mosaic_gpu.blocks import ROWS, Blocks
from attest.kernels.pallas.mosaic_gpu.bodies import repair, repair_tile
from attest.kernels.pallas.mosaic_gpu.bodies.consumer import Consumer, Shared, query_slot, query_stage
from attest.kernels.pallas.mosaic_gpu.launch.transfers import (
    first_channels,
    start_load,
    start_store,
    write_pieces,
)
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import (
    start_copy,
    start_key_value_copies,
    start_ping_pong,
    warp_specialize,
)
from attest.kernels.pallas.mosaic_gpu.schedule.order import locate_query_tile
from attest.kernels.pallas.mosaic_gpu.schedule.spans import Span, key_span, over_keys, part_span, rows_span
from attest.kernels.pallas.mosaic_gpu.schedule.tiles import batch_and_part, over_tiles
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tile import pairs
from attest.kernels.pallas.mosaic_gpu.tile.dropout import dropped, load_words
from attest.kernels.pallas.mosaic_gpu.tile.normalize import LN2, finish, scaled
from attest.kernels.pallas.mosaic_gpu.tile.products import accumulators
from attest.kernels.pallas.mosaic_gpu.tile.softmax import nothing_known, online_softmax, rescaled
from attest.kernels.pallas.mosaic_gpu.tile.tile import BY_ROW, Tile, by_row, leaked, load, load_bounds

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private


def flash_forward(
    spec: KernelSpec, blocks: Blocks, arrays: Mapping[str, Any], outputs: Mapping[str, Any], shared: Shared
) -> None:
    """Run the body of the kernel. outputs: out, lse, row_max, leak, by name."""
    load = partial(_load_span, spec, arrays)

    def produce() -> None:
        over_tiles(spec, blocks, arrays, load, partial(_produce, spec, blocks, arrays, shared))

    def consume(warpgroup: Any) -> None:
        start_ping_pong(shared.ping_pong, warpgroup, blocks.consumers)
        if spec.hides:
            shared.marks.at[warpgroup][...] = by_row(0.0)
        work = partial(_consume, spec, blocks, arrays, outputs, shared, warpgroup)
        # With a cap registers have no room for the next tile's.
        over_tiles(spec, blocks, arrays, load if spec.logits.cap is None else lambda _: None, work)
        plgpu.wait_smem_to_gmem(0)
        repair.signal_end(spec, shared, warpgroup, blocks)

    after = partial(_repair, spec, blocks, arrays, outputs, shared) if spec.hides else None
    warp_specialize(blocks, produce, consume, after=after)


def _load_span(spec: KernelSpec, arrays: Mapping[str, Any], tile: Any) -> Span | None:
    """Return the key blocks of a tile, where arrays decide which."""
    if not spec.visibility.uses_ranges:
        return None
    entry, _, block = locate_query_tile(spec, tile)
    return key_span(spec, arrays, batch_and_part(spec, entry)[0], block)


def _visit(
    spec: KernelSpec, arrays: Mapping[str, Any], loaded: Span | None, tile: Any
) -> tuple[Any, Any, Any, Span]:
    """Return the batch row, head, row block and key blocks of a tile. loaded: None if they are not yet.

    A row block that sees nothing takes one block of keys, all hidden: no case of its own.
    """
    entry, head, block = locate_query_tile(spec, tile)
    batch, part = batch_and_part(spec, entry)
    span = key_span(spec, arrays, batch, block) if loaded is None else loaded
    start, full_start, full_stop, stop = part_span(spec, part, span)
    return batch, head, block, (start, full_start, full_stop, jnp.maximum(stop, start + 1))


def _of_rows(spec: KernelSpec, batch: Any, rows: Any, head: Any) -> tuple[Any, Any, Any]:
    """Return where rows of a head are in query and out."""
    return (batch * spec.shape.heads + head, rows, 0) if spec.shape.head_major else (batch, rows, head)


def _produce(
    spec: KernelSpec,
    blocks: Blocks,
    arrays: Mapping[str, Any],
    shared: Shared,
    nth: Any,
    tile: Any,
    loaded: Span | None,
    count: Any,
) -> Any:
    """Start copies of the query of a tile and of its K and V blocks, each when its slot is empty."""
    batch, head, block, (start, _, _, stop) = _visit(spec, arrays, loaded, tile)
    stages = blocks.query_stages
    if stages > 1:
        pl.when(nth >= stages)(lambda: plgpu.barrier_wait(shared.query_empty.at[query_stage(blocks, nth)]))
    for i in range(blocks.consumers):
        at = _of_rows(spec, batch, pl.ds(block * blocks.own + i * ROWS, ROWS), head)
        slot = query_slot(blocks, nth) + i
        start_load(arrays["query"], at, shared.query, slot, shared.query_full.at[slot])
    key_head = lax.div(head, spec.shape.group)

    def of_pairs(i: int, keys: Any) -> tuple[Any, Any, Any, Any]:
        return batch, head, pl.ds(block * blocks.own + i * ROWS, ROWS), keys

    def step(j: Any, count: Any) -> Any:
        keys = pl.ds(j * blocks.k, blocks.k)
        if spec.tiled_pairs:
            copies = pairs.copies(spec, blocks, arrays, shared, partial(of_pairs, keys=keys))
            start_copy(copies, shared.pairs_full, shared.pairs_empty, count, blocks.stages)
        start_key_value_copies(blocks, arrays, shared, (batch, keys, key_head), count)
        return count + 1

    return lax.fori_loop(start, stop, step, count)


def _consume(
    spec: KernelSpec,
    blocks: Blocks,
    arrays: Mapping[str, Any],
    outputs: Mapping[str, Any],
    shared: Shared,
    warpgroup: Any,
    nth: Any,
    tile: Any,
    loaded: Span | None,
    count: Any,
) -> Any:
    """Compute and store 64 rows of a tile."""
    batch, head, block, span = _visit(spec, arrays, loaded, tile)
    row = block * blocks.own + warpgroup * ROWS
    held = Tile(spec, arrays, batch, head, row, key=None, words=load_words(arrays))
    held = replace(held, bounds=load_bounds(held))

    own = rows_span(spec, span, row)

    def run(*acc: Any) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array, Any]:
        consumer = Consumer(spec, blocks, shared, warpgroup, nth, held, acc)
        acc, m, norm, taken = _attend(consumer, own, count)
        taken = lax.fori_loop(own[3], span[3], lambda _, taken: consumer.skip_block(taken), taken)
        return acc, m, norm, taken

    acc, m, norm, count = pl.run_scoped(run, *accumulators(ROWS, spec.shape.value_pieces))
    # Anew, so that registers need not hold through the loop what follows from the number of the tile.
    entry, head, block = locate_query_tile(spec, lax.optimization_barrier(tile))
    rows = pl.ds(block * blocks.own + warpgroup * ROWS, ROWS)
    if spec.hides:
        leak = sum(map(leaked, acc))
        outputs["leak"][entry, head, rows] = leak
        marks = shared.marks.at[warpgroup]
        marks[...] = load(marks, BY_ROW) + leak
    # Short of the maximum by up to SLACK where no reference is exact; then all that is read of it is -inf.
    row_max = m if spec.results.partial else m * (LN2 * spec.logits.reference_unit)
    outputs["row_max"][entry, head, rows] = jnp.where(norm == 0.0, -jnp.inf, row_max)
    lse, factor = finish(spec, arrays, head, m, norm)
    outputs["lse"][entry, head, rows] = lse
    if spec.results.partial or spec.results.unrounded:
        at = (entry, head, rows) if spec.results.partial else (entry, rows, head)
        write_pieces(outputs["out"], at, tuple(scaled(spec, x, factor) for x in acc))
        return count
    # The query is read no more: its slot is the room for out.
    slot = query_slot(blocks, nth) + warpgroup
    for room, x in zip(shared.query.tiles, acc, strict=True):
        first_channels(room.at[slot], x.shape[1])[...] = scaled(spec, x, factor).astype(spec.dtype)
    plgpu.commit_smem()
    at = _of_rows(spec, entry, rows, head)
    start_store(shared.query, slot, spec.shape.value_dim, outputs["out"], at)
    return count


def _repair(
    spec: KernelSpec, blocks: Blocks, arrays: Mapping[str, Any], outputs: Mapping[str, Any], shared: Shared
) -> None:
    """Compute anew the rows of a program's tiles that a hidden value has reached."""
    of_tiles = repair.of_tiles(spec, blocks)
    compute = partial(repair_tile.out, blocks, of_tiles, {**arrays, **outputs}, shared.of_repair)

    def of_tile(_: Any, tile: Any, __: None, count: Any) -> Any:
        entry, head, block = locate_query_tile(spec, tile)

        def of_consumer(i: Any) -> None:
            rows = block * blocks.consumers + i
            leak = outputs["leak"].at[entry, head, pl.ds(rows * ROWS, ROWS)]
            exist = rows < of_tiles.shape.q_blocks
            pl.when(repair.marked(leak) & exist)(lambda: compute((entry, head, rows)))

        repair_tile.each(blocks.consumers, of_consumer)
        return count

    # The marks are those of all tiles; which of them have one is in memory.
    repair.repair(shared, blocks, lambda: over_tiles(spec, blocks, arrays, lambda _: None, of_tile))


def _attend(
    consumer: Consumer, span: Span, count: Any
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array, Any]:
    """Return acc = sum of P V, the reference, the norm, over the key blocks of a span; blocks taken."""
    spec, blocks, shared = consumer.spec, consumer.blocks, consumer.shared
    start = span[0]
    consumer.wait_for_query()

    slot = consumer.slot(count)
    known = nothing_known(spec, blocks.partial_sums)
    score, kept = _score(consumer, slot, start)
    consumer.release_query_before()
    first = online_softmax(consumer.tile_of(slot, start), score, first_compared(spec, span), known)
    if spec.tiled_pairs:
        first = lax.optimization_barrier(first)
        consumer.release_pairs(slot)
    plgpu.barrier_wait(shared.value_full.at[slot])
    carry = (dropped(first.p.astype(spec.dtype), kept), first.known, count + 1)
    carry = over_keys(spec, span, start + 1, partial(_step, consumer), carry)
    p, known, count = carry

    slot = consumer.slot(count - 1)
    consumer.start_sums(p, slot)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(shared.value_empty.at[slot])
    norm = known.whole_norm()
    return tuple(acc[...] for acc in consumer.acc), known.level(spec), norm, count


def first_compared(spec: KernelSpec, span: Span) -> Any:
    """Return whether the first block is compared: decided in the kernel where arrays alone limit a row."""
    if spec.pairwise or spec.logits.cap is not None or not spec.visibility.uses_ranges:
        return spec.hides or spec.shape.ragged
    start, full_start, full_stop, _ = span
    return jnp.logical_not((full_start == start) & (start < full_stop))


def _score(consumer: Consumer, slot: Any, block: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return S = Q K^T [64, k] float32 of the first block, overlapped by nothing, and the pairs it keeps."""

    def run(s: Any) -> tuple[jax.Array, jax.Array | None]:
        consumer.start_score(s, slot)
        consumer.signal_next()
        kept = consumer.kept_pairs(block)
        score = s[...]
        plgpu.barrier_arrive(consumer.shared.key_empty.at[slot])
        return score, kept

    return consumer.with_score(run)


def _step(consumer: Consumer, compared: bool, j: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add P V of the block before, while S and P of block j are computed.

    carry: P of the block before, in the inputs' dtype, what is known of the rows, and the blocks taken.
    """
    spec, shared, acc = consumer.spec, consumer.shared, consumer.acc
    p, known, count = carry
    slot, slot_before = consumer.slot(count), consumer.slot(count - 1)

    def run(s: Any) -> Any:
        consumer.start_score(s, slot)
        consumer.start_sums(p, slot_before)
        consumer.signal_next()
        kept = consumer.kept_pairs(j)
        tile = consumer.tile_of(slot, j)
        score = plgpu.wgmma_accumulator_load(s, wait_n=len(acc))
        plgpu.barrier_arrive(shared.key_empty.at[slot])
        # Both compilers would else move the softmax behind the wait for the second product: LLVM obeys the
        # optimization barrier, and ptxas moves nothing past the loop in the wait for V.
        new = lax.optimization_barrier(online_softmax(tile, score, compared, known))
        consumer.release_pairs(slot)
        plgpu.barrier_wait(shared.value_full.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.value_empty.at[slot_before])
        return new, kept

    new, kept = consumer.with_score(run)
    for room, sums in zip(acc, rescaled(tuple(x[...] for x in acc), new), strict=True):
        room[...] = sums
    # Rounded only now: the second product has been reading the registers that this writes.
    p = lax.optimization_barrier(new.p).astype(spec.dtype)
    return dropped(p, kept), new.known, count + 1
