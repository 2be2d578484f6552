"""Which Triton kernels production would launch for a case on a device, and what Triton makes of each.

The launches are those that `kernels.triton` itself records, with the block sizes that it chooses for the
device, compiled as jax-triton does: array pointers are multiples of 16 bytes, a scalar of 1 is a constant.
jax-triton hands its PTX on to XLA, whose ptxas may allot registers a little differently from Triton's own.
"""

import os
import re
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import jax
import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget

from conformance.case import Case
from conformance.compilers import Binary, Compiler, Device, Job
from conformance.shapes import shapes_of

# Triton ships no types that a checker could follow.
_triton: Any = triton

_TYPES = {
    "bool": "i1",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
}
_POINTER = [["tt.divisibility", 16]]
_BYTES_OF_A_VGPR = 4

_PTXAS_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_PTXAS_REGISTERS = re.compile(r"Used (\d+) registers")
_PTXAS_LOSS = re.compile(r"Potential Performance Loss: (.*)")
_ERROR = re.compile(r"\b(?:error|fatal)\s*:\s*(.*)")


@dataclass(frozen=True)
class Source:
    """A kernel to compile, found again in any process by its module and name.

    types: of its parameters, in order, "constexpr" among them; constants: those, by name.
    """

    module: str
    name: str
    types: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]
    gpu: tuple[tuple[str, Any], ...]


def launches(call: Callable[..., Any], case: Case, device: Device) -> list[Job]:
    """What `call`, with the signature of our kernels that return lse, launches forward and backward."""
    from kernels.triton.launch import recorded

    arrays, options = shapes_of(case)
    varied = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    fixed = {name: x for name, x in arrays.items() if name not in varied}

    def both(varied: dict[str, Any], fixed: dict[str, Any]) -> Any:
        outputs, pull = jax.vjp(lambda varied: call(**varied, **fixed, **options), varied)
        return pull(jax.tree.map(jnp.ones_like, outputs))

    with recorded(device.name) as found:
        jax.eval_shape(both, varied, fixed)
    jobs = [_job(launch, device) for launch in found]
    return list({repr(job.source): job for job in jobs}.values())


def compile_source(source: Source) -> Binary:
    """Compiles for real, whatever an earlier process has in its cache."""
    kernel = getattr(import_module(source.module), source.name)
    names = kernel.arg_names
    ast = _triton.compiler.ASTSource(
        kernel,
        dict(zip(names, source.types, strict=True)),
        dict(source.constants),
        {(place,): _POINTER for place, kind in enumerate(source.types) if kind.startswith("*")},
    )
    target = GPUTarget(**dict(source.gpu))
    log = StringIO()
    with _settings(), _heard() as heard, redirect_stdout(log):
        try:
            compiled = _triton.compile(ast, target=target, options=dict(source.options))
        except Exception as error:
            raise RuntimeError(_reason(error, heard())) from error
    taken = _of_ptxas(log.getvalue()) if target.backend == "cuda" else _of_amdgcn(compiled.asm["amdgcn"])
    return Binary(
        **taken,
        shared_bytes=compiled.metadata.shared,
        tmem_columns=getattr(compiled.metadata, "tmem_size", None) or 0,
    )


def _jobs(case: Case, device: Device) -> list[Job]:
    from kernels.triton import flash_attention_with_lse

    return launches(flash_attention_with_lse, case, device)


def _job(launch: Any, device: Device) -> Job:
    given = [*launch.arguments, *launch.outputs]
    names = launch.kernel.arg_names
    constants = dict(launch.constants)
    constants |= {names[i]: 1 for i, x in enumerate(given) if isinstance(x, int) and x == 1}
    types = [_type(x) for x in given] + ["constexpr"] * (len(names) - len(given))
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    blocks = {name: value for name, value in launch.constants.items() if name.startswith("BLOCK")}
    source = Source(
        module=launch.kernel.__module__,
        name=launch.kernel.__name__,
        types=tuple(
            "constexpr" if name in constants else kind for name, kind in zip(names, types, strict=True)
        ),
        constants=tuple(constants.items()),
        options=tuple(options.items()),
        gpu=tuple(device.gpu.items()),
    )
    return Job(source.name, blocks | options, source)


def _type(given: Any) -> str:
    if isinstance(given, int):
        return "i32" if -(2**31) <= given < 2**31 else "i64"
    return f"*{_TYPES[given.dtype.name]}"


@contextmanager
def _settings() -> Generator[None]:
    """A cache of this compilation's own, so that nothing is skipped, and the words of ptxas."""
    knobs = _triton.knobs
    with TemporaryDirectory() as folder, knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir = folder
        knobs.nvidia.dump_ptxas_log = True
        with warnings.catch_warnings(action="ignore"):
            yield


@contextmanager
def _heard() -> Generator[Callable[[], str]]:
    """What is written to stderr within the block, by LLVM too: it explains errors, and is noise otherwise."""
    sys.stderr.flush()
    before = os.dup(2)
    with TemporaryFile() as file:

        def read() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        os.dup2(file.fileno(), 2)
        try:
            yield read
        finally:
            os.dup2(before, 2)
            os.close(before)


def _reason(error: BaseException, heard: str) -> str:
    """One line: what the compiler itself says of the error, or the innermost exception."""
    while error.__cause__ is not None:
        error = error.__cause__
    node, words = getattr(error, "node", None), getattr(error, "error_message", None)
    if node is not None:
        return f"line {node.lineno} of the function: {words or 'cannot be compiled'}".splitlines()[0]
    for line in [*heard.splitlines(), *str(error).splitlines()]:
        said = _ERROR.search(line)
        if said and said[1]:
            return said[1].strip()
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _of_ptxas(log: str) -> dict[str, Any]:
    """The entry function and those it calls: the most registers, the sum of the memory."""
    frames = [tuple(map(int, found)) for found in _PTXAS_STACK.findall(log)]
    registers = [int(found) for found in _PTXAS_REGISTERS.findall(log)]
    if not frames or not registers:
        raise RuntimeError(f"ptxas said nothing of registers or spills, only {log.strip()[:200]!r}")
    return {
        "registers": max(registers),
        "spill_bytes": sum(stores + loads for _, stores, loads in frames),
        "stack_bytes": sum(stack for stack, _, _ in frames),
        "notes": tuple(dict.fromkeys(_PTXAS_LOSS.findall(log))),
    }


def _of_amdgcn(assembly: str) -> dict[str, Any]:
    """What the metadata of the code object says.

    Only spills that take scratch memory count: SGPRs are spilled to lanes of VGPRs.
    """

    def count(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"the assembly says nothing of {name}")
        return int(found[1])

    scalars, scratch = count("sgpr_spill_count"), count("private_segment_fixed_size")
    return {
        "registers": count("vgpr_count"),
        "spill_bytes": count("vgpr_spill_count") * _BYTES_OF_A_VGPR if scratch else 0,
        "stack_bytes": scratch,
        "notes": (f"{scalars} SGPRs are spilled to lanes of VGPRs",) if scalars else (),
    }


def _why_not() -> str | None:
    if _triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET is set, so kernels are interpreted and none can be compiled: unset it"
    return None


TRITON = Compiler(
    name="triton",
    devices=frozenset({"sm_80", "sm_90", "sm_100", "gfx942"}),
    why_not=_why_not,
    jobs=_jobs,
    compile=compile_source,
)
