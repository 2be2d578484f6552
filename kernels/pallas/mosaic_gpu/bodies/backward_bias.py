"""The Hopper kernel of dbias: a program owns a tile of the bias.

Keys are rows, as in `backward_key`: a bias that is the same for all queries is then summed along columns.
What a program visits are the batch rows and query heads that the bias is broadcast over, and all blocks of
queries if it is the same for all. One warpgroup, the producer, copies the four tensors of every visit, into
a ring of slots; each of the others holds 64 keys of the tile. Every sum has one owner and one order (S17).

lse and delta are as in `backward_query`.
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
from attest.kernels.pallas.mosaic_gpu.launch.scratch import (
    consumer_signal,
    key_copies,
    number_ring,
    query_copies,
    slot_empty,
    tile_ring,
    value_ring,
)
from attest.kernels.pallas.mosaic_gpu.launch.transfers import matrix, start_load, tiled
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import PROGRAM, barriers, warp_specialize
from attest.kernels.pallas.mosaic_gpu.schedule.spans import query_span
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tile import pairs
from attest.kernels.pallas.mosaic_gpu.tile.dropout import kept_pairs, load_words, of_kept_pairs
from attest.kernels.pallas.mosaic_gpu.tile.tile import (
    BY_COLUMN,
    TILE,
    Tile,
    cotangents,
    load,
    load_bounds,
    opaque,
    over_columns,
    weights,
)

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private


def _key_ring(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    return matrix(spec.dtype, blocks.stages * blocks.consumers, ROWS, spec.shape.head_dim)


def _value_ring(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    return matrix(spec.dtype, blocks.stages * blocks.consumers, ROWS, spec.shape.value_dim)


def _slot_full(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    """Return barriers of slots: a block of query rows, two numbers of each, each consumer's keys, values.

    A tile of the mask comes with those of each consumer.
    """
    own = blocks.consumers * (sum(key_copies(spec, ROWS)) + ("mask" in spec.tiled_pairs))
    return barriers(blocks.stages, sum(query_copies(spec, blocks.step)) + 2 + own)


def _bias_full(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    return consumer_signal(spec, blocks) if "bias" in spec.tiled_pairs else None


def _d_bias(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    if "bias" not in spec.tiled_pairs:
        return None
    return tiled(spec.d_bias_dtype, blocks.consumers, spec.shape.q_block, ROWS)


@dataclass(frozen=True)
class Shared:
    """The shared state of a program's warpgroups: rings of tiles, and barriers for full and for empty slots.

    key [stages * consumers, 64, D]; value [stages * consumers, 64, Dv]; query [stages, step, D]; d_out
    [stages, step, Dv]; lse, delta [stages, step] float32; mask: see `pairs`. Of a bias of every pair, bias
    and d_bias [consumers, step, 64], which all visits share.
    """

    key: Annotated[Any, _key_ring]
    value: Annotated[Any, _value_ring]
    query: Annotated[Any, tile_ring]
    d_out: Annotated[Any, value_ring]
    lse: Annotated[Any, number_ring]
    delta: Annotated[Any, number_ring]
    full: Annotated[Any, _slot_full]
    empty: Annotated[Any, slot_empty]
    mask: Annotated[Any, pairs.ring_of_keys("mask")] = None
    bias: Annotated[Any, pairs.room_of_keys("bias")] = None
    d_bias: Annotated[Any, _d_bias] = None
    bias_full: Annotated[Any, _bias_full] = None


@dataclass(frozen=True)
class _Visits:
    """The visits of a program: `count` times a batch row, a query head and a block of queries.

    owner: the batch row, head, key block and query block of the program's tile, 0 where all share it. start,
    blocks: the first of the query blocks, and how many, where it visits more than one.
    """

    spec: KernelSpec
    owner: tuple[Any, Any, Any, Any]
    start: Any
    blocks: Any
    count: Any

    def at(self, visit: Any) -> tuple[Any, Any, Any]:
        """Return the batch row, query head and query block of a visit."""
        by_batch, by_head, by_query = _axes(self.spec)
        batch, head, _, row_block = self.owner
        rest = visit
        if not by_query:
            row_block, rest = self.start + lax.rem(visit, self.blocks), lax.div(visit, self.blocks)
        if not by_head:
            head, rest = lax.rem(rest, self.spec.shape.heads), lax.div(rest, self.spec.shape.heads)
        return batch if by_batch else rest, head, row_block


def programs(spec: KernelSpec) -> int:
    """Return the number of programs in a launch."""
    shape = spec.shape
    by_batch, by_head, by_query = _axes(spec)
    entries = (shape.batch if by_batch else 1) * (shape.heads if by_head else 1)
    return entries * shape.k_blocks * (shape.q_blocks if by_query else 1)


def backward_bias(
    spec: KernelSpec,
    blocks: BackwardBlocks,
    arrays: Mapping[str, Any],
    outputs: Mapping[str, Any],
    shared: Shared,
) -> None:
    """Run the body of the kernel.

    outputs: d_bias [.., queries, keys]; [.., keys, queries] if all keys share the bias, and [.., keys] if all
    queries do.
    """
    visits = _visits(spec, arrays)

    def produce() -> None:
        lax.fori_loop(0, visits.count, partial(_produce, blocks, arrays, shared, visits), None)

    def consume(warpgroup: Any) -> None:
        _consume(blocks, arrays, outputs["d_bias"], shared, warpgroup, visits)

    warp_specialize(blocks, produce, consume)


def _visits(spec: KernelSpec, arrays: Mapping[str, Any]) -> _Visits:
    shape = spec.shape
    by_batch, by_head, by_query = _axes(spec)
    rest, row_block, batch, head = lax.axis_index(PROGRAM), jnp.int32(0), jnp.int32(0), jnp.int32(0)
    if by_query:
        row_block, rest = lax.rem(rest, shape.q_blocks), lax.div(rest, shape.q_blocks)
    key_block, rest = lax.rem(rest, shape.k_blocks), lax.div(rest, shape.k_blocks)
    if by_head:
        head, rest = lax.rem(rest, shape.heads), lax.div(rest, shape.heads)
    if by_batch:
        batch = rest
    start, stop = jnp.int32(0), jnp.int32(shape.q_blocks)
    if by_batch or not spec.visibility.by_batch:
        # Else which query blocks see the keys differs between the batch rows that share the tile.
        start, _, _, stop = query_span(spec, arrays, batch, key_block)
    shared = (1 if by_batch else shape.batch) * (1 if by_head else shape.heads)
    if by_query:
        count = jnp.where((start <= row_block) & (row_block < stop), shared, 0)
    else:
        count = shared * (stop - start)
    return _Visits(spec, (batch, head, key_block, row_block), start, stop - start, count)


def _produce(
    blocks: BackwardBlocks, arrays: Mapping[str, Any], shared: Shared, visits: _Visits, visit: Any, _: None
) -> None:
    """Start the copies of a visit's tensors, when its slot is empty."""
    batch, head, row_block = visits.at(visit)
    rows = pl.ds(row_block * blocks.step, blocks.step)
    slot = lax.rem(visit, blocks.stages)
    pl.when(visit >= blocks.stages)(lambda: plgpu.barrier_wait(shared.empty.at[slot]))
    for name, ring, at in (
        ("query", shared.query, (batch, rows, head)),
        ("d_out", shared.d_out, (batch, rows, head)),
        ("lse", shared.lse, (batch, head, rows)),
        ("delta", shared.delta, (batch, head, rows)),
    ):
        start_load(arrays[name], at, ring, slot, shared.full.at[slot])
    for name, ring in (("key", shared.key), ("value", shared.value)):
        for i in range(blocks.consumers):
            keys = pl.ds(visits.owner[2] * blocks.own + i * ROWS, ROWS)
            at = (batch, keys, lax.div(head, visits.spec.shape.group))
            start_load(arrays[name], at, ring, slot * blocks.consumers + i, shared.full.at[slot])
    if shared.mask is not None:
        for i in range(blocks.consumers):
            keys = pl.ds(visits.owner[2] * blocks.own + i * ROWS, ROWS)
            at = pairs.place(visits.spec, "mask", (batch, head, rows, keys))
            start_load(arrays["mask"], at, shared.mask, i * blocks.stages + slot, shared.full.at[slot])


