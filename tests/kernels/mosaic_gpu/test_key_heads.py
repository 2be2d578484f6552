"""Copies of few key heads in the Hopper kernels: when there are any, and that gradients stay right."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.kernels.call.call import Call, check_call
from attest.kernels.operations.abstract_call import abstract_call
from attest.kernels.pallas.mosaic_gpu import BackwardBlocks, BackwardSizes, key_heads
from attest.kernels.pallas.mosaic_gpu.key_heads import choose_copies, sum_copies, with_copies
from tests.kernels.mosaic_gpu.test_fused import FUSED
from tests.kernels.mosaic_gpu.test_fused import tensors as tensors_of
from tests.kernels.mosaic_gpu.test_kernels import FEATURES, assert_right, lowered, needs_hopper, tensors

BLOCKS = BackwardBlocks(step=64, stages=2, consumers=2, registers=(240, 24))


def abstract(
    batch: int, queries: int, keys: int, heads: int, shared: int, head_dim: int = 128, **options: Any
) -> Call:
    query = jax.ShapeDtypeStruct((batch, queries, heads, head_dim), "bfloat16")
    key = jax.ShapeDtypeStruct((batch, keys, shared, head_dim), "bfloat16")
    return abstract_call({"query": query, "key": key, "value": key, **options}).call


def with_number(blocks: BackwardBlocks, copies: int) -> dict[str, Any]:
    return {"bwd_params": BackwardSizes(backward_key=replace(blocks, copies=copies))}


@pytest.mark.parametrize(
    ("shape", "copies"),
    [
        ((2, 2048, 2048, 48, 1), 4),  # 32 programs become 128: one round on 132 multiprocessors
        ((2, 2048, 2048, 71, 1, 64), 71),  # a prime number of heads
        ((1, 2048, 2048, 32, 2), 4),
        ((1, 8192, 8192, 32, 8), 1),  # 512 programs
        ((2, 2048, 2048, 1, 1), 1),  # nothing is shared
        ((2, 200, 300, 4, 2), 1),  # too little to sum
        ((1, 1 << 19, 1 << 19, 8, 1), 1),  # too much memory
    ],
)
def test_few_programs_become_more(shape: Any, copies: int) -> None:
    assert choose_copies(abstract(*shape), BLOCKS) == copies


@pytest.mark.parametrize(
    ("shape", "options", "copies"),
    [
        # Of 128 programs the first would take twice the mean of 132.
        ((2, 2048, 2048, 48, 1), {"causal": True}, 8),
        # Where windows limit it as well, they take equally long.
        ((2, 2048, 2048, 48, 1), {"causal": True, "sliding_window": (64, 0)}, 4),
        ((2, 4096, 4096, 28, 4), {"causal": True}, 1),  # 256 programs, the longest of which takes the mean
        ((1, 64, 4096, 16, 1), {"causal": True}, 1),  # too little to sum
        ((1, 4096, 64, 16, 1), {"causal": True}, 1),  # 64 rows see keys
        ((1, 4096, 64, 16, 1), {}, 16),
    ],
)
def test_in_causal_order_the_longest_program_counts(shape: Any, options: dict[str, Any], copies: int) -> None:
    assert choose_copies(abstract(*shape, **options), BLOCKS) == copies


@pytest.mark.parametrize(
    ("shape", "copies"),
    [
        ((1, 65536, 65536, 8, 1), 4),  # 512 programs of one head would wait for each other
        ((4, 65536, 65536, 8, 1), 1),  # four batch entries alternate
        ((1, 65536, 65536, 3, 1), 3),  # as many as there are
        ((1, 1 << 17, 1 << 17, 8, 1), 2),  # what memory has room for
    ],
)
def test_heads_alternate_where_programs_of_a_head_wait_for_each_other(shape: Any, copies: int) -> None:
    assert choose_copies(abstract(*shape, causal=True), FUSED) == copies


@given(st.integers(1, 4), st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 96), st.integers(1, 8))
def test_copies_share_a_group_evenly(batch: int, queries: int, keys: int, group: int, shared: int) -> None:
    copies = choose_copies(abstract(batch, queries, keys, group * shared, shared), BLOCKS)
    assert group % copies == 0
    programs = batch * shared * -(-keys // BLOCKS.own)
    assert copies == 1 or programs % key_heads.PROGRAMS != 0  # whole rounds are not cut


@given(st.integers(1, 5), st.integers(1, 3))
def test_the_sum_of_copies_is_that_of_their_head(copies: int, heads: int) -> None:
    """Query heads read the copy that their index gives, and its gradient goes to its own head."""
    query = np.zeros((1, 2, heads * copies, 3), np.float32)
    key = np.arange(4 * heads * 3, dtype=np.float32).reshape(1, 4, heads, 3)
    call = with_copies(check_call(query, key, key), copies)
    for head in range(heads * copies):
        np.testing.assert_array_equal(call.key[:, :, head], key[:, :, head // copies])
    total = sum_copies(call.value, copies, np.dtype(np.float32))
    np.testing.assert_array_equal(total, copies * key)


def test_the_number_may_be_chosen() -> None:
    call = abstract(2, 200, 300, 12, 2)
    asked = [choose_copies(call, replace(BLOCKS, copies=copies)) for copies in (1, 2, 3, 4, 6, 12)]
    assert asked == [1, 2, 3, 2, 6, 6]
    with pytest.raises(ValueError, match=r"BackwardBlocks.copies: got 0; expected a positive integer"):
        replace(BLOCKS, copies=0)


@pytest.mark.parametrize("name", ["causal", "bias over rows, mask, sinks"])
def test_copies_lower_for_cuda(name: str) -> None:
    """Gradients of the copies are float32, and are summed over them."""
    plain, copied = (
        lowered(tensors(128), {**FEATURES[name], **with_number(BLOCKS, copies)}) for copies in (1, 2)
    )
    of_copies = "tensor<2x300x2x2x128xf32>"
    assert of_copies in copied
    assert of_copies not in plain


@needs_hopper
@pytest.mark.parametrize("name", FEATURES)
def test_gradients_with_copies_are_right(name: str) -> None:
    assert_right(tensors(128), {**FEATURES[name], **with_number(BLOCKS, 2)})


@needs_hopper
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_gradients_of_one_kernel_with_copies_are_right(options: dict[str, Any]) -> None:
    assert_right(tensors(128), {**options, **with_number(FUSED, 2)})


@needs_hopper
@pytest.mark.parametrize("shape", [(1, 1024, 700, 8, 1), (2, 600, 256, 6, 1), (1, 2048, 2048, 16, 2)])
def test_the_choice_for_few_key_heads_is_right(shape: Any) -> None:
    call = abstract(*shape)
    assert choose_copies(call, BLOCKS) > 1
    assert_right(tensors_of(*shape), {"causal": True})
