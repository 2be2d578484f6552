"""Launches on NVIDIA's GPUs: XLA gets the PTX of a kernel, and launches it as one of its own.

JAX has no function for this custom call of XLA. jax-triton has a custom call of its own, which finds the
kernel anew whenever it runs: each launch of a short call then takes several microseconds more.

A kernel is compiled once for all lengths. Its ints are put into the PTX, without Triton.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from attest.kernels.triton.compiled import THREADS_OF_A_WARP, Source, compiled_on
from attest.kernels.triton.target import Launch

_CUSTOM_CALL = "__gpu$xla.gpu.ptx"
# XLA takes the settings of this custom call as text, as calls of this version have them.
_API_VERSION = 2

_SIGNATURE = re.compile(r"(\.entry\s+(\w+)\s*\()(.*?)(\))", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s[^,]*?(\w+_param_(\d+))\b")
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"})


@dataclass(frozen=True)
class PtxCall:
    """A launch without its arrays: hashable, so that JAX recognises one that it has compiled.

    source: the kernel. device: such as "sm_90". ints: the values of its parameters that are neither constants
    nor arrays, by their place among those that are not constants. outputs: what it fills, its last
    parameters.
    """

    source: Source
    device: str
    ints: tuple[tuple[int, int], ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]


def ptx_call(launch: Launch, device: str) -> PtxCall:
    """Return a launch on a device, without its arrays."""
    source = Source.of(launch)
    given = [x for x, kind in zip(launch.arguments, source.types, strict=False) if kind != "constexpr"]
    ints = tuple((place, x) for place, x in enumerate(given) if isinstance(x, int))
    return PtxCall(source, device, ints, launch.outputs, launch.grid)


def launch_ptx(call: PtxCall, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Launch a kernel on arrays and return its outputs."""
    return tuple(_launch.bind(*arrays, call=call))


def with_ints(ptx: str, ints: dict[int, int], count: int) -> str:
    """Return the PTX of a kernel that takes arrays alone.

    It reads its ints from constant memory, where parameters are too. As numbers in the code, the assembler
    would compile the loops over all blocks differently.

    ints: values of parameters, by their place. count: the parameters of the kernel; those that Triton adds
    behind them, for memory of its own, are left out.

    Raises: ValueError if the kernel reads a parameter that is left out, or an int in another way than the
    compiler is known to.
    """
    signature = _SIGNATURE.search(ptx)
    if signature is None:
        raise ValueError("attest.kernels.triton: expected PTX with an entry, and found none.")
    parameters = [(found[0], found[1], int(found[2])) for found in _PARAMETER.finditer(signature[3])]
    head, body = ptx[: signature.start()], ptx[signature.end() :]
    constants = ""
    for text, name, place in parameters:
        if place in ints:
            constant = f"{signature[2]}_int_{place}"
            bits = 64 if "64" in text.split(name)[0] else 32
            constants += f".visible .const .align 8 .s{bits} {constant} = {ints[place]};\n"
            body = re.sub(rf"ld\.param(\.\w+\s+%\w+), \[{name}\];", rf"ld.const\1, [{constant}];", body)
        if (place in ints or place >= count) and re.search(rf"\b{name}\b", body):
            raise ValueError(
                f"attest.kernels.triton: {name} of the compiled kernel is read in an unknown way. "
                "Use a version of Triton that these kernels were tested with, or platform='xla'."
            )
    kept = ",\n".join(text for text, _, place in parameters if place < count and place not in ints)
    directives = head.rfind("\n") + 1  # those before the entry on its line, such as .visible
    head, own = head[:directives], head[directives:]
    return f"{head}{constants}{own}{signature[1]}\n{kept}\n{signature[4]}{body}"


def _settings(call: PtxCall) -> str:
    """Return the settings of the custom call's launch, as the text of an MLIR dictionary."""
    compiled = compiled_on(call.device, call.source)
    count = sum(kind != "constexpr" for kind in call.source.types)
    ptx = with_ints(compiled.asm["ptx"], dict(call.ints), count)
    grid, metadata = (*call.grid, 1, 1), compiled.metadata
    numbers = {
        "grid_x": grid[0],
        "grid_y": grid[1],
        "grid_z": grid[2],
        "block_x": metadata.num_warps * THREADS_OF_A_WARP,
        "block_y": 1,
        "block_z": 1,
        "shared_mem_bytes": metadata.shared,
    }
    texts = {"name": metadata.name, "kernel_type": "ptx", "kernel_data": ptx}
    entries = [f'{name} = "{text.translate(_ESCAPES)}"' for name, text in texts.items()]
    entries += [f"{name} = {number} : i32" for name, number in numbers.items()]
    return f"{{{', '.join(entries)}}}"


def _abstract(*_: Any, call: PtxCall) -> list[ShapedArray]:
    return [ShapedArray(x.shape, x.dtype) for x in call.outputs]


def _lower(context: Any, *operands: Any, call: PtxCall) -> Any:
    rule: Any = jax.ffi.ffi_lowering(_CUSTOM_CALL, backend_config=_settings(call), api_version=_API_VERSION)
    return rule(context, *operands)


_launch = Primitive("triton_ptx_call")
_launch.multiple_results = True
_launch.def_abstract_eval(_abstract)
_launch.def_impl(lambda *arrays, call: _alone(call)(*arrays))
mlir.register_lowering(_launch, _lower, platform="cuda")


@lru_cache(maxsize=1024)
def _alone(call: PtxCall) -> Any:
    """Return the launch as a program of its own, for arrays that are not traced."""
    return jax.jit(lambda *arrays: _launch.bind(*arrays, call=call))
