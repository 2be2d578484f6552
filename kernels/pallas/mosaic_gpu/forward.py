"""The Hopper forward kernel: out, lse and the row maximum by TMA, WGMMA and warp specialisation.

A program's tile is `consumers` * 64 query rows of a head. One warpgroup, the producer, only copies K and V
blocks, into a ring of `stages` slots each; the others, the consumers, take 64 rows each. A consumer starts
the next S before it adds P V of the block before, so that the matrix unit works during the softmax. Ping-pong
barriers let one consumer at a time start its products, so that its softmax overlaps another's products.

Papers: Milakov and Gimelshein, arXiv 1805.02867 (online softmax); Dao, arXiv 2307.08691; Shah and others,
arXiv 2407.08608 (the overlap and the ping-pong schedule, on Hopper).
"""

import math
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
from attest.kernels.pallas.mosaic_gpu.blocks import ROWS, Blocks
from attest.kernels.pallas.mosaic_gpu.launch import (
    barriers,
    signal_next,
    start_copy,
    start_key_value_copies,
    start_ping_pong,
    warp_specialize,
)
from attest.kernels.pallas.mosaic_gpu.order import locate_query_tile
from attest.kernels.pallas.mosaic_gpu.scratch import (
    consumer_signal,
    key_full,
    own_rows,
    own_value_rows,
    query_copies,
    slot_empty,
    value_full,
)
from attest.kernels.pallas.mosaic_gpu.softmax import nothing_known, online_softmax, rescaled
from attest.kernels.pallas.mosaic_gpu.spans import Span, key_span, over_keys, part_span, rows_span
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tile import Tile, leaked, load_bounds, over_rows
from attest.kernels.pallas.mosaic_gpu.tiles import batch_and_part, over_tiles
from attest.kernels.pallas.mosaic_gpu.transfers import first_channels, matrix, start_load, start_store

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private

LN2 = math.log(2.0)


def _key_ring(spec: KernelSpec, blocks: Blocks) -> Any:
    return matrix(spec.dtype, blocks.stages, blocks.k, spec.head_dim)


def _value_ring(spec: KernelSpec, blocks: Blocks) -> Any:
    return matrix(spec.dtype, blocks.stages, blocks.k, spec.value_dim)


def _query_full(spec: KernelSpec, blocks: Blocks) -> Any:
    return barriers(blocks.consumers, query_copies(spec, ROWS)[0])


def _query_empty(_: KernelSpec, blocks: Blocks) -> Any:
    return barriers(1, arrivals=blocks.consumers)


def _out(spec: KernelSpec, blocks: Blocks) -> Any:
    return None if blocks.programs is None or spec.partial else own_value_rows(spec, blocks)


@dataclass(frozen=True)
class Shared:
    """What the warpgroups of a program share: tiles, and barriers that tell when they are full or empty.

    query [consumers, 64, D]; out [consumers, 64, Dv]; key [stages, k, D]; value [stages, k, Dv]; mask, bias:
    see `pairs`. out is None where a program has one tile: the query then makes room for it. It is None, too,
    where results are partial: those are stored from registers. A ring's barriers have an entry for each slot;
    query_full and ping_pong, for each consumer.
    """

    query: Annotated[Any, own_rows]
    key: Annotated[Any, _key_ring]
    value: Annotated[Any, _value_ring]
    query_full: Annotated[Any, _query_full]
    query_empty: Annotated[Any, _query_empty]
    key_full: Annotated[Any, key_full]
    key_empty: Annotated[Any, slot_empty]
    value_full: Annotated[Any, value_full]
    value_empty: Annotated[Any, slot_empty]
    ping_pong: Annotated[Any, consumer_signal]
    out: Annotated[Any, _out] = None
    mask: Annotated[Any, pairs.ring_of_queries("mask")] = None
    bias: Annotated[Any, pairs.ring_of_queries("bias")] = None
    pairs_full: Annotated[Any, pairs.slot_full] = None
    pairs_empty: Annotated[Any, pairs.slot_empty] = None


