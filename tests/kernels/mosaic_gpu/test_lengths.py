"""Lengths of the Hopper kernels: the TMA unit copies what is there, and XLA pads nothing for it."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attest.kernels.pallas.mosaic_gpu import flash_attention, flash_attention_with_lse
from attest.kernels.pallas.mosaic_gpu.blocks import ROWS
from attest.kernels.pallas.mosaic_gpu.launch.operands import tensor
from attest.kernels.pallas.mosaic_gpu.launch.transfers import copies, from_operand, operand_shape
from tests.kernels.kernel_cases import normal
from tests.kernels.mosaic_gpu.test_kernels import DIMS, assert_right, both_passes, needs_hopper

BATCH, HEADS, K_HEADS = 3, 4, 2
# Of queries and of keys.
LENGTHS = [(1, 257), (7, 197), (77, 1500), (197, 7), (257, 77), (1500, 1)]
OPTIONS: dict[str, Any] = {
    "plain": lambda q, k: {},
    "causal, cap": lambda q, k: {"causal": True, "logits_soft_cap": 3.0},
    "window, bias": lambda q, k: {"sliding_window": (90, 40), "bias": normal(1, HEADS, q, k)},
    "mask, unshared bias": lambda q, k: {
        "attention_mask": np.random.default_rng(1).random((BATCH, 1, q, k)) < 0.8,
        "bias": normal(BATCH, 1, q, 1),
    },
}


def tensors(lengths: tuple[int, int], dims: tuple[int, int]) -> Any:
    (q, k), (head_dim, value_dim) = lengths, dims
    query = normal(BATCH, q, HEADS, head_dim, dtype="bfloat16")
    key = normal(BATCH, k, K_HEADS, head_dim, seed=1, dtype="bfloat16")
    return query, key, normal(BATCH, k, K_HEADS, value_dim, seed=2, dtype="bfloat16")


def copied(program: str) -> list[str]:
    """What a program pads, cuts or joins of arrays [batch, length, heads, ..]."""
    of_tensor = rf"tensor<{BATCH}x\d+x({HEADS}|{K_HEADS})x[\dx]+bf16>"
    return re.findall(rf"stablehlo\.(?:pad|slice|concatenate|transpose)\b.*{of_tensor}.*", program)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@DIMS
def test_tensors_of_every_length_are_given_to_the_kernel(
    dims: tuple[int, int], lengths: tuple[int, int]
) -> None:
    arrays = tensors(lengths, dims)
    program = export.export(jax.jit(flash_attention), platforms=["cuda"])(*arrays).mlir_module()
    (call,) = re.findall(r"custom_call @.*flash_forward.*", program)
    few = lengths[0] * HEADS // K_HEADS <= ROWS  # then rows of several heads are packed into one tile
    for x in arrays[few:]:
        assert "x".join(map(str, tensor(x, x.shape[3]).shape)) in call
    assert few or not copied(program)


@pytest.mark.parametrize("dims", [(80, 80), (128, 128), (192, 128)], ids=str)
def test_both_passes_copy_no_tensor(dims: tuple[int, int]) -> None:
    run = jax.jit(partial(both_passes, flash_attention_with_lse, {}))
    program = export.export(run, platforms=["cuda"])(tensors((197, 257), dims), {}).mlir_module()
    assert ("flash_backward_split" if max(dims) > 128 else "flash_backward_joint") in program
    assert not copied(program)


@pytest.mark.parametrize(
    ("length", "channels", "expected"),
    [(200, 128, 1), (197, 64, 1), (197, 80, 8), (197, 96, 8), (197, 128, 8), (197, 192, 8), (200, 80, 1)],
)
def test_a_tile_takes_one_copy_or_one_for_each_group_of_rows(
    length: int, channels: int, expected: int
) -> None:
    assert copies("bfloat16", length, channels, rows=64) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 197, 3, 64), (2, 197, 3, 64)),
        ((2, 200, 3, 128), (2, 200, 3, 128)),
        ((2, 197, 3, 80), (2, 197, 3, 5, 16)),
        ((2, 197, 3, 96), (2, 197, 3, 3, 32)),
        ((2, 197, 3, 256), (2, 197, 3, 4, 64)),
    ],
)
def test_an_operand_has_its_rows_parts_apart(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    x = jnp.arange(np.prod(shape), dtype=jnp.bfloat16).reshape(shape)
    operand = tensor(x, shape[3])
    assert operand.shape == operand_shape(x.dtype, shape, shape[3]) == expected
    assert jnp.array_equal(from_operand(operand), x)


@needs_hopper
@pytest.mark.parametrize("name", OPTIONS)
@DIMS
def test_both_passes_are_right_at_each_head_dim(dims: tuple[int, int], name: str) -> None:
    assert_right(tensors((197, 257), dims), OPTIONS[name](197, 257))


@needs_hopper
@pytest.mark.parametrize("name", ["plain", "window, bias"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_both_passes_are_right_at_each_length(
    lengths: tuple[int, int], dims: tuple[int, int], name: str
) -> None:
    assert_right(tensors(lengths, dims), OPTIONS[name](*lengths))


@needs_hopper
@pytest.mark.parametrize("name", ["plain", "causal, cap"])
@DIMS
def test_what_is_past_the_end_neither_is_read_nor_written(dims: tuple[int, int], name: str) -> None:
    """S4, S19: behind the rows of a batch row stand those of the next, here all NaN."""
    arrays = tensors((197, 257), dims)
    poisoned = tuple(x.at[1].set(jnp.nan) for x in arrays)
    run = jax.jit(partial(both_passes, flash_attention_with_lse, OPTIONS[name](197, 257)))
    clean, found = run(arrays, {}), run(poisoned, {})
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a[0::2].astype(jnp.float32), b[0::2].astype(jnp.float32))
        assert jnp.isnan(b[1]).all()
