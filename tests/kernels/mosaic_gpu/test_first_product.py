"""The first product of a tile's logits: it overwrites registers where the blocks say so, and only zeros."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir.dialects import llvm

from attest.conformance.compiling.compilers.mosaic_gpu import kernels_of, operations
from attest.kernels.pallas.mosaic_gpu import Blocks, flash_attention
from attest.kernels.pallas.mosaic_gpu.tile.first_product import overwrite_zeros
from tests.kernels.mosaic_gpu.test_kernels import needs_hopper

plgpu: Any = mosaic_gpu
BLOCKS = Blocks(k=64, stages=2, consumers=2, registers=(240, 24), partial_sums=True)
ADDING = replace(BLOCKS, adds_to_zeros=True)
TILE, SWIZZLE = (64, 64), 128


def products(run: Any, *arrays: Any) -> list[bool]:
    """Return, for each instruction of the matrix unit in the kernel, whether it adds to its accumulator."""
    (kernel,) = kernels_of(jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)))
    return [_adds(op) for op in operations(kernel, "llvm.inline_asm") if "wgmma.mma" in _text(op)]


def _text(op: Any) -> str:
    return op.attributes["asm_string"].value


def _adds(op: Any) -> bool:
    """Return whether an instruction adds to its accumulator: its text counts results, then operands."""
    (number,) = re.findall(r"setp\.ne\.b32 p, \$(\d+), 0", _text(op))
    registers: Any = llvm.StructType(op.results[0].type).body
    return bool(op.operands[int(number) - len(registers)].owner.attributes["value"].value)


def attention(blocks: Blocks, **options: Any) -> Any:
    return lambda q, k, v: flash_attention(q, k, v, fwd_params=blocks, **options)


def tensors(head_dim: int = 64, length: int = 200) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (2, length, 4, head_dim), jnp.bfloat16) for key in keys]


@pytest.mark.parametrize(
    ("head_dim", "of_logits", "of_sums"),
    # An instruction takes 16 channels, or 16 of a block's 64 keys. Values of head dim 72 have two pieces.
    [(64, 4, 4), (72, 5, 8), (128, 8, 4), (256, 16, 4)],
)
def test_the_first_instruction_of_logits_overwrites_registers(
    head_dim: int, of_logits: int, of_sums: int
) -> None:
    found = products(attention(BLOCKS), *tensors(head_dim))
    overwrites = [i for i, adds in enumerate(found) if not adds]
    # The first block, full ones, and the last, some of whose keys do not exist.
    step = of_logits + of_sums
    assert overwrites == [0, of_logits, of_logits + step]
    assert len(found) == of_logits + 2 * step + of_sums


def test_blocks_may_ask_for_zeros() -> None:
    assert all(products(attention(ADDING), *tensors()))


def two_products(start: float | None) -> list[bool]:
    """Return `products` of a kernel with two of 64 channels, both of which are to overwrite an accumulator.

    start: what the accumulator is set to before, None for what it is allocated as.
    """

    def run(out: Any, left: Any, right: Any, acc: Any) -> None:
        if start is not None:
            acc[...] = plgpu.layout_cast(jnp.full(TILE, start, jnp.float32), plgpu.Layout.WGMMA)
        for _ in range(2):
            plgpu.wgmma(acc, left, right)
            overwrite_zeros()
        out[...] = acc[...]

    def kernel(out: Any, left: Any, right: Any) -> None:
        pl.run_scoped(lambda acc: run(out, left, right, acc), plgpu.ACC(TILE, jnp.float32))

    tiled = (plgpu.TilingTransform((8, TILE[1])), plgpu.SwizzleTransform(SWIZZLE))
    room = plgpu.SMEM(TILE, jnp.bfloat16, transforms=tiled)
    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(TILE, jnp.float32),
        scratch_types=[room, room],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return products(call)


def test_only_an_accumulator_as_allocated_is_overwritten() -> None:
    adds = [True] * 4
    assert two_products(None) == [False, *adds[1:], *adds]
    assert two_products(1.0) == adds + adds


@needs_hopper
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"logits_soft_cap": 20.0}], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 72, 128, 256])
def test_bits_are_those_of_products_added_to_zeros(head_dim: int, options: dict[str, Any]) -> None:
    arrays = tensors(head_dim, length=700)
    outs = [jax.jit(attention(blocks, **options))(*arrays) for blocks in (BLOCKS, ADDING)]
    first, second = (np.asarray(out).view(np.int16) for out in outs)
    np.testing.assert_array_equal(first, second)
