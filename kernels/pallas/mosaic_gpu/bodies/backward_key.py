"""The Hopper kernel of dkey and dvalue: a program owns `consumers` * 64 keys of a key head.

One warpgroup, the producer, copies Q and dO blocks of all the query heads that share the key head, with
their lse and delta, into a ring of slots; each of the others holds 64 keys and values. It holds its tiles as
[keys, queries], so that registers hold P and dS as left operands of the products that sum over queries.
Every sum has one owner and one order (S17).

lse and delta are as in `backward_query`.

Papers: Dao, arXiv 2307.08691; Shah and others, arXiv 2407.08608.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
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
    key_pair_full,
    number_ring,
    own_pieces,
    own_value_pieces,
    query_copies,
    ring_of_pieces,
    slot_empty,
    value_ring_of_pieces,
)
from attest.kernels.pallas.mosaic_gpu.launch.transfers import (
    start_load,
    start_store,
    tiles_of,
    write_pieces,
)
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import (
    PROGRAM,
    barriers,
    signal_next,
    start_copy,
    start_ping_pong,
    warp_specialize,
)
from attest.kernels.pallas.mosaic_gpu.schedule.order import locate_key_tile
from attest.kernels.pallas.mosaic_gpu.schedule.spans import Span, over_queries, query_span
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tile import pairs
from attest.kernels.pallas.mosaic_gpu.tile.dropout import dropped, kept_pairs, load_words, of_kept_pairs
from attest.kernels.pallas.mosaic_gpu.tile.products import accumulators, start_product, start_sums
from attest.kernels.pallas.mosaic_gpu.tile.tile import (
    BY_COLUMN,
    Tile,
    cotangents,
    load,
    load_bounds,
    nonfinite_rows,
    opaque,
    over_columns,
    weights,
)

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private


def query_slot_full(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    """Return barriers of blocks of Q, with a number for each row, and the tiles of a mask and a bias."""
    copies = query_copies(spec, blocks.step)[0] + pairs.copies_of_slot(spec, blocks)
    return barriers(blocks.stages, 1 + copies)


def d_out_slot_full(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    """Return barriers of blocks of the cotangent of out, with a number for each of its rows."""
    return barriers(blocks.stages, 1 + query_copies(spec, blocks.step)[1])


@dataclass(frozen=True)
class Shared:
    """The shared state of a program's warpgroups: tiles, and barriers that tell when they are full or empty.

    key [consumers, 64, D]; value [consumers, 64, Dv]; query [stages, step, D]; d_out [stages, step, Dv]; lse,
    delta [stages, step] float32, which come with query and d_out; mask, bias: see `pairs`. A ring's barriers
    have an entry for each slot; own_full and ping_pong, for each consumer.
    """

    key: Annotated[Any, own_pieces]
    value: Annotated[Any, own_value_pieces]
    query: Annotated[Any, ring_of_pieces]
    d_out: Annotated[Any, value_ring_of_pieces]
    lse: Annotated[Any, number_ring]
    delta: Annotated[Any, number_ring]
    own_full: Annotated[Any, key_pair_full]
    query_full: Annotated[Any, query_slot_full]
    query_empty: Annotated[Any, slot_empty]
    d_out_full: Annotated[Any, d_out_slot_full]
    d_out_empty: Annotated[Any, slot_empty]
    ping_pong: Annotated[Any, consumer_signal]
    mask: Annotated[Any, pairs.ring_of_keys("mask")] = None
    bias: Annotated[Any, pairs.ring_of_keys("bias")] = None
    marks: Annotated[Any, repair.marks] = None
    ended: Annotated[Any, repair.ended] = None
    of_repair: Annotated[Any, repair.room()] = None


@dataclass(frozen=True)
class _Consumer:
    """A consumer at work. of_key [64, D], of_value [64, Dv]: float32 sums, which the products accumulate.

    They have an accumulator for each piece of the channels; a sum that is not asked for has none.
    """

    blocks: BackwardBlocks
    shared: Shared
    warpgroup: Any
    tile: Tile
    of_key: tuple[Any, ...] = ()
    of_value: tuple[Any, ...] = ()


def backward_key(
    spec: KernelSpec,
    blocks: BackwardBlocks,
    arrays: Mapping[str, Any],
    outputs: Mapping[str, Any],
    shared: Shared,
    tile: Any = None,
) -> None:
    """Run the body of the kernel. outputs: d_key, d_value or both. tile: if not that of the program."""
    batch, key_head, block = locate_key_tile(spec, lax.axis_index(PROGRAM) if tile is None else tile)
    span = query_span(spec, arrays, batch, block)

    def copy() -> None:
        produce_steps(spec, blocks, arrays, shared, (batch, key_head, block), span)

    def consume(warpgroup: Any) -> None:
        key = block * blocks.own + warpgroup * ROWS
        held = Tile(
            spec, arrays, batch, key_head, row=None, key=key, words=load_words(arrays), transposed=True
        )
        _consume(_Consumer(blocks, shared, warpgroup, held), outputs, span)
        repair.signal_end(spec, shared, warpgroup, blocks)

    after = repair_keys(spec, blocks, arrays, outputs, shared, (batch, key_head, block))
    warp_specialize(blocks, copy, consume, after=after)


def produce_steps(
    spec: KernelSpec,
    blocks: BackwardBlocks,
    arrays: Mapping[str, Any],
    shared: Any,
    owner: tuple[Any, Any, Any],
    span: Span,
) -> None:
    """Start copies of the query blocks of a span, of all heads that share a key head: see `over_steps`."""
    start, _, _, stop = span
    _, key_head, _ = owner

    def visited(count: Any) -> tuple[Any, Any]:
        head = key_head * spec.shape.group + lax.div(count, stop - start)
        return head, start + lax.rem(count, stop - start)

    produce(spec, blocks, arrays, shared, owner, (stop - start) * spec.shape.group, visited)


def produce(
    spec: KernelSpec,
    blocks: BackwardBlocks,
    arrays: Mapping[str, Any],
    shared: Any,
    owner: tuple[Any, Any, Any],
    steps: Any,
    visited: Callable[[Any], tuple[Any, Any]],
) -> None:
    """Start copies of the query blocks of all heads that share a key head, each when its slot is empty.

    shared: a record with the rings of `Shared` and their barriers. owner: entry, key head and block of keys.
    visited(count): the head and the query block that come after so many.
    """
    batch, _, block = owner
    rings = (
        ("query", shared.query, "lse", shared.lse, shared.query_full, shared.query_empty),
        ("d_out", shared.d_out, "delta", shared.delta, shared.d_out_full, shared.d_out_empty),
    )

    def step(count: Any, _: None) -> None:
        head, i = visited(count)
        rows = pl.ds(i * blocks.step, blocks.step)

        def of_pairs(i: int) -> tuple[Any, Any, Any, Any]:
            return batch, head, rows, pl.ds(block * blocks.own + i * ROWS, ROWS)

        for name, ring, of_row, numbers, full, empty in rings:
            tile = (arrays[name], (batch, rows, head), ring)
            of_each = (arrays[of_row], (batch, head, rows), numbers)
            beside = pairs.copies(spec, blocks, arrays, shared, of_pairs) if name == "query" else []
            start_copy([tile, of_each, *beside], full, empty, count, blocks.stages)

    lax.fori_loop(0, steps, step, None)


def _consume(consumer: _Consumer, outputs: Mapping[str, Any], span: Span) -> None:
    """Sum and store the requested gradients of 64 keys."""
    blocks, shared, tile, warpgroup = consumer.blocks, consumer.shared, consumer.tile, consumer.warpgroup
    spec = tile.spec
    load_own(shared, warpgroup, tile)
    if blocks.ping_pong:
        start_ping_pong(shared.ping_pong, warpgroup, blocks.consumers)
    plgpu.barrier_wait(shared.own_full.at[warpgroup])
    sums = {name: field for name, field in (("d_key", "of_key"), ("d_value", "of_value")) if name in outputs}

    def run(**accs: Any) -> dict[str, tuple[jax.Array, ...]]:
        summing = replace(consumer, **{sums[name]: acc for name, acc in accs.items()})
        over_steps(spec, tile.head, span, partial(_step, summing))
        return {name: tuple(x[...] for x in acc) for name, acc in accs.items()}

    widths = {"d_key": spec.shape.head_pieces, "d_value": spec.shape.value_pieces}
    totals = pl.run_scoped(run, **{name: accumulators(ROWS, widths[name]) for name in sums})
    if spec.hides:
        shared.marks.at[warpgroup][...] = nonfinite_rows(*chain(*totals.values()))
    store_sums(shared, warpgroup, tile, outputs, totals)


def over_steps(
    spec: KernelSpec, key_head: Any, span: Span, step: Callable[[Any, bool, Any, Any], Any]
) -> Any:
    """Run step(head, compared, block, count) for each block of each head's span; return their number."""

    def over_head(i: Any, count: Any) -> Any:
        return over_queries(spec, span, partial(step, key_head * spec.shape.group + i), count)

    return lax.fori_loop(0, spec.shape.group, over_head, jnp.int32(0))


