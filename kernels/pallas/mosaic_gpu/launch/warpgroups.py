"""Launches of the Hopper kernels, and the roles, barriers and rings of their warpgroups."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from attest.kernels.pallas.mosaic_gpu.blocks import BackwardBlocks, Blocks
from attest.kernels.pallas.mosaic_gpu.launch.overlay import allocated, filled, shared_bytes
from attest.kernels.pallas.mosaic_gpu.launch.transfers import start_load

plgpu: Any = mosaic_gpu  # a checker takes its transforms for abstract

WARPGROUP, PROGRAM = "warpgroup", "program"  # the axes of a launch
SHARED_BYTES = 227 * 1024  # of a block; CUDA C++ Programming Guide, compute capability 9.0

type Refs = dict[str, Any]
type Outputs = Mapping[str, jax.ShapeDtypeStruct]


def launch[S](
    body: Callable[[Refs, Refs, S], None],
    shared: Callable[..., S],
    name: str,
    arrays: Mapping[str, Any],
    outputs: Outputs,
    scratch: Mapping[str, Any],
    programs: int,
    warpgroups: int,
) -> dict[str, jax.Array]:
    """Launch a kernel; return its outputs by name. body(arrays, outputs, shared(**scratch)) has their names.

    arrays: those that are a `jax.Ref` are changed in place. scratch: what `matrix`, `vector` and `barriers`
    describe, and `Overlay`.

    Raises: ValueError if the scratch does not fit into the shared memory of a block.
    """
    needed = shared_bytes(scratch)
    if needed > SHARED_BYTES:
        raise ValueError(
            f"attest.kernels.pallas.mosaic_gpu: {name} needs {needed} bytes of shared memory, and a block "
            f"has at most {SHARED_BYTES} on a Hopper GPU. Ask for smaller blocks or fewer stages in "
            "fwd_params or bwd_params; None lets the kernel choose."
        )

    def unpacked(*refs: Any, **rooms: Any) -> None:
        inputs, results = refs[: len(arrays)], refs[len(arrays) :]
        body(
            dict(zip(arrays, inputs, strict=True)),
            dict(zip(outputs, results, strict=True)),
            shared(**filled(scratch, rooms)),
        )

    run: Any = plgpu.kernel(
        unpacked,
        out_type=tuple(outputs.values()),
        scratch_types=dict(allocated(scratch)),
        grid=(programs,),
        grid_names=(PROGRAM,),
        num_threads=warpgroups,
        thread_name=WARPGROUP,
        kernel_name=name,
        # Lane by lane, all layouts are given here. To infer them took Mosaic most of the time of lowering.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Reductions go along rows, which no two warps share.
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    return dict(zip(outputs, run(*arrays.values()), strict=True))


def vector(size: int, count: int) -> Any:
    """Return [count, size] float32 in shared memory."""
    return plgpu.SMEM((count, size), jnp.float32)


def barriers(count: int, arrivals: int = 1) -> Any:
    """Return as many barriers, each complete when so many warpgroups and copies have arrived."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def warp_specialize(
    blocks: Blocks | BackwardBlocks,
    produce: Callable[[], Any],
    consume: Callable[[Any], Any],
    add: Callable[[], Any] | None = None,
    after: Callable[[], Any] | None = None,
) -> None:
    """Run consume(warpgroup) in each consumer, produce() in the warpgroup behind, add() in the next one.

    Each has the registers that the blocks say, add as many as produce. The first runs after() when it has
    consumed: apart, so that the compiler holds nothing for it while a consumer has few registers.
    """
    warpgroup, consumers = lax.axis_index(WARPGROUP), blocks.computing
    of_consumer, of_producer = blocks.registers

    @pl.when(warpgroup == consumers)
    def _() -> None:
        plgpu.set_max_registers(of_producer, action="decrease")
        produce()

    if add is not None:

        @pl.when(warpgroup == consumers + 1)
        def _() -> None:
            plgpu.set_max_registers(of_producer, action="decrease")
            add()

    @pl.when(warpgroup < consumers)
    def _() -> None:
        plgpu.set_max_registers(of_consumer, action="increase")
        consume(warpgroup)

    if after is not None:
        pl.when(warpgroup == 0)(after)


def start_ping_pong(barriers: Any, warpgroup: Any, consumers: int) -> None:
    """Let the first consumer start: the last one signals it. barriers: one for each consumer."""
    pl.when(warpgroup == consumers - 1)(lambda: plgpu.barrier_arrive(barriers.at[0]))


def signal_next(barriers: Any, warpgroup: Any, consumers: int) -> None:
    """Let the consumer behind this one start its products."""
    plgpu.barrier_arrive(barriers.at[lax.rem(warpgroup + 1, consumers)])


def start_copy(
    sources: Iterable[tuple[Any, tuple[Any, ...], Any]], full: Any, empty: Any, count: Any, stages: int
) -> None:
    """Start the copies to the next slot of a ring, when it is empty.

    sources: an array, what to copy of it, and the ring of `stages` slots that it goes to. full, empty: a
    barrier for each slot. count: the slots filled so far.
    """
    slot = lax.rem(count, stages)
    pl.when(count >= stages)(partial(plgpu.barrier_wait, empty.at[slot]))
    for array, at, ring in sources:
        start_load(array, at, ring, slot, full.at[slot])


def start_key_value_copies(
    blocks: Blocks | BackwardBlocks,
    arrays: Mapping[str, Any],
    shared: Any,
    at: tuple[Any, ...],
    count: Any,
    beside_key: Iterable[tuple[Any, tuple[Any, ...], Any]] = (),
) -> None:
    """Start the copies of a block of K and of V, each to the next slot of its ring, when that is empty.

    shared: a record with key and value, rings, and key_full, key_empty, value_full and value_empty. at: where
    the block is in the arrays. count: the blocks copied so far. beside_key: other copies, to
    rings that share the barriers of K.
    """
    of_key = [(arrays["key"], at, shared.key), *beside_key]
    start_copy(of_key, shared.key_full, shared.key_empty, count, blocks.stages)
    of_value = [(arrays["value"], at, shared.value)]
    start_copy(of_value, shared.value_full, shared.value_empty, count, blocks.value_slots)