def _consume(
    blocks: BackwardBlocks,
    arrays: Mapping[str, Any],
    d_bias: Any,
    shared: Shared,
    warpgroup: Any,
    visits: _Visits,
) -> None:
    """Sum and store dbias of 64 keys."""
    spec = visits.spec
    batch, head, key_block, row_block = visits.owner
    key = key_block * blocks.own + warpgroup * ROWS
    tile = Tile(spec, arrays, batch, head, row_block * blocks.step, key, transposed=True, strict=True)
    tile = replace(tile, words=load_words(arrays))
    if shared.bias_full is not None:
        full = shared.bias_full.at[warpgroup]
        at = pairs.place(spec, "bias", (batch, head, tile.queries, tile.keys))
        start_load(arrays["bias"], at, shared.bias, warpgroup, full)
        plgpu.barrier_wait(full)
    total = plgpu.layout_cast(jnp.zeros(tile.shape, jnp.float32), TILE)
    total = lax.fori_loop(0, visits.count, partial(_step, blocks, shared, warpgroup, tile, visits), total)
    if shared.d_bias is not None:
        room = shared.d_bias.at[warpgroup]
        pairs.store_transposed(room, total)
        plgpu.commit_smem()

        # Of an axis with one tile Mosaic drops the index, so that a tile past the end would replace that one.
        @pl.when(tile.key < spec.shape.k_length)
        def _() -> None:
            plgpu.copy_smem_to_gmem(room, d_bias.at[batch, head, tile.queries, tile.keys])
            plgpu.wait_smem_to_gmem(0)

    elif _axes(spec)[2]:
        d_bias[batch, head, tile.keys, tile.queries] = total.astype(d_bias.dtype)
    else:
        d_bias[batch, head, tile.keys] = jnp.sum(total, axis=1).astype(d_bias.dtype)