def load_own(shared: Any, warpgroup: Any, tile: Tile) -> None:
    """Start the copies of a consumer's keys and values."""
    for name, room in (("key", shared.key), ("value", shared.value)):
        own = (tile.batch, tile.keys, tile.head)
        start_load(tile.arrays[name], own, room, warpgroup, shared.own_full.at[warpgroup])


def store_sums(
    shared: Any,
    warpgroup: Any,
    tile: Tile,
    outputs: Mapping[str, Any],
    totals: dict[str, tuple[jax.Array, ...]],
) -> None:
    """Store the sums of a consumer's keys by way of their tiles. totals: the pieces of each, by name."""
    spec, own = tile.spec, (tile.batch, tile.keys, tile.head)
    rooms = {"d_key": shared.key, "d_value": shared.value}
    if "d_key" in totals:
        totals["d_key"] = tuple(x * spec.logits.scale for x in totals["d_key"])
    if spec.results.unrounded:
        for name, total in totals.items():
            write_pieces(outputs[name], own, total)
        return
    for name, total in totals.items():
        for room, x in zip(tiles_of(rooms[name]), total, strict=True):
            room.at[warpgroup][...] = x.astype(spec.dtype)
    plgpu.commit_smem()
    for name, total in totals.items():
        start_store(rooms[name], warpgroup, sum(x.shape[1] for x in total), outputs[name], own)
    plgpu.wait_smem_to_gmem(0)


