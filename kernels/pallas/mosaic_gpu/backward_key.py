"""The Hopper kernel of dkey and dvalue: a program owns `consumers` * 64 keys of a key head.

One warpgroup, the producer, copies Q and dO blocks of all the query heads that share the key head, with
their lse and delta, into a ring of slots; each of the others holds 64 keys and values. It holds its tiles as
[keys, queries], so that registers hold P and dS as left operands of the products that sum over queries.
Every sum has one owner and one order (S17).

With `fused` it computes dquery, too, where no pair is hidden. dS then goes to shared memory, where it is the
left operand of dS' K, the part of dquery that the program's keys give. Each consumer computes a share of that
part, of the step before, so that none waits for another's dS. `ordered_sum` adds the parts up.

lse and delta are as in `backward_query`.

Papers: Dao, arXiv 2307.08691; Shah and others, arXiv 2407.08608.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from attest.kernels.pallas.mosaic_gpu import pairs
from attest.kernels.pallas.mosaic_gpu.blocks import ROWS, BackwardBlocks
from attest.kernels.pallas.mosaic_gpu.launch import (
    PROGRAM,
    barriers,
    signal_next,
    start_copy,
    start_ping_pong,
    warp_specialize,
)
from attest.kernels.pallas.mosaic_gpu.order import locate_key_tile
from attest.kernels.pallas.mosaic_gpu.ordered_sum import add_parts, hand_over
from attest.kernels.pallas.mosaic_gpu.scratch import (
    consumer_signal,
    key_pair_full,
    number_ring,
    own_rows,
    own_value_rows,
    query_copies,
    slot_empty,
    tile_ring,
    value_ring,
)
from attest.kernels.pallas.mosaic_gpu.spans import Span, over_queries, query_span
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tile import (
    BY_COLUMN,
    Tile,
    cotangents,
    leaked,
    load,
    load_bounds,
    opaque,
    over_columns,
    weights,
    without_keys_past_end,
)
from attest.kernels.pallas.mosaic_gpu.transfers import start_load, start_store, tiled

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private

SLOTS = 2  # of dS


def _query_full(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    """A block of Q comes with a number for each of its rows, and with the tiles of a mask and a bias."""
    copies = query_copies(spec, blocks.step)[0] + pairs.copies_of_slot(spec, blocks)
    return barriers(blocks.stages, 1 + copies)


def _d_out_full(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    """A block of the cotangent of out comes with a number for each of its rows."""
    return barriers(blocks.stages, 1 + query_copies(spec, blocks.step)[1])


def _if_fused(describe: Callable[[KernelSpec, BackwardBlocks], Any]) -> Any:
    return lambda spec, blocks: describe(spec, blocks) if blocks.fused else None


def _ds(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    return tiled(spec.dtype, SLOTS * blocks.consumers, ROWS, blocks.step)


def _part(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    return tiled(jnp.float32, 1, blocks.step, spec.head_dim)


def _by_all(count: int) -> Any:
    """Barriers, each complete when every consumer has arrived."""
    return _if_fused(lambda _, blocks: barriers(count, arrivals=blocks.consumers))


@dataclass(frozen=True)
class Shared:
    """What the warpgroups of a program share: tiles, and barriers that tell when they are full or empty.

    key [consumers, 64, D]; value [consumers, 64, Dv]; query [stages, step, D]; d_out [stages, step, Dv]; lse,
    delta [stages, step] float32, which come with query and d_out; mask, bias: see `pairs`. A ring's barriers
    have an entry for each slot; own_full and ping_pong, for each consumer.

    If fused, ds [SLOTS * consumers, 64, step] and part [1, step, D] float32, of dquery. own_read: complete
    when no consumer reads keys any more.
    """

    key: Annotated[Any, own_rows]
    value: Annotated[Any, own_value_rows]
    query: Annotated[Any, tile_ring]
    d_out: Annotated[Any, value_ring]
    lse: Annotated[Any, number_ring]
    delta: Annotated[Any, number_ring]
    own_full: Annotated[Any, key_pair_full]
    query_full: Annotated[Any, _query_full]
    query_empty: Annotated[Any, slot_empty]
    d_out_full: Annotated[Any, _d_out_full]
    d_out_empty: Annotated[Any, slot_empty]
    ping_pong: Annotated[Any, consumer_signal]
    mask: Annotated[Any, pairs.ring_of_keys("mask")] = None
    bias: Annotated[Any, pairs.ring_of_keys("bias")] = None
    ds: Annotated[Any, _if_fused(_ds)] = None
    ds_full: Annotated[Any, _by_all(SLOTS)] = None
    ds_empty: Annotated[Any, _by_all(SLOTS)] = None
    part: Annotated[Any, _if_fused(_part)] = None
    part_written: Annotated[Any, _by_all(1)] = None
    part_free: Annotated[Any, _if_fused(lambda *_: barriers(1))] = None
    own_read: Annotated[Any, _by_all(1)] = None


@dataclass(frozen=True)
class _Consumer:
    """A consumer at work. of_key [64, D], of_value [64, Dv]: float32 sums, which the products accumulate.

    A sum that is not asked for is None.
    """

    blocks: BackwardBlocks
    shared: Shared
    warpgroup: Any
    tile: Tile
    of_key: Any = None
    of_value: Any = None


def backward_key(
    spec: KernelSpec,
    blocks: BackwardBlocks,
    arrays: Mapping[str, Any],
    outputs: Mapping[str, Any],
    shared: Shared,
) -> None:
    """The body of the kernel. outputs: d_key, d_value or both, and leak where pairs may be hidden.

    If fused, d_query, too: [B, H, whole blocks of Sq, D] float32, not yet scaled.
    """
    batch, key_head, block = locate_key_tile(spec, lax.axis_index(PROGRAM))
    span = query_span(spec, arrays, batch, block)

    def produce() -> None:
        _produce(spec, blocks, arrays, shared, (batch, key_head, block), span)

    def consume(warpgroup: Any) -> None:
        key = block * blocks.own + warpgroup * ROWS
        tile = Tile(spec, arrays, batch, key_head, row=None, key=key, transposed=True)
        _consume(_Consumer(blocks, shared, warpgroup, tile), outputs, span)

    def add() -> None:
        _add_parts(spec, blocks, outputs["d_query"], shared, (batch, key_head, block), span)

    warp_specialize(blocks, produce, consume, add if blocks.fused else None)


def _produce(
    spec: KernelSpec,
    blocks: BackwardBlocks,
    arrays: Mapping[str, Any],
    shared: Shared,
    owner: tuple[Any, Any, Any],
    span: Span,
) -> None:
    """Start copies of the query blocks of all heads that share a key head, each when its slot is empty."""
    batch, key_head, block = owner
    rings = (
        ("query", shared.query, "lse", shared.lse, shared.query_full, shared.query_empty),
        ("d_out", shared.d_out, "delta", shared.delta, shared.d_out_full, shared.d_out_empty),
    )

    def step(count: Any, _: None) -> None:
        head, i = _visited(spec, key_head, span, count)
        rows = pl.ds(i * blocks.step, blocks.step)

        def of_pairs(i: int) -> tuple[Any, Any, Any, Any]:
            return batch, head, rows, pl.ds(block * blocks.own + i * ROWS, ROWS)

        for name, ring, of_row, numbers, full, empty in rings:
            tile = (arrays[name], (batch, rows, head), ring)
            of_each = (arrays[of_row], (batch, head, rows), numbers)
            beside = pairs.copies(spec, blocks, arrays, shared, of_pairs) if name == "query" else []
            start_copy([tile, of_each, *beside], full, empty, count, blocks.stages)

    lax.fori_loop(0, _steps(spec, span), step, None)


def _steps(spec: KernelSpec, span: Span) -> Any:
    """How many blocks of queries of all heads a program takes."""
    return (span[3] - span[0]) * spec.group


def _visited(spec: KernelSpec, key_head: Any, span: Span, count: Any) -> tuple[Any, Any]:
    """The head and the block of queries that follow so many others."""
    start, _, _, stop = span
    return key_head * spec.group + lax.div(count, stop - start), start + lax.rem(count, stop - start)


def _add_parts(
    spec: KernelSpec,
    blocks: BackwardBlocks,
    d_query: Any,
    shared: Shared,
    owner: tuple[Any, Any, Any],
    span: Span,
) -> None:
    """Add up dquery: its parts that this program's keys give, after those of all keys before."""
    batch, key_head, block = owner

    def place(count: Any) -> tuple[Any, Any]:
        head, i = _visited(spec, key_head, span, count)
        rows = pl.ds(i * blocks.step, blocks.step)
        return d_query.at[batch, head, rows], (batch * spec.heads + head) * spec.q_blocks + i

    sums = spec.batch * spec.heads * spec.q_blocks
    written, free = shared.part_written.at[0], shared.part_free.at[0]
    add_parts(shared.part.at[0], written, free, sums, _steps(spec, span), place, before=block)


