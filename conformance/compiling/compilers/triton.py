"""Triton: the kernels that production would launch, compiled without a GPU.

The launches are those that `attest.kernels.triton` itself records, with the block sizes that it chooses for
the device, compiled as for a call: array pointers are multiples of 16 bytes, a scalar of 1 is a constant. A
call hands the PTX on to XLA, whose ptxas may allot registers a little differently from Triton's own.
"""

import re
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import jax
import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget

from attest.conformance.cases.case import Case
from attest.conformance.cases.shapes import shapes_of
from attest.conformance.compiling.compiler import Binary, Compiler, Job
from attest.conformance.compiling.compilers.capture_fd import capture_fd
from attest.conformance.compiling.devices import Device
from attest.kernels.triton.compiled import Source, compile_afresh
from attest.kernels.triton.target import Launch, recorded
from attest.reference.semantics import GRADIENTS

# Triton ships no types that a checker could follow.
_triton: Any = triton

_BYTES_OF_A_VGPR = 4

_PTXAS_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_PTXAS_REGISTERS = re.compile(r"Used (\d+) registers")
_PTXAS_LOSS = re.compile(r"Potential Performance Loss: (.*)")
_ERROR = re.compile(r"\b(?:error|fatal)\s*:\s*(.*)")


@dataclass(frozen=True)
class Compilation:
    """A kernel and the device to compile it for; target: that of the device."""

    kernel: Source
    target: tuple[tuple[str, Any], ...]


def launches(call: Callable[..., Any], case: Case, device: Device) -> list[Job]:
    """Return what `call`, a function like our kernels that return lse, launches forward and backward."""
    arrays, options = shapes_of(case)
    varied = {name: x for name, x in arrays.items() if name in GRADIENTS}
    fixed = {name: x for name, x in arrays.items() if name not in varied}

    def both(varied: dict[str, Any], fixed: dict[str, Any]) -> Any:
        outputs, pull = jax.vjp(lambda varied: call(**varied, **fixed, **options), varied)
        return pull(jax.tree.map(jnp.ones_like, outputs))

    with recorded(device.name) as found:
        jax.eval_shape(both, varied, fixed)
    jobs = [_job(launch, device) for launch in found]
    return list({repr(job.source): job for job in jobs}.values())


def compile_kernel(source: Compilation) -> Binary:
    """Compile a kernel for a device. Raises RuntimeError with the words of the compiler in one line."""
    target = GPUTarget(**dict(source.target))
    log = StringIO()
    with _settings(), capture_fd() as read_log, redirect_stdout(log):
        try:
            compiled = compile_afresh(target, source.kernel)
        except Exception as error:
            raise RuntimeError(_reason(error, read_log())) from error
    binary = _of_ptxas(log.getvalue()) if target.backend == "cuda" else _of_amdgcn(compiled.asm["amdgcn"])
    block = {
        "shared_bytes": compiled.metadata.shared,
        "tmem_columns": getattr(compiled.metadata, "tmem_size", None) or 0,
    }
    return Binary({**binary.taken, **block}, binary.notes)


def _jobs(case: Case, device: Device) -> list[Job]:
    from attest.kernels.triton import flash_attention_with_lse

    return launches(flash_attention_with_lse, case, device)


def _job(launch: Launch, device: Device) -> Job:
    source = Source.of(launch)
    target = tuple(device.target.items())
    return Job(source.name, launch.blocks | dict(source.options), Compilation(source, target))


@contextmanager
def _settings() -> Generator[None]:
    """Enable the log of ptxas and silence warnings within the block."""
    with _triton.knobs.nvidia.scope(), warnings.catch_warnings(action="ignore"):
        _triton.knobs.nvidia.dump_ptxas_log = True
        yield


def _reason(error: BaseException, log: str) -> str:
    """Return one line: the compiler's own message, or the innermost exception."""
    while error.__cause__ is not None:
        error = error.__cause__
    node, words = getattr(error, "node", None), getattr(error, "error_message", None)
    if node is not None:
        return f"line {node.lineno} of the function: {words or 'cannot be compiled'}".splitlines()[0]
    for line in [*log.splitlines(), *str(error).splitlines()]:
        message = _ERROR.search(line)
        if message and message[1]:
            return message[1].strip()
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _of_ptxas(log: str) -> Binary:
    """Return what a thread takes, of the entry function and its callees: most registers, total memory."""
    frames = [tuple(map(int, found)) for found in _PTXAS_STACK.findall(log)]
    registers = [int(found) for found in _PTXAS_REGISTERS.findall(log)]
    if not frames or not registers:
        raise RuntimeError(f"ptxas said nothing of registers or spills, only {log.strip()[:200]!r}")
    taken = {
        "registers": max(registers),
        "spill_bytes": sum(stores + loads for _, stores, loads in frames),
        "stack_bytes": sum(stack for stack, _, _ in frames),
    }
    return Binary(taken, tuple(dict.fromkeys(_PTXAS_LOSS.findall(log))))


def _of_amdgcn(assembly: str) -> Binary:
    """Return what a thread takes, by the metadata of the code object.

    Only spills that take scratch memory count: SGPRs are spilled to lanes of VGPRs.
    """

    def count(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"the assembly says nothing of {name}")
        return int(found[1])

    scalars, scratch = count("sgpr_spill_count"), count("private_segment_fixed_size")
    taken = {
        "registers": count("vgpr_count"),
        "spill_bytes": count("vgpr_spill_count") * _BYTES_OF_A_VGPR if scratch else 0,
        "stack_bytes": scratch,
    }
    return Binary(taken, (f"{scalars} SGPRs are spilled to lanes of VGPRs",) if scalars else ())


def _why_not() -> str | None:
    if _triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET is set, so kernels are interpreted and none can be compiled: unset it"
    return None


TRITON = Compiler(
    name="triton",
    devices=frozenset({"sm_80", "sm_90", "sm_100", "gfx942"}),
    why_not=_why_not,
    jobs=_jobs,
    compile=compile_kernel,
)
