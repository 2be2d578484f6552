"""The Hopper kernel of dquery, dkey and dvalue: a program owns `consumers` * 64 keys of a key head.

It is `backward_key`, and dS goes to shared memory, too. There it is the left operand of dS' K, the part of
dquery that the program's keys give. Each consumer computes a share of that part, for the step before, so that
none waits for another's dS. It begins S of the next step, and hands its share over to a warpgroup that adds
the shares up in a fixed order (`ordered_sum`, S17).

A program takes the blocks of queries from the last one down, where causal order lets all programs begin, and
each block of all query heads of the group in turn. So each program follows the one before at a distance.

lse and delta are as in `backward_query`. Papers: Dao, arXiv 2307.08691; Shah and others, arXiv 2407.08608.
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
from attest.kernels.pallas.mosaic_gpu.bodies.backward_key import (
    d_out_slot_full,
    load_own,
    produce,
    query_slot_full,
    store_sums,
)
from attest.kernels.pallas.mosaic_gpu.launch.scratch import (
    key_pair_full,
    number_ring,
    own_rows,
    own_value_rows,
    slot_empty,
    tile_ring,
    value_ring,
)
from attest.kernels.pallas.mosaic_gpu.launch.transfers import tiled
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import PROGRAM, barriers, warp_specialize
from attest.kernels.pallas.mosaic_gpu.schedule.order import locate_fused_tile
from attest.kernels.pallas.mosaic_gpu.schedule.ordered_sum import add_parts, fence, hand_over
from attest.kernels.pallas.mosaic_gpu.schedule.spans import query_span
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tile.dropout import dropped, kept_pairs, load_words, of_kept_pairs
from attest.kernels.pallas.mosaic_gpu.tile.tile import (
    BY_COLUMN,
    TILE,
    Tile,
    cotangents,
    hidden_pairs,
    load,
    nonfinite_rows,
    over_columns,
    weights,
    without_keys_past_end,
    zeros,
)

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private

SLOTS = 2  # of dS
PARTS = 2  # of dquery: one waits for its turn while consumers write the next


def _ds(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    return tiled(spec.dtype, SLOTS * blocks.consumers, ROWS, blocks.step)


def _ds_signal(_: KernelSpec, blocks: BackwardBlocks) -> Any:
    """Return a barrier for each slot of dS, complete when every consumer has written, or read it."""
    return barriers(SLOTS, arrivals=blocks.consumers)


def _parts(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    return tiled(jnp.float32, PARTS, blocks.step, spec.shape.head_dim)


def _part_written(_: KernelSpec, blocks: BackwardBlocks) -> Any:
    return barriers(PARTS, arrivals=blocks.consumers)


def _part_free(_: KernelSpec, _blocks: BackwardBlocks) -> Any:
    return barriers(PARTS)


def _own_read(_: KernelSpec, blocks: BackwardBlocks) -> Any:
    return barriers(1, arrivals=blocks.consumers)


@dataclass(frozen=True)
class Shared:
    """The shared state of a program's warpgroups: tiles, and barriers that tell when they are full or empty.

    As in `backward_key`, and ds [SLOTS * consumers, 64, step]; parts [PARTS, step, D] float32, of dquery.
    own_read: complete when no consumer reads the keys any more.
    """

    key: Annotated[Any, own_rows]
    value: Annotated[Any, own_value_rows]
    query: Annotated[Any, tile_ring]
    d_out: Annotated[Any, value_ring]
    ds: Annotated[Any, _ds]
    parts: Annotated[Any, _parts]
    lse: Annotated[Any, number_ring]
    delta: Annotated[Any, number_ring]
    own_full: Annotated[Any, key_pair_full]
    own_read: Annotated[Any, _own_read]
    query_full: Annotated[Any, query_slot_full]
    query_empty: Annotated[Any, slot_empty]
    d_out_full: Annotated[Any, d_out_slot_full]
    d_out_empty: Annotated[Any, slot_empty]
    ds_full: Annotated[Any, _ds_signal]
    ds_empty: Annotated[Any, _ds_signal]
    part_written: Annotated[Any, _part_written]
    part_free: Annotated[Any, _part_free]


@dataclass(frozen=True)
class _Program:
    """The place of a program, and its visits: queries from block start on."""

    spec: KernelSpec
    blocks: BackwardBlocks
    arrays: Mapping[str, Any]
    shared: Shared
    owner: tuple[Any, Any, Any]
    start: Any
    full_start: Any

    @property
    def steps(self) -> Any:
        return (self.spec.shape.q_blocks - self.start) * self.spec.shape.group

    def visited(self, count: Any) -> tuple[Any, Any]:
        """Return the head and the block of queries of a visit, by its number."""
        group = self.spec.shape.group
        _, key_head, _ = self.owner
        return key_head * group + lax.rem(count, group), self.spec.shape.q_blocks - 1 - lax.div(count, group)


@dataclass(frozen=True)
class _Consumer:
    """A consumer at work. of_key, of_value: float32 sums. logits: what S of the next step is computed in."""

    program: _Program
    warpgroup: Any
    tile: Tile
    of_key: Any = None
    of_value: Any = None
    logits: Any = None


def share_of_channels(spec: KernelSpec, blocks: BackwardBlocks) -> int:
    """Return the channels of a consumer's share of a part: all, of 64 rows of a larger block, or some."""
    return spec.shape.head_dim if blocks.step > ROWS else spec.shape.head_dim // blocks.consumers