def repair_keys(
    spec: KernelSpec,
    blocks: BackwardBlocks,
    arrays: Mapping[str, Any],
    outputs: Mapping[str, Any],
    shared: Any,
    own: tuple[Any, Any, Any],
) -> Callable[[], None] | None:
    """Return what repairs the gradients of a program's keys, if any is hidden. own: their place."""
    of_tiles = repair.of_tiles(spec, blocks)
    compute = partial(repair_tile.d_key, None, of_tiles, {**arrays, **outputs}, shared.of_repair)
    return repair.repair_of_tile(spec, shared, blocks, own, spec.shape.k_length, compute)


def _step(consumer: _Consumer, head: Any, compared: bool, i: Any, count: Any) -> Any:
    """Add the terms of the queries of block i of a head; return the number of blocks so far."""
    blocks, shared, warpgroup = consumer.blocks, consumer.shared, consumer.warpgroup
    spec = consumer.tile.spec
    me, slot, i = opaque(spec, warpgroup, lax.rem(count, blocks.stages), i)
    held = pairs.tiles_of_slot(spec, blocks, shared, me, slot)
    tile = replace(consumer.tile, head=head, row=i * blocks.step, pairs=held)

    def of_query(numbers: Any) -> jax.Array:
        return load(numbers.at[slot], BY_COLUMN)

    def run(s: Any, dp: Any = None) -> None:
        plgpu.barrier_wait(shared.query_full.at[slot])
        plgpu.barrier_wait(shared.d_out_full.at[slot])
        # Both before the first product: what is written between two holds up the first.
        if spec.logits.folds_lse:
            s[...] = over_columns(of_query(shared.lse), tile.shape)
        if dp is not None and not spec.dropout:
            dp[...] = over_columns(of_query(shared.delta), tile.shape)
        if blocks.ping_pong:
            plgpu.barrier_wait(shared.ping_pong.at[warpgroup])
        start_product(s, shared.key, me, shared.query, slot)
        if dp is not None:
            start_product(dp, shared.value, me, shared.d_out, slot)
        if blocks.ping_pong:
            signal_next(shared.ping_pong, warpgroup, blocks.consumers)
        pairs_kept = kept_pairs(tile)
        lse = None if spec.logits.folds_lse else of_query(shared.lse)
        score = plgpu.wgmma_accumulator_load(s, wait_n=0 if dp is None else len(spec.shape.value_pieces))
        bounded = replace(tile, bounds=load_bounds(tile)) if compared or spec.logits.alibi else tile
        p, slope = weights(bounded, score, lse, compared)
        kept, ds = dropped(p, pairs_kept), None
        if dp is not None:
            found = plgpu.wgmma_accumulator_load(dp, wait_n=0)
            if spec.dropout:
                delta = over_columns(of_query(shared.delta), tile.shape)
                found = of_kept_pairs(found, pairs_kept, delta)
            ds = cotangents(p, slope, found, compared)
        if consumer.of_value:
            start_sums(consumer.of_value, kept.astype(spec.dtype), shared.d_out, slot)
        if ds is not None:
            start_sums(consumer.of_key, ds.astype(spec.dtype), shared.query, slot)
        # The products that read d_out were asked for first.
        plgpu.wgmma_wait(len(consumer.of_key))
        plgpu.barrier_arrive(shared.d_out_empty.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.query_empty.at[slot])

    acc = plgpu.ACC(tile.shape, jnp.float32)
    pl.run_scoped(run, *(acc,) * (2 if consumer.of_key else 1))
    return count + 1