@dataclass(frozen=True)
class _Consumer:
    """A consumer at work on a tile. acc: [64, Dv] float32, the sum of P V, which the products accumulate."""

    spec: KernelSpec
    blocks: Blocks
    shared: Shared
    warpgroup: Any
    tile: Tile
    acc: Any

    def slot(self, count: Any) -> Any:
        return lax.rem(count, self.blocks.stages)

    def wait_for_signal(self) -> None:
        plgpu.barrier_wait(self.shared.ping_pong.at[self.warpgroup])

    def signal_next(self) -> None:
        signal_next(self.shared.ping_pong, self.warpgroup, self.blocks.consumers)

    def start_score(self, s: Any, slot: Any) -> None:
        """Start S = Q K^T of a slot, once the block is there and this consumer has its signal."""
        plgpu.barrier_wait(self.shared.key_full.at[slot])
        self.wait_for_signal()
        plgpu.wgmma(s, self.shared.query.at[self.warpgroup], self.shared.key.at[slot].T)

    def skip_block(self, count: Any) -> Any:
        """Release a block that only the other consumers need, once it is there and the signal has come."""
        shared, slot = self.shared, self.slot(count)
        plgpu.barrier_wait(shared.key_full.at[slot])
        self.wait_for_signal()
        self.signal_next()
        plgpu.barrier_arrive(shared.key_empty.at[slot])
        plgpu.barrier_wait(shared.value_full.at[slot])
        plgpu.barrier_arrive(shared.value_empty.at[slot])
        if shared.pairs_full is not None:
            plgpu.barrier_wait(shared.pairs_full.at[slot])
            self.release_pairs(slot)
        return count + 1

    def release_pairs(self, slot: Any) -> None:
        if self.shared.pairs_empty is not None:
            plgpu.barrier_arrive(self.shared.pairs_empty.at[slot])

    def tile_of(self, slot: Any, block: Any) -> Tile:
        """The tile of a block of keys, whose mask and bias are in a slot, once they are there."""
        spec, blocks, shared = self.spec, self.blocks, self.shared
        if shared.pairs_full is not None:
            plgpu.barrier_wait(shared.pairs_full.at[slot])
        held = pairs.tiles_of_slot(spec, blocks, shared, self.warpgroup, slot)
        return replace(self.tile, key=block * blocks.k, pairs=held)

    def with_score[T](self, run: Callable[[Any], T]) -> T:
        return pl.run_scoped(run, plgpu.ACC((ROWS, self.blocks.k), jnp.float32))


def flash_forward(
    spec: KernelSpec, blocks: Blocks, arrays: Mapping[str, Any], outputs: Mapping[str, Any], shared: Shared
) -> None:
    """The body of the kernel. outputs: out, lse, row_max, leak, by name."""

    def produce() -> None:
        over_tiles(spec, blocks, arrays, partial(_produce, spec, blocks, arrays, shared))

    def consume(warpgroup: Any) -> None:
        start_ping_pong(shared.ping_pong, warpgroup, blocks.consumers)
        over_tiles(spec, blocks, arrays, partial(_consume, spec, blocks, arrays, outputs, shared, warpgroup))
        plgpu.wait_smem_to_gmem(0)

    warp_specialize(blocks, produce, consume)


def _visit(spec: KernelSpec, arrays: Mapping[str, Any], tile: Any) -> tuple[Any, Any, Any, Span]:
    """The batch row, head and row block of a tile, and its key blocks.

    A row block that sees nothing takes one block of keys, all hidden: no case of its own.
    """
    entry, head, block = locate_query_tile(spec, tile)
    batch, part = batch_and_part(spec, entry)
    start, full_start, full_stop, stop = part_span(spec, part, key_span(spec, arrays, batch, block))
    return batch, head, block, (start, full_start, full_stop, jnp.maximum(stop, start + 1))


