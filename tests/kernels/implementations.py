"""The kernels that the shared tests hold to the clauses; Triton's run in a process with its interpreter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import pytest

from attest.kernels import triton, xla
from tests.kernels.interpreted import needs_interpreter


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel as the tests call it.

    call: with the options of all kernels, to (out, lse), or to (out,) where there is no lse.
    sizes: what its fwd_params and bwd_params take for q and k; None where it has none.
    blocks: options that cut the lengths of `kernel_cases.qkv` into three blocks or more, evenly into none;
        nothing where they are computed in one piece.
    """

    call: Callable[..., tuple[jax.Array, ...]]
    sizes: Callable[[int, int], Any] | None
    blocks: dict[str, Any]

    def under(self, options: Any) -> Callable[[Any, Any, Any], Any]:
        """(arrays, floats, cotangents) to what the call returns and the cotangents of (arrays, floats)."""

        def call(arrays: Any, floats: Any) -> Any:
            return self.call(*arrays, **self.blocks | options, **floats)

        @jax.jit
        def run(arrays: Any, floats: Any, cotangents: Any) -> Any:
            primal, vjp = jax.vjp(call, arrays, floats)
            return primal, vjp(cotangents[: len(primal)])

        return run


def _materialised(*arrays: Any, **options: Any) -> tuple[jax.Array]:
    return xla.attention(*arrays, **options, deterministic=False)[:1]


XLA = Kernel(
    xla.flash_attention_with_lse,
    xla.ChunkSizes,
    {"fwd_params": xla.ChunkSizes(16, 12), "bwd_params": xla.ChunkSizes(12, 17)},
)
WHOLE = Kernel(xla.flash_attention_with_lse, xla.ChunkSizes, {})
MATERIALISED = Kernel(_materialised, None, {})
TRITON = Kernel(
    triton.flash_attention_with_lse,
    triton.BlockSizes,
    {"fwd_params": triton.BlockSizes(16, 16), "bwd_params": triton.BlockSizes(16, 16)},
)

_FLASH = [
    pytest.param(XLA, id="xla"),
    pytest.param(WHOLE, id="xla in one piece"),
    pytest.param(TRITON, id="triton", marks=needs_interpreter),
]
_MATERIALISED = pytest.param(MATERIALISED, id="materialised")
XLA_FLASH = _FLASH[:2]
# `attest gate` compares the materialised attention with the oracle, under every feature and with poison.
flash_kernels = pytest.mark.parametrize("kernel", _FLASH)
all_kernels = pytest.mark.parametrize("kernel", [*_FLASH, _MATERIALISED])