def _consume(consumer: _Consumer, outputs: Mapping[str, Any], span: Span) -> None:
    """Sums and stores what is asked for of 64 keys."""
    blocks, shared, tile, warpgroup = consumer.blocks, consumer.shared, consumer.tile, consumer.warpgroup
    spec, key_head = tile.spec, tile.head
    own = (tile.batch, tile.keys, key_head)
    rooms = {"d_key": shared.key, "d_value": shared.value}
    for name, room in (("key", shared.key), ("value", shared.value)):
        start_load(tile.arrays[name], own, room, warpgroup, shared.own_full.at[warpgroup])
    if blocks.ping_pong:
        start_ping_pong(shared.ping_pong, warpgroup, blocks.consumers)
    if blocks.fused:
        for i in range(blocks.consumers):
            plgpu.barrier_wait(shared.own_full.at[i])
        plgpu.barrier_arrive(shared.ds_empty.at[0])
        # The first step multiplies what it finds in the other slot, and hands nothing over.
        plgpu.barrier_arrive(shared.ds_full.at[1])
    else:
        plgpu.barrier_wait(shared.own_full.at[warpgroup])
    sums = {name: field for name, field in (("d_key", "of_key"), ("d_value", "of_value")) if name in outputs}

    def run(**accs: Any) -> dict[str, jax.Array]:
        summing = replace(consumer, **{sums[name]: acc for name, acc in accs.items()})

        def over_head(i: Any, count: Any) -> Any:
            step = partial(_step, summing, key_head * spec.group + i)
            return over_queries(spec, span, step, count)

        def fused_step(count: Any, _: None) -> None:
            head, i = _visited(spec, key_head, span, count)
            _step(summing, head, False, i, count)

        if blocks.fused:
            # One loop: for one loop after another, ptxas would move the sums through memory.
            steps = _steps(spec, span)
            lax.fori_loop(0, steps, fused_step, None)
            _sum_over_keys(summing, steps)
        else:
            lax.fori_loop(0, spec.group, over_head, jnp.int32(0))
        return {name: acc[...] for name, acc in accs.items()}

    accs = {name: plgpu.ACC((ROWS, rooms[name].shape[2]), jnp.float32) for name in sums}
    totals = pl.run_scoped(run, **accs)
    if spec.hides:
        leak = sum(leaked(total) for total in totals.values())
        outputs["leak"][tile.batch, key_head, tile.keys] = leak
    if "d_key" in totals:
        totals["d_key"] = totals["d_key"] * spec.scale
    if spec.unrounded:
        for name, total in totals.items():
            outputs[name][own] = total
        return
    if blocks.fused:
        # The others' shares of dquery are products with these keys.
        plgpu.barrier_arrive(shared.own_read.at[0])
        plgpu.barrier_wait(shared.own_read.at[0])
    for name, total in totals.items():
        rooms[name].at[warpgroup][...] = total.astype(spec.dtype)
    plgpu.commit_smem()
    for name in totals:
        start_store(rooms[name], warpgroup, rooms[name].shape[2], outputs[name], own)
    plgpu.wait_smem_to_gmem(0)