def _produce(
    spec: KernelSpec, blocks: Blocks, arrays: Mapping[str, Any], shared: Shared, tile: Any, count: Any
) -> Any:
    """Start copies of the query of a tile and of its K and V blocks, each when its slot is empty."""
    batch, head, block, (start, _, _, stop) = _visit(spec, arrays, tile)
    if blocks.programs is not None:
        pl.when(count > 0)(lambda: plgpu.barrier_wait(shared.query_empty))
    for i in range(blocks.consumers):
        at = (batch, pl.ds(block * blocks.own + i * ROWS, ROWS), head)
        start_load(arrays["query"], at, shared.query, i, shared.query_full.at[i])
    key_head = lax.div(head, spec.group)

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
    tile: Any,
    count: Any,
) -> Any:
    """Computes and stores 64 rows of a tile."""
    batch, head, block, span = _visit(spec, arrays, tile)
    row = block * blocks.own + warpgroup * ROWS
    held = Tile(spec, arrays, batch, head, row, key=None)
    held = replace(held, bounds=load_bounds(held))

    own = rows_span(spec, span, row)

    def run(acc: Any) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        consumer = _Consumer(spec, blocks, shared, warpgroup, held, acc)
        acc, m, norm, taken = _attend(consumer, own, count)
        return (
            acc,
            m,
            norm,
            lax.fori_loop(own[3], span[3], lambda _, taken: consumer.skip_block(taken), taken),
        )

    acc, m, norm, count = pl.run_scoped(run, plgpu.ACC((ROWS, spec.value_dim), jnp.float32))
    # Anew, so that registers need not hold through the loop what follows from the number of the tile.
    entry, head, block = locate_query_tile(spec, lax.optimization_barrier(tile))
    rows = pl.ds(block * blocks.own + warpgroup * ROWS, ROWS)
    if spec.hides:
        outputs["leak"][entry, head, rows] = leaked(acc)
    # Short of the maximum by up to SLACK where out is normalised; then all that is read of it is -inf.
    row_max = m if spec.partial else m * (LN2 * spec.reference_unit)
    outputs["row_max"][entry, head, rows] = jnp.where(norm == 0.0, -jnp.inf, row_max)
    lse, factor = finish(spec, arrays, head, m, norm)
    outputs["lse"][entry, head, rows] = lse
    if spec.partial:
        outputs["out"][entry, head, rows] = acc
        return count
    if spec.unrounded:
        outputs["out"][entry, rows, head] = scaled(acc, factor)
        return count
    room = shared.query
    if blocks.programs is not None:
        room = shared.out
        # The out of the tile before may still be on its way.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    first_channels(room.at[warpgroup], spec.value_dim)[...] = scaled(acc, factor).astype(spec.dtype)
    plgpu.commit_smem()
    start_store(room, warpgroup, spec.value_dim, outputs["out"], (entry, rows, head))
    return count


