"""The Hopper kernel of dkey and dvalue at large head dims: two warpgroups of a program share 64 keys.

One computes S and P and sums dvalue; the other computes dP and dS and sums dkey. So the registers of each
hold one sum, and S is computed once. P goes from the first to the second through shared memory, in float32,
and with it the slope of a cap; under dropout P is negative where a pair is dropped. The first may be a step
ahead.

Tiles, the order of sums and their bits are those of `backward_key`, as are lse and delta.
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
from attest.kernels.pallas.mosaic_gpu.bodies import repair
from attest.kernels.pallas.mosaic_gpu.bodies.backward_key import (
    d_out_slot_full,
    over_steps,
    produce_steps,
    query_slot_full,
    repair_keys,
    store_sums,
)
from attest.kernels.pallas.mosaic_gpu.launch.scratch import (
    SPLIT_ROOMS,
    key_copies,
    number_ring,
    own_rows,
    own_value_rows,
    slot_empty,
    tile_ring,
    value_ring,
)
from attest.kernels.pallas.mosaic_gpu.launch.transfers import start_load, tiled
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import PROGRAM, barriers, warp_specialize
from attest.kernels.pallas.mosaic_gpu.schedule.order import locate_key_tile
from attest.kernels.pallas.mosaic_gpu.schedule.spans import Span, query_span
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tile import pairs
from attest.kernels.pallas.mosaic_gpu.tile.dropout import dropped, kept_pairs, load_words
from attest.kernels.pallas.mosaic_gpu.tile.tile import (
    BY_COLUMN,
    BY_ROW,
    TILE,
    Tile,
    cap_slope,
    cotangents,
    load,
    load_bounds,
    logits,
    nonfinite_rows,
    opaque,
    over_columns,
    weights_of,
)

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private


def _key_full(spec: KernelSpec, _: BackwardBlocks) -> Any:
    return barriers(1, key_copies(spec, ROWS)[0])


def _value_full(spec: KernelSpec, _: BackwardBlocks) -> Any:
    return barriers(1, key_copies(spec, ROWS)[1])


def _weights(_: KernelSpec, blocks: BackwardBlocks) -> Any:
    return tiled(jnp.float32, SPLIT_ROOMS, ROWS, blocks.step)


def _weights_signal(spec: KernelSpec, _: BackwardBlocks) -> Any:
    return barriers(_slots(spec))


def _slots(spec: KernelSpec) -> int:
    """Return how many steps the weights may be ahead: a cap's slope takes a second slot for each step."""
    return SPLIT_ROOMS if spec.logits.cap is None else SPLIT_ROOMS // 2


@dataclass(frozen=True)
class Shared:
    """The shared state of a program's warpgroups: tiles, and barriers that tell when they are full or empty.

    As in `backward_key`, and weights [SPLIT_ROOMS, 64, step] float32: P of as many steps, or P of one and the
    slope of its cap.
    """

    key: Annotated[Any, own_rows]
    value: Annotated[Any, own_value_rows]
    query: Annotated[Any, tile_ring]
    d_out: Annotated[Any, value_ring]
    weights: Annotated[Any, _weights]
    lse: Annotated[Any, number_ring]
    delta: Annotated[Any, number_ring]
    key_full: Annotated[Any, _key_full]
    value_full: Annotated[Any, _value_full]
    query_full: Annotated[Any, query_slot_full]
    query_empty: Annotated[Any, slot_empty]
    d_out_full: Annotated[Any, d_out_slot_full]
    d_out_empty: Annotated[Any, slot_empty]
    weights_full: Annotated[Any, _weights_signal]
    weights_empty: Annotated[Any, _weights_signal]
    mask: Annotated[Any, pairs.ring_of_keys("mask")] = None
    bias: Annotated[Any, pairs.ring_of_keys("bias")] = None
    ended: Annotated[Any, repair.ended] = None
    of_repair: Annotated[Any, repair.room("lse")] = None

    @property
    def marks(self) -> Any:
        """Marks [1, 64] for a repair, in a room for numbers that are read no more once dvalue is summed."""
        return self.lse.at[:, pl.ds(0, ROWS)]