def backward_fused(
    spec: KernelSpec,
    blocks: BackwardBlocks,
    arrays: Mapping[str, Any],
    outputs: Mapping[str, Any],
    shared: Shared,
) -> None:
    """Run the body of the kernel.

    outputs: d_key, d_value; d_query [B, H, full blocks of Sq, D] float32, before it is scaled: the kernel
    writes no row before the first that sees a key. Where pairs may be hidden also leak and key_leak,
    [B, Hk, keys] float32: NaN for each sum of a key, and each key, that is not finite.
    """
    owner = locate_fused_tile(spec, lax.axis_index(PROGRAM))
    batch, key_head, block = owner
    start, full_start, _, _ = query_span(spec, arrays, batch, block)
    program = _Program(spec, blocks, arrays, shared, owner, start, full_start)

    def copy() -> None:
        produce(spec, blocks, arrays, shared, owner, program.steps, program.visited)

    def consume(warpgroup: Any) -> None:
        key = block * blocks.own + warpgroup * ROWS
        tile = Tile(
            spec, arrays, batch, key_head, row=None, key=key, words=load_words(arrays), transposed=True
        )
        _consume(_Consumer(program, warpgroup, tile), outputs)

    warp_specialize(blocks, copy, consume, partial(_add, program, outputs["d_query"]))


def _add(program: _Program, d_query: Any) -> None:
    """Add up dquery: the parts that this program's keys give, after those of all keys before."""
    spec, blocks, shared = program.spec, program.blocks, program.shared
    batch, _, block = program.owner

    def place(count: Any) -> tuple[Any, Any]:
        head, i = program.visited(count)
        rows = pl.ds(i * blocks.step, blocks.step)
        return (batch * spec.shape.heads + head) * spec.shape.q_blocks + i, d_query.at[batch, head, rows]

    sums = spec.shape.batch * spec.shape.heads * spec.shape.q_blocks
    add_parts(shared.parts, shared.part_written, shared.part_free, sums, program.steps, place, before=block)


def _share(spec: KernelSpec, blocks: BackwardBlocks, consumer: Any) -> tuple[Any, Any]:
    """Return the rows and channels of a part that a consumer computes: 64 rows, or some of their channels."""
    width = share_of_channels(spec, blocks)
    size = ROWS if width == spec.shape.head_dim else width
    own = pl.ds(pl.multiple_of(consumer * size, size), size)
    return (own, pl.ds(0, width)) if width == spec.shape.head_dim else (pl.ds(0, ROWS), own)


def _consume(consumer: _Consumer, outputs: Mapping[str, Any]) -> None:
    """Compute sum and store dkey and dvalue of 64 keys, and hand over shares of dquery."""
    program, tile, warpgroup = consumer.program, consumer.tile, consumer.warpgroup
    spec, shared = program.spec, program.shared
    load_own(shared, warpgroup, tile)
    for i in range(program.blocks.consumers):
        plgpu.barrier_wait(shared.own_full.at[i])
    if spec.hides:
        key, starts = shared.key.at[warpgroup], range(0, spec.shape.head_dim, ROWS)
        parts = [load(key.at[:, pl.ds(i, ROWS)], TILE).astype(jnp.float32) for i in starts]
        outputs["key_leak"][tile.batch, tile.head, tile.keys] = nonfinite_rows(*parts)
    plgpu.barrier_arrive(shared.ds_empty.at[0])
    # The first step multiplies what it finds in the other slot, and hands nothing over.
    plgpu.barrier_arrive(shared.ds_full.at[1])

    def run(**accs: Any) -> dict[str, jax.Array]:
        summing = replace(consumer, **accs)
        _start_logits(summing, jnp.int32(0))
        # One loop: between loops, ptxas would move the sums through memory.
        lax.fori_loop(0, program.steps, lambda count, _: _step(summing, count), None)
        _sum_over_keys(summing, program.steps)
        return {"d_key": accs["of_key"][...], "d_value": accs["of_value"][...]}

    totals = pl.run_scoped(
        run,
        of_key=plgpu.ACC((ROWS, spec.shape.head_dim), jnp.float32),
        of_value=plgpu.ACC((ROWS, spec.shape.value_dim), jnp.float32),
        logits=plgpu.ACC(tile.shape, jnp.float32),
    )
    # The others' shares of dquery are products with these keys.
    plgpu.barrier_arrive(shared.own_read.at[0])
    plgpu.barrier_wait(shared.own_read.at[0])
    if spec.hides:
        outputs["leak"][tile.batch, tile.head, tile.keys] = nonfinite_rows(*totals.values())
    store_sums(shared, warpgroup, tile, outputs, {name: (total,) for name, total in totals.items()})


