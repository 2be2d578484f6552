"""Mosaic GPU, LLVM and ptxas: the Hopper kernels, compiled without a GPU.

JAX's plugin for CUDA compiles for a GPU that is described to it as for one that is there: no driver is
needed, and of NVIDIA's toolkit ptxas, nvlink and libdevice alone. A job is a whole pass, forward or backward,
with the kernels that it launches and what XLA does around them.
"""

import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jax.experimental import topologies
from jax.interpreters import mlir

from attest.conformance.cases.case import Case
from attest.conformance.compiling.compiler import Binary, Compiler, Job
from attest.conformance.compiling.compilers.capture_fd import STDOUT, capture_fd
from attest.conformance.compiling.compilers.programs import Source, lowered, passes
from attest.conformance.compiling.devices import Device

_PLUGIN = "jax_cuda13_plugin"

_CALL = "mosaic_gpu_v2"
_LAUNCH = "gpu.launch"
_SUFFIX = "_mosaic_gpu_kernel"  # what Mosaic adds to the name of a kernel

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_LOSS = re.compile(r"\((C\d+)\) Potential Performance Loss: (.*)")
# Products that are awaited one by one, instead of running while the warpgroup goes on.
_SERIALIZED = "serialized"


@dataclass(frozen=True)
class Frame:
    """The resources of a thread of one kernel, by the log of ptxas."""

    registers: int
    stack_bytes: int
    spill_bytes: int


def compile_source(source: Source) -> Binary:
    """Compile one pass. Raises RuntimeError with the words of JAX, Mosaic, XLA or ptxas in one line."""
    return compile_program(lambda: lowered(source, devices_of(dict(source.target))[0]))[0]


def compile_program(lower: Callable[[], Any]) -> tuple[Binary, str]:
    """Compile the `jax.stages.Lowered` of a function: what it takes on a GPU, and its module as text.

    Raises RuntimeError with the words of JAX, Mosaic, XLA or ptxas in one line.
    """
    with capture_fd(), capture_fd(STDOUT) as read_log, _verbose():
        program = lower()
        shared = shared_of(program)
        if not shared:
            raise RuntimeError("launches no kernel of Mosaic GPU: XLA compiled all of it")
        try:
            compiled = program.compile()
        except Exception as error:
            raise RuntimeError(_reason(str(error))) from error
        log = read_log()
    frames = frames_of(log)
    if frames.keys() != shared.keys():
        raise RuntimeError(f"ptxas spoke of {sorted(frames)}, but {sorted(shared)} were launched")
    memory = compiled.memory_analysis()
    temporary = memory.temp_size_in_bytes
    taken = {
        "registers": max(frame.registers for frame in frames.values()),
        "spill_bytes": sum(frame.spill_bytes for frame in frames.values()),
        "stack_bytes": sum(frame.stack_bytes for frame in frames.values()),
        "shared_bytes": max(shared.values()),
        "hbm_bytes": memory.argument_size_in_bytes + memory.output_size_in_bytes + temporary,
        "temporary_bytes": temporary,
    }
    losses = dict.fromkeys(f"ptxas {code}: {words}" for code, words in _LOSS.findall(log))
    notes = (
        f"{kernel}: {frame.registers} registers, spills {frame.spill_bytes} bytes, "
        f"{shared[kernel]} bytes of shared memory"
        for kernel, frame in frames.items()
    )
    binary = Binary(
        taken,
        notes=(*notes, *(loss for loss in losses if _SERIALIZED not in loss)),
        faults=tuple(loss for loss in losses if _SERIALIZED in loss),
    )
    return binary, compiled.as_text()


def shared_of(program: Any) -> Mapping[str, int]:
    """Return the bytes of dynamic shared memory of a block of each kernel of Mosaic, by its name."""
    found: dict[str, int] = {}
    for kernel in kernels_of(program):
        name = kernel.operation.attributes["sym_name"].value
        for launch in operations(kernel, _LAUNCH):
            size = launch.operands[-1].owner.attributes["value"].value
            found[name] = max(size, found.get(name, 0))
    return found


def kernels_of(program: Any) -> list[Any]:
    """Return the MLIR module of each kernel of Mosaic that a `jax.stages.Lowered` launches, in its order."""
    module = program.compiler_ir("stablehlo")
    # Its context has Mosaic's types, but not the names that Mosaic gives to operations of other dialects.
    module.context.allow_unregistered_dialects = True
    return [
        mlir.ir.Module.parse(call.attributes["mhlo.backend_config"]["module"].value_bytes, module.context)
        for call in operations(module, "stablehlo.custom_call")
        if call.attributes["call_target_name"].value == _CALL
    ]


def operations(module: Any, name: str) -> list[Any]:
    """Return the operations of a module that have a name, or that name after a dialect's."""
    found: list[Any] = []

    def visit(operation: Any) -> Any:
        if operation.name.endswith(name):
            found.append(operation)
        return mlir.ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def frames_of(log: str) -> Mapping[str, Frame]:
    """Return what each entry function takes, with the functions that it calls, by the name of its kernel.

    Of kernels with one name it is the most that any of them takes.
    """
    found: dict[str, Frame] = {}
    _, *sections = _ENTRY.split(log)
    for name, section in zip(sections[::2], sections[1::2], strict=True):
        frames = [tuple(map(int, numbers)) for numbers in _STACK.findall(section)]
        registers = [int(number) for number in _REGISTERS.findall(section)]
        if not frames or not registers:
            raise RuntimeError(f"ptxas said nothing of registers or spills of {name}")
        kernel = name.removesuffix(_SUFFIX)
        before = found.get(kernel, Frame(0, 0, 0))
        found[kernel] = Frame(
            registers=max(before.registers, *registers),
            stack_bytes=max(before.stack_bytes, sum(stack for stack, _, _ in frames)),
            spill_bytes=max(before.spill_bytes, sum(stores + loads for _, stores, loads in frames)),
        )
    return found


@contextmanager
def _verbose() -> Generator[None]:
    """Make Mosaic write the log of ptxas to stdout, and not into files."""
    log, into_files = "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_TO"
    before = {name: os.environ.pop(name) for name in (log, into_files) if name in os.environ}
    os.environ[log] = "1"
    try:
        yield
    finally:
        del os.environ[log]
        os.environ.update(before)


def devices_of(target: Mapping[str, Any]) -> list[Any]:
    """Return as many GPUs of one host, alike, as a target of devices.toml has."""
    return _topology(target["description"], target.get("devices", 1)).devices


@cache
def _topology(description: str, devices: int) -> Any:
    # The plugin would refuse to load without the libraries that only a GPU needs.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    text = Path(__file__).with_name(description).read_text()
    try:
        return topologies.get_topology_desc(
            description, "cuda", target_config=text, topology=f"1x1x{devices}"
        )
    except NotImplementedError as error:
        raise RuntimeError(
            "JAX refused its plugin for CUDA in this process: set JAX_PLATFORMS=cpu"
        ) from error


def _reason(message: str) -> str:
    return message.strip().splitlines()[0] if message.strip() else "the compiler says nothing"


def _jobs(case: Case, device: Device) -> list[Job]:
    return passes("attest.kernels.pallas.mosaic_gpu", "flash_attention_with_lse", case, device)


def _why_not() -> str | None:
    if find_spec(_PLUGIN) is None:
        return f"{_PLUGIN} is not installed: it is the dependency group hopper, for Linux"
    return None


MOSAIC_GPU = Compiler(
    name="mosaic_gpu",
    devices=frozenset({"h200"}),
    why_not=_why_not,
    jobs=_jobs,
    compile=compile_source,
    packages=("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc"),
)