def _step(
    blocks: BackwardBlocks,
    shared: Shared,
    warpgroup: Any,
    tile: Tile,
    visits: _Visits,
    visit: Any,
    total: jax.Array,
) -> jax.Array:
    """Return the total with dS of a visit added."""
    batch, head, row_block = visits.at(visit)
    tile = replace(tile, batch=batch, head=head, row=row_block * blocks.step)
    tile = replace(tile, bounds=load_bounds(tile))
    me, slot = opaque(tile.spec, warpgroup, lax.rem(visit, blocks.stages))
    own = slot * blocks.consumers + me
    held = {"bias": shared.bias.at[me]} if shared.bias is not None else {}
    if shared.mask is not None:
        held["mask"] = shared.mask.at[me * blocks.stages + slot]
    tile = replace(tile, pairs=held)

    def run(s: Any, dp: Any) -> jax.Array:
        plgpu.barrier_wait(shared.full.at[slot])
        if not tile.spec.dropout:
            dp[...] = over_columns(load(shared.delta.at[slot], BY_COLUMN), tile.shape)
        plgpu.wgmma(s, shared.key.at[own], shared.query.at[slot].T)
        plgpu.wgmma(dp, shared.value.at[own], shared.d_out.at[slot].T)
        pairs_kept = kept_pairs(tile)
        score = plgpu.wgmma_accumulator_load(s, wait_n=1)
        # A bias comes between product and exponent, so that the lse was not subtracted before.
        p, slope = weights(tile, score, load(shared.lse.at[slot], BY_COLUMN), compared=True)
        found = plgpu.wgmma_accumulator_load(dp, wait_n=0)
        if tile.spec.dropout:
            delta = over_columns(load(shared.delta.at[slot], BY_COLUMN), tile.shape)
            found = of_kept_pairs(found, pairs_kept, delta)
        ds = cotangents(p, slope, found, compared=True)
        plgpu.barrier_arrive(shared.empty.at[slot])
        return ds

    acc = plgpu.ACC(tile.shape, jnp.float32)
    return total + pl.run_scoped(run, acc, acc)


def _axes(spec: KernelSpec) -> tuple[bool, bool, bool]:
    """Return which of batch, head and query the bias has several entries of; there is a sum for each key."""
    bias = spec.logits.bias
    assert bias is not None
    return bias.by_batch, bias.by_head, bias.by_query
