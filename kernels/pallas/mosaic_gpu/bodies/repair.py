"""Recomputation of results into which a hidden value leaked as 0 * NaN (clause S4).

The matrix unit multiplies a hidden pair's 0 with whatever is stored behind it. A kernel ignores that, and its
consumers mark the rows whose sums are not finite. When all consumers of a program have ended, the first of
them computes each 64 rows with a mark anew, with what may not be seen taken out of the second product. By
then the program's other tiles are read no more, and those of the repair lie in their memory.

Where several programs add to one result, none of them can repair it: `repair_launch` does.
"""

import functools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from attest.kernels.pallas.mosaic_gpu.blocks import ROWS, BackwardBlocks, Blocks
from attest.kernels.pallas.mosaic_gpu.bodies.repair_tile import Place, Shared, each
from attest.kernels.pallas.mosaic_gpu.launch.overlay import Overlay
from attest.kernels.pallas.mosaic_gpu.launch.scratch import scratch
from attest.kernels.pallas.mosaic_gpu.launch.transfers import fence_copies
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import barriers, vector
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tile.tanh import any_above
from attest.kernels.pallas.mosaic_gpu.tile.tile import BY_COLUMN, load

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private

_REGISTERS = 240  # of a thread that repairs


def marks(spec: KernelSpec, blocks: Blocks | BackwardBlocks) -> Any:
    """Return [consumers, 64] float32: 0, or NaN for rows that are not finite."""
    return vector(ROWS, blocks.consumers) if spec.hides else None


def ended(spec: KernelSpec, blocks: Blocks | BackwardBlocks) -> Any:
    """Return a barrier, complete when all warpgroups that compute have ended."""
    return barriers(1, blocks.computing) if spec.hides else None


def room(marks: str = "marks") -> Callable[[KernelSpec, Blocks | BackwardBlocks], Any]:
    """Return the tiles of a repair, in the memory of the kernel's. marks: the room of the marks."""

    def describe(spec: KernelSpec, blocks: Blocks | BackwardBlocks) -> Any:
        return (
            Overlay(Shared, scratch(Shared, of_tiles(spec, blocks)), keeps=(marks,)) if spec.hides else None
        )

    return describe


def of_tiles(spec: KernelSpec, blocks: Blocks | BackwardBlocks) -> KernelSpec:
    """Return the spec of tiles of 64 rows. Only the forward kernel's sums depend on the keys of a step."""
    return spec.with_blocks(ROWS, spec.shape.k_block if isinstance(blocks, Blocks) else ROWS)


def marked(marks: Any) -> Any:
    """Return whether any of [rows] is NaN."""
    # By column, every warp holds all of the rows, so that all come to the same answer.
    return any_above(0.0, load(marks, BY_COLUMN), BY_COLUMN) > 0


def signal_end(spec: KernelSpec, shared: Any, warpgroup: Any, blocks: Blocks | BackwardBlocks) -> None:
    """Report that a warpgroup has ended and has set its marks, if pairs may be hidden.

    The caller has committed what the warpgroup wrote to the memory of tiles: a repair copies to it.
    """
    if not spec.hides:
        return
    of_consumer, of_producer = blocks.registers
    if of_consumer < _REGISTERS:
        pl.when(warpgroup != 0)(lambda: plgpu.set_max_registers(of_producer, action="decrease"))
    plgpu.barrier_arrive(shared.ended.at[0])


def repair(shared: Any, blocks: Blocks | BackwardBlocks, compute: Callable[[], None]) -> None:
    """Wait until all warpgroups have ended, and call compute() if any row is marked."""

    def run() -> None:
        # Also where a consumer has as many: ptxas would count on those of the launch.
        plgpu.set_max_registers(_REGISTERS, action="increase")
        # Results may have been written from registers, and a repair writes by copies.
        fence_copies()
        compute()

    plgpu.barrier_wait(shared.ended.at[0])
    found = [marked(shared.marks.at[i]) for i in range(blocks.consumers)]
    pl.when(functools.reduce(operator.or_, found))(run)


def repair_of_tile(
    spec: KernelSpec,
    shared: Any,
    blocks: BackwardBlocks,
    place: Place,
    length: int,
    compute: Callable[[Place], None],
) -> Callable[[], None] | None:
    """Return what repairs the only tile of a program, if pairs may be hidden.

    shared: a record with `marks`, `ended` and the room of `compute`. place: of the tile: its batch row, head
    and block. length: the rows of a head. compute(place): computes 64 rows.
    """
    batch, head, block = place

    def of_consumer(i: Any) -> None:
        rows = block * blocks.consumers + i
        exist = rows * ROWS < length
        pl.when(marked(shared.marks.at[i]) & exist)(lambda: compute((batch, head, rows)))

    run = partial(repair, shared, blocks, lambda: each(blocks.consumers, of_consumer))
    return run if spec.hides else None
