"""Tiles of a mask or bias of every pair: by TMA to shared memory, and from there to registers.

One that all queries or all keys share is no tile: `tile.Tile` reads it from memory.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from attest.kernels.pallas.mosaic_gpu.blocks import ROWS, BackwardBlocks, Blocks
from attest.kernels.pallas.mosaic_gpu.launch.transfers import tiled
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import barriers
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private

TILE = plgpu.Layout.WGMMA
# What two threads hold of 2 x 2 elements is the other way round, so that one shuffle transposes.
_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED

type Describe = Callable[[KernelSpec, Blocks | BackwardBlocks], Any]


def ring_of_queries(name: str) -> Describe:
    """Return [consumers * stages, 64, k]: a ring of tiles for each consumer, whose rows are queries."""
    return _ring(name, lambda spec: (ROWS, spec.shape.k_block))


def ring_of_keys(name: str) -> Describe:
    """Return [consumers * stages, step, 64]: a ring of tiles for each consumer, which owns keys."""
    return _ring(name, lambda spec: (spec.shape.q_block, ROWS))


def room_of_keys(name: str) -> Describe:
    """Return [consumers, step, 64]: one tile for each consumer, which owns keys."""
    return lambda spec, blocks: _room(spec, name, blocks.consumers, (spec.shape.q_block, ROWS))


def room(name: str) -> Callable[[KernelSpec], Any]:
    """Return [1, q, k]: one tile, of the block of a spec."""
    return lambda spec: _room(spec, name, 1, (spec.shape.q_block, spec.shape.k_block))


def slot_full(spec: KernelSpec, blocks: Blocks | BackwardBlocks) -> Any:
    """Return [stages] barriers, each complete when the tiles of all consumers have arrived."""
    copies = copies_of_slot(spec, blocks)
    return barriers(blocks.stages, arrivals=copies) if copies else None


def slot_empty(spec: KernelSpec, blocks: Blocks | BackwardBlocks) -> Any:
    """Return [stages] barriers, each complete when every consumer has read its tiles."""
    return barriers(blocks.stages, arrivals=blocks.consumers) if spec.tiled_pairs else None


def copies_of_slot(spec: KernelSpec, blocks: Blocks | BackwardBlocks) -> int:
    """Return how many copies fill a slot."""
    return blocks.consumers * len(spec.tiled_pairs)


def place(spec: KernelSpec, name: str, at: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Return where a tile is in its array. at: its batch row, query head, queries and keys."""
    batch, head, queries, keys = at
    of = spec.pair_arrays[name]
    return batch if of.by_batch else 0, head if of.by_head else 0, queries, keys


def copies(
    spec: KernelSpec,
    blocks: Blocks | BackwardBlocks,
    arrays: Mapping[str, Any],
    shared: Any,
    at: Callable[[int], tuple[Any, Any, Any, Any]],
) -> list[tuple[Any, tuple[Any, ...], Any]]:
    """Return the copies that fill a slot, as `launch.start_copy` takes them. at: a consumer's tile."""
    stages = blocks.stages
    return [
        (arrays[name], place(spec, name, at(i)), getattr(shared, name).at[pl.ds(i * stages, stages)])
        for name in spec.tiled_pairs
        for i in range(blocks.consumers)
    ]


def tiles_of_slot(
    spec: KernelSpec, blocks: Blocks | BackwardBlocks, shared: Any, warpgroup: Any, slot: Any
) -> dict[str, Any]:
    """Return a consumer's tiles in shared memory, by name."""
    held = warpgroup * blocks.stages + slot
    return {name: getattr(shared, name).at[held] for name in spec.tiled_pairs}


def load_tile(ref: Any, transposed: bool) -> jax.Array:
    """Return [queries, keys] from shared memory, as a product has it; [keys, queries] if transposed.

    A mask, whose elements have 8 bits, comes with 16 if transposed.
    """
    itemsize = ref.dtype.itemsize
    if not transposed:
        return plgpu.load(ref, layout=TILE, optimized=itemsize > 1)
    if itemsize == 2:
        return plgpu.load(ref.T, layout=TILE)
    x = plgpu.load(ref.T, layout=_TRANSPOSED, optimized=itemsize > 1)
    return plgpu.layout_cast(x.astype(jnp.int16) if itemsize == 1 else x, TILE)


def widened(x: jax.Array) -> jax.Array:
    """Widen a tile to float32: bfloat16 by two instructions for two elements; the compiler takes three."""
    if x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    number = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=TILE)
    return plgpu.inline_mgpu(arg_types=(TILE,), return_type=number)(_widened)(x)


def _widened(_: Any, array: Any) -> Any:
    """Widen pairs: the first element is the lower half of 32 bits, and the upper half of its float32."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    integers, floats = (ir.VectorType.get((2,), element) for element in (i32, f32))

    def constant(value: int) -> Any:
        return arith.constant(i32, ir.IntegerAttr.get(i32, value))

    def pair(register: Any) -> Any:
        both = vector.extract(vector.bitcast(ir.VectorType.get((1,), i32), register), [], [0])
        halves = arith.shli(both, constant(16)), arith.andi(both, constant(-(1 << 16)))
        return vector.bitcast(floats, vector.from_elements(integers, halves))

    registers = np.vectorize(pair, otypes=[object])(array.registers)
    return gpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)


def store_transposed(ref: Any, x: jax.Array) -> None:
    """Store [keys, queries], as a product has it, to [queries, keys] in shared memory."""
    x = x.astype(ref.dtype)
    ref.T[...] = x if ref.dtype.itemsize == 2 else plgpu.layout_cast(x, _TRANSPOSED)


def _ring(name: str, shape: Callable[[KernelSpec], tuple[int, int]]) -> Describe:
    return lambda spec, blocks: _room(spec, name, blocks.consumers * blocks.stages, shape(spec))


def _room(spec: KernelSpec, name: str, count: int, shape: tuple[int, int]) -> Any:
    array = spec.tiled_pairs.get(name)
    return None if array is None else tiled(array.dtype, count, *shape)