def _start_logits(consumer: _Consumer, count: Any) -> None:
    """Start S of a step; behind the last one, of what is in its slot."""
    program, shared, spec = consumer.program, consumer.program.shared, consumer.tile.spec
    me, slot = lax.optimization_barrier((consumer.warpgroup, lax.rem(count, program.blocks.stages)))
    pl.when(count < program.steps)(lambda: plgpu.barrier_wait(shared.query_full.at[slot]))
    shape = consumer.tile.shape
    if spec.logits.folds_lse:
        consumer.logits[...] = over_columns(load(shared.lse.at[slot], BY_COLUMN), shape)
    else:
        consumer.logits[...] = zeros(shape)
    plgpu.wgmma(consumer.logits, shared.key.at[me], shared.query.at[slot].T)


def _step(consumer: _Consumer, count: Any) -> None:
    """Add what a block of queries gives, whose S has been started; `count` blocks come before it."""
    program, spec = consumer.program, consumer.tile.spec
    blocks, shared = program.blocks, program.shared
    head, i = program.visited(count)
    tile = replace(consumer.tile, head=head, row=i * blocks.step)
    # So that addresses are computed anew in every step: there are too many for registers.
    me, slot, of_ds = lax.optimization_barrier(
        (consumer.warpgroup, lax.rem(count, blocks.stages), lax.rem(count, SLOTS))
    )
    partial_block = i < program.full_start

    def run(dp: Any) -> None:
        plgpu.barrier_wait(shared.d_out_full.at[slot])
        if not spec.dropout:
            dp[...] = over_columns(load(shared.delta.at[slot], BY_COLUMN), tile.shape)
        plgpu.wgmma(dp, shared.value.at[me], shared.d_out.at[slot].T)
        pairs_kept = kept_pairs(tile)
        lse = None if spec.logits.folds_lse else load(shared.lse.at[slot], BY_COLUMN)
        score = plgpu.wgmma_accumulator_load(consumer.logits, wait_n=1)
        p, slope = weights(tile, score, lse, compared=False)
        if spec.visibility.causal:
            hiding = hidden_pairs(tile, None, compared=True)
            p = lax.cond(partial_block, lambda p: hiding.apply(p, 0.0), lambda p: p, p)
        kept, found = dropped(p, pairs_kept), plgpu.wgmma_accumulator_load(dp, wait_n=0)
        if spec.dropout:
            delta = over_columns(load(shared.delta.at[slot], BY_COLUMN), tile.shape)
            found = of_kept_pairs(found, pairs_kept, delta)
        ds = cotangents(p, slope, found, compared=False)
        if spec.visibility.causal:
            ds = lax.cond(partial_block, lambda ds: jnp.where(p == 0.0, 0.0, ds), lambda ds: ds, ds)
        ds = without_keys_past_end(tile, ds).astype(spec.dtype)
        plgpu.wgmma(consumer.of_value, kept.astype(spec.dtype), shared.d_out.at[slot])
        plgpu.barrier_wait(shared.ds_empty.at[of_ds])
        shared.ds.at[of_ds * blocks.consumers + me][...] = ds
        fence()
        plgpu.barrier_arrive(shared.ds_full.at[of_ds])
        plgpu.wgmma(consumer.of_key, ds, shared.query.at[slot])

    pl.run_scoped(run, plgpu.ACC(tile.shape, jnp.float32))
    _sum_over_keys(consumer, count, slot)


def _sum_over_keys(consumer: _Consumer, count: Any, slot: Any = None) -> None:
    """Hand over this consumer's share of dS' K of the step before step `count`, if there is one.

    slot: of the query and dO of step `count`, which are read when dkey's and dvalue's products have ended. S
    of the step behind it is then started. None: there is no such step.
    """
    program, shared, spec = consumer.program, consumer.program.shared, consumer.tile.spec
    blocks = program.blocks

    def run(acc: Any) -> None:
        me, of_ds = lax.optimization_barrier((consumer.warpgroup, lax.rem(count + 1, SLOTS)))
        rows, channels = _share(spec, blocks, me)
        plgpu.barrier_wait(shared.ds_full.at[of_ds])
        for i in range(blocks.consumers):
            ds = shared.ds.at[of_ds * blocks.consumers + i, :, rows].T
            plgpu.wgmma(acc, ds, shared.key.at[i, :, channels])
        if slot is not None:
            plgpu.wgmma_wait(blocks.consumers)
            plgpu.barrier_arrive(shared.d_out_empty.at[slot])
            plgpu.barrier_arrive(shared.query_empty.at[slot])
            _start_logits(consumer, count + 1)
        plgpu.wgmma_wait(0 if slot is None else 1)
        plgpu.barrier_arrive(shared.ds_empty.at[of_ds])
        share, room = acc[...], lax.rem(count + 1, PARTS)

        @pl.when(count > 0)
        def _() -> None:
            part = shared.parts.at[room, rows, channels]
            hand_over(part, shared.part_written.at[room], shared.part_free.at[room], share)

    pl.run_scoped(run, plgpu.ACC((ROWS, share_of_channels(spec, blocks)), jnp.float32))