def finish(
    spec: KernelSpec, arrays: Mapping[str, Any], head: Any, m: jax.Array, norm: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The lse, and what the sums of P V are multiplied by, of each row (clauses S10, S11, S13).

    Of partial results: the norm, and None for 1.
    """
    if spec.partial:
        return norm, None
    rescale, largest = jnp.float32(1.0), m
    if spec.sinks:
        together = lax.broadcast(arrays["sinks"][0, head], (ROWS,))
        largest = jnp.maximum(m, together)
        norm = norm * _share(spec, m, largest) + _share(spec, together, largest)
    empty = norm == 0.0
    lse = jnp.where(empty, -jnp.inf, largest * (LN2 * spec.reference_unit) + jnp.log(norm))
    if spec.normalize:
        rescale = 1.0 / jnp.where(empty, 1.0, norm)
    elif spec.sinks:
        # The unnormalised out is relative to the largest of all, and `together` is a sum.
        largest = jnp.maximum(m, lax.broadcast(arrays["sinks"][1, head], (ROWS,)))
    return lse, _share(spec, m, largest) * rescale


def scaled(acc: jax.Array, factor: jax.Array | None) -> jax.Array:
    """The sums of P V times the factor of their rows."""
    return acc if factor is None else acc * over_rows(factor, acc.shape)


def _share(spec: KernelSpec, m: jax.Array, largest: jax.Array) -> jax.Array:
    """Two to the power of m - largest in bits, at most 1.

    m is a product. The compiler may fuse it with the subtraction, which leaves the rounding of the product.
    Of a row that has seen nothing, and of huge logits, that is more than any exponent.
    """
    return jnp.where(m >= largest, 1.0, jnp.exp2((m - largest) * spec.reference_unit))


def _attend(consumer: _Consumer, span: Span, count: Any) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """acc = sum of P V, the reference, the norm, over the key blocks of a span; blocks taken."""
    spec, blocks, shared = consumer.spec, consumer.blocks, consumer.shared
    start = span[0]
    plgpu.barrier_wait(shared.query_full.at[consumer.warpgroup])

    slot = consumer.slot(count)
    known = nothing_known(spec, blocks.partial_sums)
    score = _score(consumer, slot)
    first = online_softmax(consumer.tile_of(slot, start), score, spec.hides or spec.ragged, known)
    if spec.tiled_pairs:
        first = lax.optimization_barrier(first)
        consumer.release_pairs(slot)
    plgpu.barrier_wait(shared.value_full.at[slot])
    carry = (first.p.astype(spec.dtype), first.known, count + 1)
    carry = over_keys(spec, span, start + 1, partial(_step, consumer), carry)
    p, known, count = carry

    if blocks.programs is not None:
        plgpu.barrier_arrive(shared.query_empty)
    slot = consumer.slot(count - 1)
    plgpu.wgmma(consumer.acc, p, shared.value.at[slot])
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(shared.value_empty.at[slot])
    norm = known.whole_norm()
    return consumer.acc[...], known.level(spec), norm, count


def _score(consumer: _Consumer, slot: Any) -> jax.Array:
    """S = Q K^T [64, k] float32 of the first block, behind which nothing hides."""

    def run(s: Any) -> jax.Array:
        consumer.start_score(s, slot)
        consumer.signal_next()
        score = s[...]
        plgpu.barrier_arrive(consumer.shared.key_empty.at[slot])
        return score

    return consumer.with_score(run)


def _step(consumer: _Consumer, compared: bool, j: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
    """Adds P V of the block before, while S and P of block j are made.

    carry: P of the block before, in the inputs' dtype, what is known of the rows, and the blocks taken.
    """
    spec, shared, acc = consumer.spec, consumer.shared, consumer.acc
    p, known, count = carry
    slot, slot_before = consumer.slot(count), consumer.slot(count - 1)

    def run(s: Any) -> Any:
        consumer.start_score(s, slot)
        plgpu.wgmma(acc, p, shared.value.at[slot_before])
        consumer.signal_next()
        tile = consumer.tile_of(slot, j)
        score = plgpu.wgmma_accumulator_load(s, wait_n=1)
        plgpu.barrier_arrive(shared.key_empty.at[slot])
        # Both compilers would else move the softmax behind the wait for the second product: LLVM obeys the
        # optimization barrier, and ptxas moves nothing past the loop in the wait for V.
        new = lax.optimization_barrier(online_softmax(tile, score, compared, known))
        consumer.release_pairs(slot)
        plgpu.barrier_wait(shared.value_full.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.value_empty.at[slot_before])
        return new

    new = consumer.with_score(run)
    acc[...] = rescaled(acc[...], new)
    # Rounded only now: the second product has been reading the registers that this writes.
    return lax.optimization_barrier(new.p).astype(spec.dtype), new.known, count + 1
