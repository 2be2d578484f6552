"""Subjects of our Triton kernels: every feature and the standard semantics, in the interpreter or on CUDA.

The source of both subjects is the same; a process runs one of them or the other, by TRITON_INTERPRET.
Nothing here imports Triton before a kernel is called, so that a machine without it can list the subjects.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from attest.conformance.subject import CUDA_MATRIX_UNIT, Subject, Tiling, default_numerics
from attest.conformance.subjects._declared import declared
from attest.kernels.choice.choose import device_of, missing_package
from attest.kernels.implementations import TRITON
from attest.reference.numerics import Numerics

# Largest relative errors of the functions. In the interpreter they are NumPy's exp2 and float32 arithmetic.
_INTERPRETED = {"exponential": 2.0**-22, "tanh": 2.0**-21}
# The oldest whose builder the interpreter can stand for.
_OLDEST_INTERPRETED = (3, 7)
# On an H200 exp2 was off by at most 2**-22.7, the kernels' own tanh by 2**-21.5: see reports/data/benchmarks.
CUDA = {"exponential": 2.0**-22, "tanh": 2.0**-21}
# The fewest keys in a step that the kernels' own table chooses for a dtype, at any head dim.
_FEWEST_KEYS = {"float32": 16, "bfloat16": 16, "float16": 16}
# What the table chooses for two bytes, a head dim of 128 and causal order on sm_90: lengths are drawn
# around it.
PRODUCTION_BLOCKS = (64, 64)


def _flash_attention(
    query: Any, key: Any, value: Any, *, blocks: tuple[int, int] | None = None, **options: Any
) -> Any:
    """Run `flash_attention_with_lse` with one choice of blocks for all kernels."""
    from attest.kernels.triton import BackwardSizes, BlockSizes, flash_attention_with_lse

    if blocks is not None:
        sizes = BlockSizes(*blocks)
        options |= {"fwd_params": sizes, "bwd_params": BackwardSizes(sizes, sizes, sizes)}
    return flash_attention_with_lse(query, key, value, **options)


def _interpreted_numerics(dtype: str, tiling: Tiling) -> Numerics:
    return _declared(dtype, tiling, _INTERPRETED)


def _cuda_numerics(dtype: str, tiling: Tiling) -> Numerics:
    if dtype == "float32":
        # IEEE products, without the matrix unit, are added one after the other, into the running sum itself.
        return replace(_declared(dtype, tiling, CUDA), key_block=1)
    return _declared(dtype, tiling, {**CUDA, **CUDA_MATRIX_UNIT})


def _declared(dtype: str, tiling: Tiling, arithmetic: Mapping[str, Any]) -> Numerics:
    """Return numerics with weights and dS in the inputs' dtype, all else in float32."""
    keys = tiling.key_block if tiling.options else _FEWEST_KEYS[dtype]
    return replace(default_numerics(dtype, tiling), key_block=keys, **arithmetic)


def _blocks(q: int, k: int) -> Tiling:
    return Tiling({"blocks": (q, k)}, query_block=q, key_block=k)


def _violations() -> Sequence[object]:
    """Return what the interpreter saw since the last call of this."""
    from attest.kernels.triton.memory import drain_violations

    return drain_violations()


def _why_not_interpreted() -> str | None:
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a process started with TRITON_INTERPRET=1"
    installed = version("triton")
    if tuple(map(int, installed.split(".")[:2])) < _OLDEST_INTERPRETED:
        oldest = ".".join(map(str, _OLDEST_INTERPRETED))
        return f"needs triton {oldest} or newer, and {installed} is installed"
    return None


def _why_not_compiled() -> str | None:
    missing = missing_package(TRITON.capabilities, device_of(), lambda name: find_spec(name) is not None)
    if missing is not None:
        return missing
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 has the kernels interpreted"
    return None


SUBJECTS = (
    Subject(
        name="triton.interpret",
        call=_flash_attention,
        **declared(TRITON),
        numerics=_interpreted_numerics,
        backend="cpu",
        interpreter="Triton",
        # Small blocks cross many edges; the large ones make 1024 keys affordable: time goes by operations.
        tilings=(_blocks(16, 16), _blocks(32, 16), _blocks(64, 128)),
        returns_lse=True,
        ready=_why_not_interpreted,
        violations=_violations,
    ),
    Subject(
        name="triton.cuda",
        call=_flash_attention,
        **declared(TRITON, longest=1 << 20, meshes=("explicit", "automatic")),
        numerics=_cuda_numerics,
        backend="gpu",
        tilings=(_blocks(32, 32), Tiling({}, *PRODUCTION_BLOCKS)),
        returns_lse=True,
        ready=_why_not_compiled,
    ),
)
