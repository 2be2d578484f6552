"""The head dims of the tiles of the Hopper kernels, and which arrays are padded to them."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attest.kernels.pallas.mosaic_gpu import flash_attention, flash_attention_with_lse
from attest.kernels.pallas.mosaic_gpu.blocks import choose, choose_backward, head_dims, pad_dims
from attest.kernels.pallas.mosaic_gpu.launch.operands import tensor
from attest.kernels.pallas.mosaic_gpu.launch.transfers import (
    from_operand,
    operand_shape,
    widths_of_pieces,
)
from tests.kernels.kernel_cases import normal
from tests.kernels.mosaic_gpu.test_kernels import assert_right, both_passes, needs_hopper

KERNELS = ("backward_query", "backward_key", "backward_bias")

PADDED = [
    ((1, 1), (32, 32)),
    ((32, 33), (64, 64)),
    ((64, 64), (64, 64)),
    ((72, 72), (80, 80)),
    ((88, 8), (96, 96)),
    ((64, 100), (128, 128)),
    ((192, 128), (192, 128)),
    ((136, 72), (160, 160)),
    ((168, 72), (192, 128)),
    ((192, 136), (192, 192)),
    ((64, 160), (160, 160)),
    ((64, 168), (192, 192)),
    ((200, 64), (256, 256)),
]


@pytest.mark.parametrize(("dims", "padded"), PADDED)
def test_they_are_padded_to_the_next_of_the_table(dims: tuple[int, int], padded: tuple[int, int]) -> None:
    assert pad_dims(*dims) == padded


def test_the_table_has_rows_for_each() -> None:
    assert set(head_dims()) == {padded for _, padded in PADDED}
    for dims in head_dims():
        for work in ((), ("few",)):
            assert choose(*dims, work).k >= 64
        for kernel in KERNELS:
            assert choose_backward(kernel, *dims, ()).step >= 64


def test_a_smaller_value_has_blocks_of_its_own() -> None:
    """Beside a value of 128, shared memory has room for a slot more than beside one of 192."""
    assert choose(192, 128, ()).stages == choose(192, 192, ()).stages + 1
    assert choose(192, 64, ()) == choose(192, 128, ())


@pytest.mark.parametrize(("queries", "rows"), [(None, 192), (8192, 192), (192, 192), (197, 128), (257, 192)])
def test_tiles_are_lower_where_the_last_ones_would_be_nearly_empty(queries: int | None, rows: int) -> None:
    """197 queries fill two tiles of 128 rows better than two of 192; 257 take three of 128."""
    assert choose(64, 64, (), queries).own == rows
    assert choose(64, 64, ["cap"], queries).own == 192
    assert choose(128, 128, (), queries) == choose(128, 128, ())


@pytest.mark.parametrize(
    ("queries", "heads", "rows"),
    [(512, 8, 64), (512, 24, 128), (512, 33, 128), (512, 132, 192), (65, 16, 64)],
)
def test_tiles_are_lower_where_they_are_fewer_than_multiprocessors(
    queries: int, heads: int, rows: int
) -> None:
    """24 tiles of 192 rows leave 108 of 132 idle; 64 of 64 rows end sooner."""
    assert choose(64, 64, (), queries, heads=heads).own == rows
    assert choose(128, 128, (), queries, heads=heads).own == min(rows, 128)


@pytest.mark.parametrize(("work", "rows"), [((), 128), (("bounds",), 192)])
def test_tiles_are_lower_where_they_take_fewer_rounds(work: tuple[str, ...], rows: int) -> None:
    """132 programs take 192 tiles of 192 rows in two rounds, and so 256 of 128, unless some end sooner."""
    assert choose(64, 64, work, 512, heads=64).own == rows


@pytest.mark.parametrize(
    ("work", "queries", "heads", "rows"),
    [
        (("full", "many_keys"), 512, 64, 256),  # one round of 128 tiles, for two of 192 rows or of 128
        (("full", "many_keys"), 2048, 256, 192),
        (("full",), 512, 64, 128),
        (("many_keys",), 512, 64, 128),
    ],
)
def test_four_consumers_share_many_keys_where_they_save_a_round(
    work: tuple[str, ...], queries: int, heads: int, rows: int
) -> None:
    assert choose(64, 64, work, queries, heads=heads).own == rows


@pytest.mark.parametrize(("queries", "rows"), [(729, 192), (256, 128)])
def test_tiles_of_dquery_are_lower_where_two_of_them_hold_all_queries(queries: int, rows: int) -> None:
    assert choose_backward("backward_query", 80, 80, ["full"], queries=queries).own == rows
    assert choose_backward("backward_query", 80, 80, (), queries=queries).own == 192


@pytest.mark.parametrize(
    ("work", "step"), [(["full"], 128), (["full", "scale"], 64), (["full", "dropout"], 64), ([], 64)]
)
def test_steps_are_longer_where_nothing_else_takes_registers(work: list[str], step: int) -> None:
    assert choose_backward("backward_key", 80, 80, work, queries=729).step == step


@pytest.mark.parametrize(("value_dim", "width"), [(128, 128), (136, 192)])
def test_value_and_out_are_no_wider_than_their_head_dim(value_dim: int, width: int) -> None:
    query, value = (jnp.zeros((1, 72, 2, dim), "bfloat16") for dim in (192, value_dim))
    program = export.export(jax.jit(flash_attention), platforms=["cuda"])(query, query, value).mlir_module()
    (call,) = re.findall(r"custom_call @.*flash_forward.*", program)
    wide, narrow = "tensor<1x72x2x192xbf16>", f"tensor<1x72x2x{width}xbf16>"
    assert f": ({wide}, {wide}, {narrow}) -> ({narrow}, " in call


@pytest.mark.parametrize(
    ("dtype", "channels", "width", "stored"),
    [
        ("bfloat16", 40, 64, (40,)),
        ("float16", 8, 64, (8,)),
        ("bfloat16", 36, 64, (64,)),  # a row of 72 bytes begins where the TMA unit reads no row
        ("bfloat16", 72, 80, (5, 16)),
        ("bfloat16", 136, 192, (3, 64)),
    ],
)
def test_an_array_is_padded_unless_a_row_of_its_tile_is_one_part(
    dtype: str, channels: int, width: int, stored: tuple[int, ...]
) -> None:
    assert operand_shape(dtype, (2, 197, 3, channels), width) == (2, 197, 3, *stored)
    x = jnp.arange(2 * 197 * 3 * channels, dtype=dtype).reshape(2, 197, 3, channels)
    operand = from_operand(tensor(x, width))
    assert jnp.array_equal(operand[..., :channels], x)
    assert not operand[..., channels:].any()


@pytest.mark.parametrize(
    ("dtype", "channels", "width", "widths"),
    [
        ("bfloat16", 72, 80, (64, 16)),
        ("float16", 88, 96, (64, 32)),
        ("bfloat16", 104, 128, (64, 64)),
        ("bfloat16", 136, 160, (64, 64, 32)),
        ("bfloat16", 80, 80, (80,)),  # all channels are there
        ("bfloat16", 40, 64, (64,)),  # a row is one part wide
        ("bfloat16", 74, 80, (80,)),  # a row of 148 bytes begins where the TMA unit reads no row
    ],
)
def test_tiles_are_cut_into_pieces_where_arrays_then_need_no_padding(
    dtype: str, channels: int, width: int, widths: tuple[int, ...]
) -> None:
    assert widths_of_pieces(dtype, channels, width) == widths


@pytest.mark.parametrize(("queries", "rows"), [(729, 192), (256, 128)])
def test_tiles_of_head_dim_80_are_lower_where_two_of_them_hold_all_queries(queries: int, rows: int) -> None:
    assert choose(80, 80, ["full"], queries).own == rows


SMALL = pytest.mark.parametrize("dims", [(40, 40), (32, 16), (8, 64)], ids=str)


def small(dims: tuple[int, int]) -> tuple[jax.Array, ...]:
    """Query, key and value of 3 heads, of lengths that fill no tile."""
    head_dim, value_dim = dims
    query = normal(2, 197, 3, head_dim, dtype="bfloat16")
    key, value = (normal(2, 257, 3, dim, seed=dim, dtype="bfloat16") for dim in (head_dim, value_dim))
    return query, key, value


@SMALL
def test_small_head_dims_are_copied_by_no_kernel_of_xla(dims: tuple[int, int]) -> None:
    run = jax.jit(partial(both_passes, flash_attention_with_lse, {}))
    program = export.export(run, platforms=["cuda"])(small(dims), {}).mlir_module()
    of_tensor = r"tensor<2x\d+x3x[\dx]+bf16>"
    assert not re.findall(rf"stablehlo\.(?:pad|slice|concatenate|transpose)\b.*{of_tensor}.*", program)
    (call,) = re.findall(r"custom_call @.*flash_forward.*", program)
    query, key, value = (f"tensor<{'x'.join(map(str, x.shape))}xbf16>" for x in small(dims))
    assert f": ({query}, {key}, {value}) -> (tensor<2x197x3x{dims[1]}xbf16>" in call


IN_PIECES = pytest.mark.parametrize("head_dim", [72, 88, 112, 136, 248])


@IN_PIECES
def test_arrays_of_tiles_in_pieces_are_not_copied_forward(head_dim: int) -> None:
    arrays = small((head_dim, head_dim))
    program = export.export(jax.jit(flash_attention), platforms=["cuda"])(*arrays).mlir_module()
    (call,) = re.findall(r"custom_call @.*flash_forward.*", program)
    query, key, value = (f"tensor<{'x'.join(map(str, x.shape))}xbf16>" for x in arrays)
    assert f": ({query}, {key}, {value}) -> ({query}, " in call
    hides = export.export(jax.jit(partial(flash_attention, causal=True)), platforms=["cuda"])(*arrays)
    (call,) = re.findall(r"custom_call @.*flash_forward.*", hides.mlir_module())
    assert query not in call


def test_with_alibi_under_a_soft_cap_tiles_are_whole() -> None:
    """In pieces, the kernel would spill."""
    options = {"alibi_slopes": jnp.ones(3), "logits_soft_cap": 5.0}
    run = jax.jit(partial(flash_attention, **options))
    program = export.export(run, platforms=["cuda"])(*small((112, 112))).mlir_module()
    (call,) = re.findall(r"custom_call @.*flash_forward.*", program)
    assert "x112x" not in call


@needs_hopper
@IN_PIECES
def test_pieces_have_the_bits_of_padded_arrays(head_dim: int) -> None:
    arrays = small((head_dim, head_dim))
    more = pad_dims(head_dim, head_dim)[0] - head_dim
    run = jax.jit(partial(flash_attention_with_lse, softmax_scale=0.1))
    found = run(*arrays)
    padded = run(*(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more))) for x in arrays))
    np.testing.assert_array_equal(found[0], padded[0][..., :head_dim])
    np.testing.assert_array_equal(found[1], padded[1])


@needs_hopper
@pytest.mark.parametrize("head_dim", [72, 112])
def test_one_query_is_right_in_pieces(head_dim: int) -> None:
    query, key, value = small((head_dim, head_dim))
    assert_right((query[:, :1], key, value), {})


@needs_hopper
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "logits_soft_cap": 3.0},
        {"sliding_window": (90, 40), "bias": normal(1, 3, 197, 257)},
    ],
    ids=["plain", "causal, cap", "window, bias"],
)
@pytest.mark.parametrize("dims", [(40, 40), (32, 16), (8, 64), (72, 72), (136, 136)], ids=str)
def test_both_passes_are_right_at_head_dims_between_those_of_the_table(
    dims: tuple[int, int], options: dict[str, Any]
) -> None:
    assert_right(small(dims), options)


@needs_hopper
@pytest.mark.parametrize("dims", [(40, 40), (32, 16), (8, 64), (72, 72), (112, 112)], ids=str)
def test_what_is_past_the_end_of_a_row_is_neither_read_nor_written(dims: tuple[int, int]) -> None:
    """S4, S19: behind the channels of a head stand those of the next, here all NaN."""
    arrays = small(dims)
    poisoned = tuple(x.at[:, :, 1].set(jnp.nan) for x in arrays)
    run = jax.jit(partial(both_passes, flash_attention_with_lse, {}))
    clean, found = jax.tree.leaves(run(arrays, {})), jax.tree.leaves(run(poisoned, {}))
    for a, b in zip(clean, found, strict=True):
        axis = 2 if a.ndim == 4 else 1  # lse is [B, H, S]
        kept, lost = (jnp.take(x, jnp.array(heads), axis) for x, heads in ((b, [0, 2]), (b, [1])))
        np.testing.assert_array_equal(jnp.take(a, jnp.array([0, 2]), axis), kept)
        assert jnp.isnan(lost).all()