@dataclass(frozen=True)
class _Consumer:
    """A warpgroup at work. total: the float32 sum, which the products accumulate."""

    blocks: BackwardBlocks
    shared: Shared
    tile: Tile
    total: Any = None


def backward_split(
    spec: KernelSpec,
    blocks: BackwardBlocks,
    arrays: Mapping[str, Any],
    outputs: Mapping[str, Any],
    shared: Shared,
) -> None:
    """Run the body of the kernel. outputs: d_key and d_value."""
    owner = locate_key_tile(spec, lax.axis_index(PROGRAM))
    batch, key_head, block = owner
    span = query_span(spec, arrays, batch, block)

    def consume(warpgroup: Any) -> None:
        tile = Tile(spec, arrays, batch, key_head, row=None, key=block * blocks.own, transposed=True)
        tile = replace(tile, words=load_words(arrays))
        consumer = _Consumer(blocks, shared, tile)
        pl.when(warpgroup == 0)(lambda: _sum_values(consumer, outputs, span))
        pl.when(warpgroup == 1)(lambda: _sum_keys(consumer, outputs, span))
        # The weights; without hidden pairs nothing is copied to their place.
        if spec.hides:
            plgpu.commit_smem()
        repair.signal_end(spec, shared, warpgroup, blocks)

    def copy() -> None:
        produce_steps(spec, blocks, arrays, shared, owner, span)

    after = repair_keys(spec, blocks, arrays, outputs, shared, owner)
    warp_specialize(blocks, copy, consume, after=after)


def _sum_values(consumer: _Consumer, outputs: Mapping[str, Any], span: Span) -> None:
    """Sum and store dvalue of 64 keys, and hand over the weights of each step."""
    shared, tile = consumer.shared, consumer.tile
    spec = tile.spec
    _load_own(tile, "key", shared.key, shared.key_full)

    def run(total: Any) -> tuple[Any, jax.Array]:
        step = partial(_weigh, replace(consumer, total=total))
        return over_steps(spec, tile.head, span, step), total[...]

    steps, total = pl.run_scoped(run, plgpu.ACC((ROWS, spec.shape.value_dim), jnp.float32))
    # When the rooms of the last steps are empty, the other warpgroup reads no value any more.
    for i in range(_slots(spec)):
        room = lax.rem(steps + i, _slots(spec))
        plgpu.barrier_wait(shared.weights_empty.at[room])
    if spec.hides:
        shared.marks.at[0][...] = nonfinite_rows(total)
        plgpu.barrier_arrive(shared.weights_full.at[lax.rem(steps, _slots(spec))])
    store_sums(shared, 0, tile, outputs, {"d_value": (total,)})


def _sum_keys(consumer: _Consumer, outputs: Mapping[str, Any], span: Span) -> None:
    """Sum and store dkey of 64 keys, and report which sums of both kinds are not finite."""
    shared, tile = consumer.shared, consumer.tile
    spec = tile.spec
    # Before the other warpgroup may store dvalue there: no query may see these keys.
    _load_own(tile, "value", shared.value, shared.value_full)
    for i in range(_slots(spec)):
        plgpu.barrier_arrive(shared.weights_empty.at[i])

    def run(total: Any) -> tuple[Any, jax.Array]:
        step = partial(_differentiate, replace(consumer, total=total))
        return over_steps(spec, tile.head, span, step), total[...]

    steps, total = pl.run_scoped(run, plgpu.ACC((ROWS, spec.shape.head_dim), jnp.float32))
    if spec.hides:
        plgpu.barrier_wait(shared.weights_full.at[lax.rem(steps, _slots(spec))])
        marks = shared.marks.at[0]
        marks[...] = load(marks, BY_ROW) + nonfinite_rows(total)
    # All weights have come, so the other warpgroup reads no key any more.
    store_sums(shared, 0, tile, outputs, {"d_key": (total,)})


def _load_own(tile: Tile, name: str, room: Any, full: Any) -> None:
    start_load(tile.arrays[name], (tile.batch, tile.keys, tile.head), room, 0, full.at[0])
    plgpu.barrier_wait(full.at[0])


