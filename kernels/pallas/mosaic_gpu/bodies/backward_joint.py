"""One launch of tiles of `backward_key`, and behind them tiles of `backward_query`, for few of both.

Where neither fills the GPU, those of one kernel run beside those of the other, and a launch is saved. A
program uses the shared memory of one of them. Bits are those of two launches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from attest.kernels.pallas.mosaic_gpu.blocks import BackwardBlocks
from attest.kernels.pallas.mosaic_gpu.bodies import backward_key, backward_query
from attest.kernels.pallas.mosaic_gpu.launch.overlay import Overlay
from attest.kernels.pallas.mosaic_gpu.launch.scratch import scratch
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import PROGRAM
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec


@dataclass(frozen=True)
class Shared:
    """The records of both kernels, of which a program uses one."""

    of_keys: backward_key.Shared
    of_queries: backward_query.Shared


@dataclass(frozen=True)
class KernelLaunch:
    """A launch of one kernel: its spec, its blocks, its number of programs, and the arrays that it reads."""

    spec: KernelSpec
    blocks: BackwardBlocks
    programs: int
    arrays: Mapping[str, Any]


def rooms(of_keys: KernelLaunch, of_queries: KernelLaunch) -> dict[str, Any]:
    """Return what to allocate for a `Shared`."""
    return {
        "of_keys": Overlay(backward_key.Shared, scratch(backward_key.Shared, of_keys.spec, of_keys.blocks)),
        "of_queries": Overlay(
            backward_query.Shared, scratch(backward_query.Shared, of_queries.spec, of_queries.blocks)
        ),
    }


def operands(of_keys: KernelLaunch, of_queries: KernelLaunch) -> dict[str, Any]:
    """Return what the launch reads, by name."""
    launches = {"of_keys": of_keys, "of_queries": of_queries}
    return {f"{name}.{key}": x for name, it in launches.items() for key, x in it.arrays.items()}


def backward_joint(
    of_keys: KernelLaunch,
    of_queries: KernelLaunch,
    arrays: Mapping[str, Any],
    outputs: Mapping[str, Any],
    shared: Shared,
) -> None:
    """Run the body of the kernel. arrays: of `operands`. outputs: d_query, d_key and d_value."""
    program = lax.axis_index(PROGRAM)

    def read_by(name: str, it: KernelLaunch) -> dict[str, Any]:
        return {key: arrays[f"{name}.{key}"] for key in it.arrays}

    @pl.when(program < of_keys.programs)
    def _() -> None:
        results = {name: outputs[name] for name in ("d_key", "d_value")}
        read = read_by("of_keys", of_keys)
        backward_key.backward_key(of_keys.spec, of_keys.blocks, read, results, shared.of_keys, program)

    @pl.when(program >= of_keys.programs)
    def _() -> None:
        results = {"d_query": outputs["d_query"]}
        read = read_by("of_queries", of_queries)
        tile = program - of_keys.programs
        backward_query.backward_query(
            of_queries.spec, of_queries.blocks, read, results, shared.of_queries, tile
        )
