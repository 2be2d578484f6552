"""Sums in memory to which many programs add, one after another, so that the bits are always the same (S17).

Programs add to a sum in the order of their indices: a count for each sum says how many have added, and a
program waits for its turn. This is no deadlock. A GPU starts the programs of a launch by their indices, so
whatever a program waits for has started, and the first of those that have not ended waits for none.

The last warpgroup of a program waits, adds and counts, so that consumers only hand over what is to be added.
The TMA unit adds.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private


def add_parts(
    part: Any,
    written: Any,
    free: Any,
    sums: int,
    steps: Any,
    place: Callable[[Any], tuple[Any, Any]],
    before: Any,
) -> None:
    """Add the part of each step to its sum when its turn has come: the work of one warpgroup.

    part: in shared memory. written, free: barriers, from and for those who write it. sums: how many there
    are. place(step): the sum in memory and its number. before: how many programs add to each of these sums
    before this one; the first one stores.
    """
    counts = pl.get_global(plgpu.SemaphoreType.REGULAR((sums,)))  # all 0 when the launch starts
    plgpu.barrier_arrive(free)

    def step(i: Any, _: None) -> None:
        total, number = place(i)
        plgpu.barrier_wait(written)
        plgpu.semaphore_wait(counts.at[number], before, decrement=False, memory_scope="gpu")
        pl.when(before == 0)(lambda: plgpu.copy_smem_to_gmem(part, total))
        pl.when(before > 0)(lambda: plgpu.copy_smem_to_gmem(part, total, reduction_op="add"))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(free)
        plgpu.wait_smem_to_gmem(0)
        plgpu.semaphore_signal(counts.at[number], memory_scope="gpu")

    lax.fori_loop(0, steps, step, None)


def hand_over(room: Any, written: Any, free: Any, part: jax.Array) -> None:
    """Write a consumer's share of a part to its room, when the part before has been read."""
    plgpu.barrier_wait(free)
    room[...] = part
    plgpu.commit_smem()
    plgpu.barrier_arrive(written)