def _weigh(consumer: _Consumer, head: Any, compared: bool, i: Any, count: Any) -> Any:
    """Add P' dO of block i of a head, and hand P over; blocks taken so far."""
    blocks, shared, spec = consumer.blocks, consumer.shared, consumer.tile.spec
    slots = _slots(spec)
    me, slot, room, i = opaque(spec, 0, lax.rem(count, blocks.stages), lax.rem(count, slots), i)
    held = pairs.tiles_of_slot(spec, blocks, shared, me, slot)
    tile = replace(consumer.tile, head=head, row=i * blocks.step, pairs=held)

    def run(s: Any) -> None:
        plgpu.barrier_wait(shared.query_full.at[slot])
        lse = load(shared.lse.at[slot], BY_COLUMN)
        if spec.logits.folds_lse:
            s[...] = over_columns(lse, tile.shape)
        plgpu.wgmma(s, shared.key.at[me], shared.query.at[slot].T)
        pairs_kept = kept_pairs(tile)
        score = plgpu.wgmma_accumulator_load(s, wait_n=0)
        bounded = replace(tile, bounds=load_bounds(tile)) if compared or spec.logits.alibi else tile
        plgpu.barrier_arrive(shared.query_empty.at[slot])
        u, hiding = logits(bounded, score, compared)
        slope = cap_slope(spec, u)
        if slope is not None:
            # Before P, so that registers hold one of them.
            plgpu.barrier_wait(shared.weights_empty.at[room])
            shared.weights.at[room + slots][...] = slope
        p = weights_of(bounded, u, hiding, None if spec.logits.folds_lse else lse)
        plgpu.barrier_wait(shared.d_out_full.at[slot])
        kept = dropped(p, pairs_kept)
        plgpu.wgmma(consumer.total, kept.astype(spec.dtype), shared.d_out.at[slot])
        if slope is None:
            plgpu.barrier_wait(shared.weights_empty.at[room])
        shared.weights.at[room][...] = p if pairs_kept is None else 2.0 * kept - p
        plgpu.barrier_arrive(shared.weights_full.at[room])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.d_out_empty.at[slot])

    pl.run_scoped(run, plgpu.ACC(tile.shape, jnp.float32))
    return count + 1


def _differentiate(consumer: _Consumer, head: Any, compared: bool, i: Any, count: Any) -> Any:
    """Add dS' Q of block i of a head, with the weights that are handed over; blocks taken so far."""
    blocks, shared, spec = consumer.blocks, consumer.shared, consumer.tile.spec
    slots = _slots(spec)
    me, slot, room = opaque(spec, 0, lax.rem(count, blocks.stages), lax.rem(count, slots))
    shape = consumer.tile.shape

    def run(dp: Any) -> None:
        plgpu.barrier_wait(shared.d_out_full.at[slot])
        if not spec.dropout:
            dp[...] = over_columns(load(shared.delta.at[slot], BY_COLUMN), shape)
        plgpu.wgmma(dp, shared.value.at[me], shared.d_out.at[slot].T)
        plgpu.barrier_wait(shared.weights_full.at[room])
        p = plgpu.load(shared.weights.at[room], layout=TILE)
        slope = None if spec.logits.cap is None else plgpu.load(shared.weights.at[room + slots], layout=TILE)
        found = plgpu.wgmma_accumulator_load(dp, wait_n=0)
        plgpu.barrier_arrive(shared.weights_empty.at[room])
        if spec.dropout:
            found = jnp.where(p < 0.0, 0.0, found) + over_columns(
                load(shared.delta.at[slot], BY_COLUMN), shape
            )
            p = jnp.abs(p)
        plgpu.barrier_arrive(shared.d_out_empty.at[slot])
        ds = cotangents(p, slope, found, compared).astype(spec.dtype)
        plgpu.barrier_wait(shared.query_full.at[slot])
        plgpu.wgmma(consumer.total, ds, shared.query.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.query_empty.at[slot])

    pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))
    return count + 1
