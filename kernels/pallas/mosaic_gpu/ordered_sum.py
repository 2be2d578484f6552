"""Sums in memory to which many programs add, one after another, so that the bits are always the same (S17).

Programs add to a sum in the order of their indices: a count for each sum says how many have added, and a
program waits for its turn. This is no deadlock. A GPU starts the programs of a launch by their indices, so
whatever a program waits for has started, and the first of those that have not ended waits for none.

A warpgroup of its own waits, adds and counts, so that consumers only hand over what is to be added. The TMA
unit adds.
"""

from collections.abc import Callable
from functools import partial
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
    place: Callable[[Any], tuple[Any, tuple[Any, ...]]],
    before: Any,
) -> None:
    """Add the parts of each step to their sums when their turn has come: the work of one warpgroup.

    parts: in shared memory, one for each consumer. written, free: a barrier for each, from and for the
    consumer. sums: how many there are. place(step): the number of a sum, and where it is in memory, for each
    consumer. before: how many programs add to each of these sums before this one; the first one stores.
    """
    counts = pl.get_global(plgpu.SemaphoreType.REGULAR((sums,)))  # all 0 when the launch starts
    consumers = range(parts.shape[0])
    for i in consumers:
        plgpu.barrier_arrive(free.at[i])

    def step(nth: Any, _: None) -> None:
        number, places = place(nth)
        count = counts.at[number]
        plgpu.semaphore_wait(count, before, decrement=False, memory_scope="gpu")
        for i in consumers:
            part, total = parts.at[i], places[i]
            plgpu.barrier_wait(written.at[i])
            pl.when(before == 0)(partial(plgpu.copy_smem_to_gmem, part, total))
            pl.when(before > 0)(partial(plgpu.copy_smem_to_gmem, part, total, reduction_op="add"))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in consumers:
            plgpu.barrier_arrive(free.at[i])
        plgpu.wait_smem_to_gmem(0)
        plgpu.semaphore_signal(count, memory_scope="gpu")

    lax.fori_loop(0, steps, step, None)


def hand_over(room: Any, written: Any, free: Any, part: jax.Array) -> None:
    """Write a consumer's part to its room, when the part before has been read."""
    plgpu.barrier_wait(free)
    room[...] = part
    fence()
    plgpu.barrier_arrive(written)


@plgpu.inline_mgpu()
def fence(_: Any) -> None:
    """Let products and the TMA unit see what this thread has written to shared memory."""
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
