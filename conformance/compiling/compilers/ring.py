"""Ring attention over all devices of a topology, compiled without any of them.

The compilers are those of the kernels on one device. A job is a pass of one strategy, with the exchanges and
the kernels of a device. A job of the strategy that a call takes by default fails if a collective permute of
the ring does not run while a kernel computes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from attest.conformance.cases.case import Case
from attest.conformance.compiling.compiler import Binary, Compiler, Job
from attest.conformance.compiling.compilers import mosaic_gpu, tpu
from attest.conformance.compiling.compilers.programs import Call, one_line_errors, program_of
from attest.conformance.compiling.devices import Device
from attest.conformance.compiling.overlap import overlap_of
from attest.conformance.compiling.roofline import PASSES
from attest.kernels.ring.arguments import STRATEGIES
from attest.kernels.ring.schedule import Order, likely_strategy

_AXIS = "sequence"
# What is split along the sequence, its second axis.
_SPLIT = ("query", "key", "value", "q_segment_ids", "kv_segment_ids")


@dataclass(frozen=True)
class RingSource:
    """A pass to compile, found again in any process.

    module and name are those of a function with the signature of `ring_attention_with_lse`; target is that of
    the devices.
    """

    module: str
    name: str
    strategy: str
    which: str
    case: Case
    target: tuple[tuple[str, Any], ...]


def compile_for_tpus(source: RingSource) -> Binary:
    """Compile one pass for the chips of a topology.

    Raises RuntimeError with the words of JAX, Mosaic or XLA in one line.
    """
    found, hlo = tpu.compile_program(partial(_lowered, source, "pallas_tpu", tpu.devices_of))
    return _judged(source, found, hlo)


def compile_for_gpus(source: RingSource) -> Binary:
    """Compile one pass for the GPUs of a host.

    Raises RuntimeError with the words of JAX, Mosaic, XLA or ptxas in one line.
    """
    found, hlo = mosaic_gpu.compile_program(partial(_lowered, source, "mosaic_gpu", mosaic_gpu.devices_of))
    return _judged(source, found, hlo)


def _lowered(source: RingSource, platform: str, devices_of: Callable[[Mapping[str, Any]], list[Any]]) -> Any:
    # Explicit, so that the types of what JAX keeps for the backward pass say how it is spread.
    mesh = Mesh(np.array(devices_of(dict(source.target))), (_AXIS,), axis_types=(AxisType.Explicit,))
    with one_line_errors():
        ring = getattr(import_module(source.module), source.name)
        run = partial(ring, mesh=mesh, axis_name=_AXIS, strategy=source.strategy, platform=platform)
        return program_of(Call(run, source.case, source.which), partial(_placed, mesh))


def _placed(mesh: Mesh, name: str, x: Any) -> jax.ShapeDtypeStruct:
    spread = PartitionSpec(None, _AXIS) if name in _SPLIT else PartitionSpec()
    spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else spread
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def _judged(source: RingSource, found: Binary, hlo: str) -> Binary:
    """Return a binary with its collectives; it is faulty by its exchanges, too, if a call takes it."""
    case, devices = source.case, dict(source.target)["devices"]
    overlap = overlap_of(hlo, devices)
    taken = {**found.taken, "exchanges": overlap.exchanges, "exposed": len(overlap.exposed)}
    collectives = ", ".join(f"{number} {opcode}" for opcode, number in overlap.collectives.items())
    order = Order(case.causal, case.window or (None, None), case.chunk_size, case.kv_len - case.q_len)
    by_default = likely_strategy(order, case.q_len // devices, case.kv_len // devices)
    faults = overlap.faults if source.strategy == by_default else ()
    return Binary(taken, (*found.notes, f"collectives: {collectives}"), (*found.faults, *faults))


def ring_jobs(module: str, name: str, case: Case, device: Device) -> list[Job]:
    """Return forward and forward + backward of every strategy; each is traced when it is compiled."""
    target = tuple(device.target.items())
    return [
        Job(f"{strategy}_{which}", {}, RingSource(module, name, strategy, which, case, target))
        for strategy in STRATEGIES
        for which in PASSES
    ]


_jobs = partial(ring_jobs, "attest.kernels.ring", "ring_attention_with_lse")

RING_TPU = Compiler(
    name="ring_tpu",
    devices=frozenset({"v5e_x4", "v6e_x4", "v5p_x4", "tpu7x_x8"}),
    why_not=tpu.TPU.why_not,
    jobs=_jobs,
    compile=compile_for_tpus,
    packages=tpu.TPU.packages,
)
RING_GPU = Compiler(
    name="ring_gpu",
    devices=frozenset({"h200_x4"}),
    why_not=mosaic_gpu.MOSAIC_GPU.why_not,
    jobs=_jobs,
    compile=compile_for_gpus,
    packages=mosaic_gpu.MOSAIC_GPU.packages,
)
