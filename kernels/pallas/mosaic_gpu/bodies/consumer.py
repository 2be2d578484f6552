"""A consumer of the Hopper forward kernel: what it waits for, releases and shares with other warpgroups."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from attest.kernels.pallas.mosaic_gpu.blocks import ROWS, Blocks
from attest.kernels.pallas.mosaic_gpu.bodies import repair
from attest.kernels.pallas.mosaic_gpu.launch.scratch import (
    consumer_signal,
    key_full,
    query_copies,
    slot_empty,
    value_full,
)
from attest.kernels.pallas.mosaic_gpu.launch.transfers import pieces
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import barriers, signal_next
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tile import pairs
from attest.kernels.pallas.mosaic_gpu.tile.dropout import kept_pairs
from attest.kernels.pallas.mosaic_gpu.tile.products import start_product, start_sums
from attest.kernels.pallas.mosaic_gpu.tile.tile import Tile

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private


def _key_ring(spec: KernelSpec, blocks: Blocks) -> Any:
    return pieces(spec.dtype, blocks.stages, blocks.k, spec.shape.head_pieces)


def _value_ring(spec: KernelSpec, blocks: Blocks) -> Any:
    return pieces(spec.dtype, blocks.stages, blocks.k, spec.shape.value_pieces)


def _query_ring(spec: KernelSpec, blocks: Blocks) -> Any:
    return pieces(spec.dtype, blocks.query_stages * blocks.consumers, ROWS, spec.shape.head_pieces)


def _query_full(spec: KernelSpec, blocks: Blocks) -> Any:
    return barriers(blocks.query_stages * blocks.consumers, query_copies(spec, ROWS)[0])


def _query_empty(_: KernelSpec, blocks: Blocks) -> Any:
    return barriers(blocks.query_stages, arrivals=blocks.consumers)


@dataclass(frozen=True)
class Shared:
    """The shared state of a program's warpgroups: tiles, and barriers that tell when they are full or empty.

    query [slots * consumers, 64, D], of two slots where a program has several tiles: the query of the next
    one comes while this one is at work. out is stored to the slot of its query. key [stages, k, D]; value
    [stages, k, Dv]; these three are `Pieces`. mask, bias: see `pairs`. A ring's barriers have an entry for
    each slot; query_full, for each consumer of each slot; ping_pong, for each consumer.
    """

    query: Annotated[Any, _query_ring]
    key: Annotated[Any, _key_ring]
    value: Annotated[Any, _value_ring]
    query_full: Annotated[Any, _query_full]
    query_empty: Annotated[Any, _query_empty]
    key_full: Annotated[Any, key_full]
    key_empty: Annotated[Any, slot_empty]
    value_full: Annotated[Any, value_full]
    value_empty: Annotated[Any, slot_empty]
    ping_pong: Annotated[Any, consumer_signal]
    mask: Annotated[Any, pairs.ring_of_queries("mask")] = None
    bias: Annotated[Any, pairs.ring_of_queries("bias")] = None
    pairs_full: Annotated[Any, pairs.slot_full] = None
    pairs_empty: Annotated[Any, pairs.slot_empty] = None
    marks: Annotated[Any, repair.marks] = None
    ended: Annotated[Any, repair.ended] = None
    of_repair: Annotated[Any, repair.room()] = None


@dataclass(frozen=True)
class Consumer:
    """A consumer at work on a tile, the nth of its program.

    acc: [64, Dv] float32, the sum of P V, which the products accumulate: one for each piece of value.
    """

    spec: KernelSpec
    blocks: Blocks
    shared: Shared
    warpgroup: Any
    nth: Any
    tile: Tile
    acc: tuple[Any, ...]

    def slot(self, count: Any) -> Any:
        """Return the slot of the block that comes after `count` others."""
        return lax.rem(count, self.blocks.stages)

    @property
    def query(self) -> Any:
        """The slot of its query, and of the barrier of its arrival."""
        return query_slot(self.blocks, self.nth) + self.warpgroup

    def wait_for_query(self) -> None:
        """Wait until the query of this tile has arrived."""
        plgpu.barrier_wait(self.shared.query_full.at[self.query])

    def release_query_before(self) -> None:
        """Release the slot of the tile before, whose out was stored from there."""
        if self.blocks.query_stages == 1:
            return

        @pl.when(self.nth > 0)
        def _() -> None:
            if not (self.spec.results.partial or self.spec.results.unrounded):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.shared.query_empty.at[query_stage(self.blocks, self.nth - 1)])

    def wait_for_signal(self) -> None:
        """Wait for the signal of the consumer before this one."""
        plgpu.barrier_wait(self.shared.ping_pong.at[self.warpgroup])

    def signal_next(self) -> None:
        """Let the consumer behind this one start its products."""
        signal_next(self.shared.ping_pong, self.warpgroup, self.blocks.consumers)

    def start_score(self, s: Any, slot: Any) -> None:
        """Start S = Q K^T of a slot, once the block is there and this consumer has its signal."""
        plgpu.barrier_wait(self.shared.key_full.at[slot])
        self.wait_for_signal()
        overwrites = not self.blocks.adds_to_zeros
        start_product(s, self.shared.query, self.query, self.shared.key, slot, overwrites=overwrites)

    def start_sums(self, p: jax.Array, slot: Any) -> None:
        """Start to add P V of a slot: as many products as value has pieces."""
        start_sums(self.acc, p, self.shared.value, slot)

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
        """Release the tiles of a mask and a bias in a slot, if there are any."""
        if self.shared.pairs_empty is not None:
            plgpu.barrier_arrive(self.shared.pairs_empty.at[slot])

    def kept_pairs(self, block: Any) -> Any:
        """Return which pairs of a block of keys dropout keeps."""
        return kept_pairs(replace(self.tile, key=block * self.blocks.k))

    def tile_of(self, slot: Any, block: Any) -> Tile:
        """Return the tile of a block of keys, once its mask and bias have arrived in a slot."""
        spec, blocks, shared = self.spec, self.blocks, self.shared
        if shared.pairs_full is not None:
            plgpu.barrier_wait(shared.pairs_full.at[slot])
        held = pairs.tiles_of_slot(spec, blocks, shared, self.warpgroup, slot)
        return replace(self.tile, key=block * blocks.k, pairs=held)

    def with_score[T](self, run: Callable[[Any], T]) -> T:
        """Return run(s), s an accumulator [64, k] float32."""
        return pl.run_scoped(run, plgpu.ACC((ROWS, self.blocks.k), jnp.float32))


def query_stage(blocks: Blocks, nth: Any) -> Any:
    """Return which slot the query of the nth tile of a program has."""
    return lax.rem(nth, blocks.query_stages)


def query_slot(blocks: Blocks, nth: Any) -> Any:
    """Return the first entry of that slot: the tile of the first consumer."""
    return query_stage(blocks, nth) * blocks.consumers