def _step(consumer: _Consumer, head: Any, compared: bool, i: Any, count: Any) -> Any:
    """Adds what queries of block i of a head give; blocks taken so far."""
    blocks, shared, warpgroup = consumer.blocks, consumer.shared, consumer.warpgroup
    spec = consumer.tile.spec
    me, slot = opaque(spec, warpgroup, lax.rem(count, blocks.stages))
    held = pairs.tiles_of_slot(spec, blocks, shared, me, slot)
    tile = replace(consumer.tile, head=head, row=i * blocks.step, pairs=held)

    def of_query(numbers: Any) -> jax.Array:
        return load(numbers.at[slot], BY_COLUMN)

    def run(s: Any, dp: Any = None) -> None:
        plgpu.barrier_wait(shared.query_full.at[slot])
        plgpu.barrier_wait(shared.d_out_full.at[slot])
        # Both before the first product: what is written between two holds up the first.
        if spec.folds:
            s[...] = over_columns(of_query(shared.lse), tile.shape)
        if dp is not None:
            dp[...] = over_columns(of_query(shared.delta), tile.shape)
        if blocks.ping_pong:
            plgpu.barrier_wait(shared.ping_pong.at[warpgroup])
        plgpu.wgmma(s, shared.key.at[me], shared.query.at[slot].T)
        if dp is not None:
            plgpu.wgmma(dp, shared.value.at[me], shared.d_out.at[slot].T)
        if blocks.ping_pong:
            signal_next(shared.ping_pong, warpgroup, blocks.consumers)
        lse = None if spec.folds else of_query(shared.lse)
        score = plgpu.wgmma_accumulator_load(s, wait_n=0 if dp is None else 1)
        bounded = replace(tile, bounds=load_bounds(tile)) if compared or spec.alibi else tile
        p, slope = weights(bounded, score, lse, compared)
        ds = None
        if dp is not None:
            ds = cotangents(p, slope, plgpu.wgmma_accumulator_load(dp, wait_n=0), compared)
        if consumer.of_value is not None:
            plgpu.wgmma(consumer.of_value, p.astype(spec.dtype), shared.d_out.at[slot])
        if ds is not None:
            if blocks.fused:
                ds = _keep(consumer, count, without_keys_past_end(tile, ds))
            plgpu.wgmma(consumer.of_key, ds.astype(spec.dtype), shared.query.at[slot])
        if blocks.fused:
            return
        # The product that reads d_out was asked for first.
        plgpu.wgmma_wait(0 if ds is None else 1)
        plgpu.barrier_arrive(shared.d_out_empty.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.query_empty.at[slot])

    acc = plgpu.ACC(tile.shape, jnp.float32)
    pl.run_scoped(run, *(acc,) * (1 if consumer.of_key is None else 2))
    if blocks.fused:
        _sum_over_keys(consumer, count, slot)
    return count + 1


