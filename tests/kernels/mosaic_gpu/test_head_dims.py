"""The head dims that the Hopper kernels run, of query and key, and of value; others are padded to them."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import export

from attest.kernels.pallas.mosaic_gpu import flash_attention
from attest.kernels.pallas.mosaic_gpu.blocks import choose, choose_backward, head_dims, pad_dims

KERNELS = ("backward_query", "backward_key", "backward_bias")

PADDED = [
    ((1, 1), (64, 64)),
    ((64, 64), (64, 64)),
    ((72, 72), (80, 80)),
    ((88, 8), (96, 96)),
    ((64, 100), (128, 128)),
    ((192, 128), (192, 128)),
    ((136, 72), (192, 128)),
    ((192, 136), (192, 192)),
    ((64, 160), (192, 192)),
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


@pytest.mark.parametrize(("value_dim", "width"), [(128, 128), (136, 192)])
def test_value_and_out_are_no_wider_than_their_head_dim(value_dim: int, width: int) -> None:
    query, value = (jnp.zeros((1, 72, 2, dim), "bfloat16") for dim in (192, value_dim))
    program = export.export(jax.jit(flash_attention), platforms=["cuda"])(query, query, value).mlir_module()
    (call,) = re.findall(r"custom_call @.*flash_forward.*", program)
    wide, narrow = "tensor<1x72x2x192xbf16>", f"tensor<1x72x2x{width}xbf16>"
    assert f": ({wide}, {wide}, {narrow}) -> ({narrow}, " in call
