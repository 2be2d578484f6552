"""Launches as Triton's compiler sees them, and the shared memory that blocks need.

They are compiled as jax-triton does: array pointers are multiples of 16 bytes, a scalar of 1 is a constant.
"""

import os
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from attest.kernels.triton.target import Launch, shared_memory, target_device

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
THREADS_OF_A_WARP, THREADS_OF_A_WAVE = 32, 64  # of NVIDIA's GPUs, and of AMD's

# JAX may lower in several threads, and Triton keeps its settings in the environment.
_LOCK = Lock()


@dataclass(frozen=True)
class Source:
    """A kernel to compile, found again in any process by its module and name.

    types: of its parameters, in order, "constexpr" among them; constants: those, by name; options: warps and
    stages.
    """

    module: str
    name: str
    types: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]

    @staticmethod
    def of(launch: Launch) -> "Source":
        """Return the source of a launch."""
        given = [*launch.arguments, *launch.outputs]
        names = launch.kernel.arg_names
        constants = dict(launch.constants)
        constants |= {names[i]: 1 for i, x in enumerate(given) if isinstance(x, int) and x == 1}
        types = [_type(x) for x in given] + ["constexpr"] * (len(names) - len(given))
        return Source(
            module=launch.kernel.__module__,
            name=launch.kernel.__name__,
            types=tuple(
                "constexpr" if name in constants else kind for name, kind in zip(names, types, strict=True)
            ),
            constants=tuple(constants.items()),
            options=(("num_warps", launch.num_warps), ("num_stages", launch.num_stages)),
        )


def compile_for(target: GPUTarget, source: Source) -> Any:
    """Compile a kernel for a device that need not be here, by `triton.compile`; raises what that raises.

    It takes what an earlier process has left in Triton's cache.
    """
    with _LOCK:
        if not _is_usable(_triton.knobs.cache.dir):
            _triton.knobs.cache.dir = _own_cache().name
    return _compile(target, source)


@lru_cache(maxsize=1024)
def compiled_on(device: str, source: Source) -> Any:
    """Compile a kernel for a device, such as "sm_90" or "gfx942", once in a process."""
    if device.startswith("gfx"):
        target = GPUTarget("hip", device, THREADS_OF_A_WAVE)
    else:
        target = GPUTarget("cuda", int(device.removeprefix("sm_")), THREADS_OF_A_WARP)
    return compile_for(target, source)


def compile_afresh(target: GPUTarget, source: Source) -> Any:
    """Compile as `compile_for`, whatever is in Triton's cache, so that the compilers' messages are heard.

    For a process with one thread: a folder of its own is set in the environment.
    """
    with TemporaryDirectory() as folder, _triton.knobs.cache.scope():
        _triton.knobs.cache.dir = folder
        return _compile(target, source)


def _compile(target: GPUTarget, source: Source) -> Any:
    kernel = getattr(import_module(source.module), source.name)
    ast = _triton.compiler.ASTSource(
        kernel,
        dict(zip(kernel.arg_names, source.types, strict=True)),
        dict(source.constants),
        {(place,): _POINTER for place, kind in enumerate(source.types) if kind.startswith("*")},
    )
    # jax-triton turns on fused multiplication and addition; Triton's own default is about to change.
    options = dict(source.options) | {"enable_fp_fusion": True}
    return _triton.compile(ast, target=target, options=options)


def _is_usable(folder: str) -> bool:
    """Return whether Triton can write its cache to a folder; jax-triton, once imported, sets one to ""."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


@cache
def _own_cache() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="attest-triton-")


def check_room(launch: Launch) -> None:
    """Refuse a flash attention launch whose tiles do not fit into the shared memory of the GPU in use.

    Only compiling tells, so that is done where the tiles might not fit. Without this XLA would refuse the
    launch later, and name neither the kernel nor its blocks.

    Raises: ValueError naming kernel, shapes and configuration.
    """
    limit = shared_memory()
    if limit is None or _most_shared_bytes(launch) <= limit:
        return
    needed = _shared_bytes(target_device(), Source.of(launch))
    if needed > limit:
        raise ValueError(
            f"attest.kernels.triton: {launch.name} needs {needed} bytes of shared memory, and a block has "
            f"at most {limit} on this GPU. Ask for smaller blocks or fewer stages in fwd_params or "
            "bwd_params; None lets the kernel choose."
        )


def _most_shared_bytes(launch: Launch) -> int:
    """Return more than any kernel of ours takes: tiles of rows of one side a stage, and tiles of pairs.

    A tile that is stored wider than the inputs are takes the difference more.
    """
    blocks, stages = launch.blocks, launch.num_stages
    q, k, width = blocks["BLOCK_Q"], blocks["BLOCK_K"], blocks["BLOCK_D"] + blocks["BLOCK_DV"]
    query: Any = launch.arguments[0]
    rows = (stages * max(q, k) + min(q, k)) * width * query.dtype.itemsize
    wider = launch.outputs[0].dtype.itemsize - query.dtype.itemsize
    return rows + (stages + 1) * 8 * q * k + max(q, k) * width * max(wider, 0)


def _shared_bytes(device: str, source: Source) -> int:
    return compiled_on(device, source).metadata.shared


def _type(given: Any) -> str:
    if isinstance(given, int):
        return "i32" if -(2**31) <= given < 2**31 else "i64"
    return f"*{_TYPES[given.dtype.name]}"