def _keep(consumer: _Consumer, count: Any, ds: jax.Array) -> jax.Array:
    """dS of a step in the inputs' dtype, also in shared memory for all consumers."""
    blocks, shared = consumer.blocks, consumer.shared
    ds = ds.astype(consumer.tile.spec.dtype)
    me, slot = lax.optimization_barrier((consumer.warpgroup, lax.rem(count, SLOTS)))
    plgpu.barrier_wait(shared.ds_empty.at[slot])
    shared.ds.at[slot * blocks.consumers + me][...] = ds
    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.ds_full.at[slot])
    return ds


def _sum_over_keys(consumer: _Consumer, count: Any, read: Any = None) -> None:
    """Hand over this consumer's share of dS' K of the step before step `count`, if there is one.

    read: the slot of query and d_out that is free when the products that have been started end.
    """
    blocks, shared = consumer.blocks, consumer.shared
    spec = consumer.tile.spec
    # A share is 64 rows of a block, or some of the channels.
    by_row = blocks.step > ROWS
    width = spec.head_dim if by_row else spec.head_dim // blocks.consumers

    def run(acc: Any) -> None:
        me, slot = lax.optimization_barrier((consumer.warpgroup, lax.rem(count + 1, SLOTS)))
        rows = pl.ds(pl.multiple_of(me * ROWS, ROWS) if by_row else 0, ROWS)
        channels = pl.ds(0 if by_row else pl.multiple_of(me * width, width), width)
        plgpu.barrier_wait(shared.ds_full.at[slot])
        for i in range(blocks.consumers):
            ds = shared.ds.at[slot * blocks.consumers + i, :, rows].T
            plgpu.wgmma(acc, ds, shared.key.at[i, :, channels])
        if read is not None:
            plgpu.wgmma_wait(blocks.consumers)
            plgpu.barrier_arrive(shared.d_out_empty.at[read])
            plgpu.barrier_arrive(shared.query_empty.at[read])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.ds_empty.at[slot])
        share = acc[...]

        @pl.when(count > 0)
        def _() -> None:
            room = shared.part.at[0, rows, channels]
            hand_over(room, shared.part_written.at[0], shared.part_free.at[0], share)

    pl.run_scoped(run, plgpu.ACC((ROWS, width), jnp.float32))
