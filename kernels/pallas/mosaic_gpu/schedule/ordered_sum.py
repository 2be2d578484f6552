"""Sums in memory to which many programs add, one after another, so that the bits are always the same (S17).

Programs add to a sum in the order of their indices: a count for each sum says how many have added, and a
program waits for its turn. This is no deadlock. A GPU starts the programs of a launch by their indices, so
whatever a program waits for has started, and the first of those that have not ended waits for none.

A warpgroup of its own waits, adds and counts, so that consumers only hand over what is to be added. The TMA
unit adds.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir.dialects import nvvm

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private


def add_parts(
    parts: Any,
    written: Any,
    free: Any,
    sums: int,
    steps: Any,
    place: Callable[[Any], tuple[Any, Any]],
    before: Any,
) -> None:
    """Add the part of each step to its sum when its turn has come: the work of one warpgroup.

    parts: rooms in shared memory, which steps take in turn. written, free: a barrier for each, from and for
    those who write parts. sums: how many there are. place(step): the number of a sum, and where it is in
    memory. before: how many programs add to each of these sums before this one; the first one stores.
    """
    counts = pl.get_global(plgpu.SemaphoreType.REGULAR((sums,)))  # all 0 when the launch starts
    rooms = parts.shape[0]
    for i in range(rooms):
        plgpu.barrier_arrive(free.at[i])

    def step(nth: Any, _: None) -> None:
        number, total = place(nth)
        room = lax.rem(nth, rooms)
        count, part = counts.at[number], parts.at[room]
        plgpu.barrier_wait(written.at[room])
        plgpu.semaphore_wait(count, before, decrement=False, memory_scope="gpu")
        pl.when(before == 0)(lambda: plgpu.copy_smem_to_gmem(part, total))
        pl.when(before > 0)(lambda: plgpu.copy_smem_to_gmem(part, total, reduction_op="add"))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(free.at[room])
        plgpu.wait_smem_to_gmem(0)
        plgpu.semaphore_signal(count, memory_scope="gpu")

    lax.fori_loop(0, steps, step, None)


def hand_over(room: Any, written: Any, free: Any, part: jax.Array) -> None:
    """Write a consumer's share of a part to its place in a room, when what was there has been read."""
    plgpu.barrier_wait(free)
    room[...] = part
    fence()
    plgpu.barrier_arrive(written)


@plgpu.inline_mgpu()
def fence(_: Any) -> None:
    """Let products and the TMA unit see what this thread has written to shared memory."""
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
