"""The Hopper kernel of dquery, dkey and dvalue together: when it is chosen, what is refused, its results."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import normal

from attest.kernels.arguments import check_call
from attest.kernels.pallas.mosaic_gpu import BackwardBlocks, BackwardSizes, flash_attention_with_lse
from attest.kernels.pallas.mosaic_gpu.candidates import candidates, chosen, translated
from tests.kernels.test_mosaic_gpu import assert_right, both_passes, lowered, lowered_on_mesh, needs_hopper

APART = BackwardBlocks(step=64, stages=2, consumers=2, registers=(240, 24))
FUSED = replace(APART, registers=(232, 24), fused=True)
BY_ROW = replace(FUSED, step=128)
# Batch, queries, keys, heads, key heads: lengths that fill no block, fewer rows than a block, one of each.
SHAPES = [
    (2, 200, 300, 4, 2),
    (2, 520, 776, 2, 2),
    (1, 197, 257, 3, 1),
    (1, 1, 300, 1, 1),
    (1, 777, 1, 1, 1),
    (1, 2048, 2048, 2, 2),
]


def tensors(batch: int, queries: int, keys: int, heads: int, key_heads: int, head_dim: int = 128) -> Any:
    query = normal(batch, queries, heads, head_dim, dtype="bfloat16")
    key = normal(batch, keys, key_heads, head_dim, seed=1, dtype="bfloat16")
    return query, key, normal(batch, keys, key_heads, head_dim, seed=2, dtype="bfloat16")


def sizes_of(arrays: Any, **options: Any) -> BackwardSizes:
    found = chosen(check_call(*arrays, **options)).backward
    assert found is not None
    return found


HIDING: list[dict[str, Any]] = [
    {"sliding_window": (50, 50)},
    {"attention_mask": np.ones((1, 1, 1, 300), bool)},
    {"bias": np.zeros((1, 1, 200, 1), np.float32)},
    {"kv_end": np.full((1, 200), 7)},
]


@pytest.mark.parametrize(
    "options", [{}, {"softmax_scale": 0.3}, {"softmax_aux": np.zeros((4, 2), np.float32)}]
)
def test_one_kernel_sums_all_gradients_where_every_row_sees_every_key(options: dict[str, Any]) -> None:
    arrays = tensors(*SHAPES[0])
    sizes = sizes_of(arrays, **options)
    assert sizes.fused
    assert sizes.backward_query is None
    program = lowered_on_mesh(arrays, options)
    assert "flash_backward_fused" in program
    assert "flash_backward_query" not in program


@pytest.mark.parametrize("options", HIDING, ids=lambda options: next(iter(options)))
def test_two_kernels_run_where_pairs_may_be_hidden(options: dict[str, Any]) -> None:
    arrays = tensors(*SHAPES[0])
    assert not sizes_of(arrays, **options).fused
    with pytest.raises(
        ValueError, match=r"backward_key\.fused: got True; expected False for calls that hide"
    ):
        lowered(arrays, options | {"bwd_params": BackwardSizes(backward_key=FUSED)})


def test_two_kernels_run_where_programs_would_wait_for_their_turns() -> None:
    """One query has as many programs as blocks of keys, which add one after another."""
    assert not sizes_of(tensors(1, 64, 300, 1, 1)).fused
    assert sizes_of(tensors(1, 192, 300, 1, 1)).fused
    assert sizes_of(tensors(1, 64, 300, 4, 1)).fused


def test_a_choice_of_the_caller_is_respected() -> None:
    arrays = tensors(*SHAPES[0])
    for sizes in (BackwardSizes(backward_query=APART), BackwardSizes(backward_key=APART)):
        assert "flash_backward_query" in lowered(arrays, {"bwd_params": sizes})
    assert "flash_backward_query" not in lowered(arrays, {"bwd_params": BackwardSizes(backward_key=FUSED)})


def test_a_tuner_tries_both_forms_and_neutral_sizes_mean_two_kernels() -> None:
    call = check_call(*tensors(*SHAPES[0]))
    forms = {x.backward.fused for x in candidates(call) if x.backward is not None}
    assert forms == {True, False}
    neutral = translated(call, {}, {"kv_blocksize": 128}).backward
    assert neutral is not None
    assert neutral.backward_query is not None


REFUSED = [
    (partial(replace, FUSED, separate=True), r"BackwardBlocks\.fused: got step 64, separate True"),
    (partial(replace, FUSED, step=192), r"BackwardBlocks\.fused: got step 192"),
    (partial(replace, FUSED, registers=(240, 24)), r"BackwardBlocks\.registers: .*528 in all"),
    (partial(BackwardSizes, APART, FUSED), r"BackwardSizes\.backward_query: .*beside a fused backward_key"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_cannot_be_is_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_share_of_fewer_channels_than_a_product_takes_is_refused() -> None:
    arrays = tensors(*SHAPES[0], head_dim=64)
    with pytest.raises(
        ValueError, match=r"backward_key\.fused: .*step of 128: shares of dquery are multiples of 64 channels"
    ):
        lowered(arrays, {"bwd_params": BackwardSizes(backward_key=FUSED)})
    assert "flash_backward_fused" in lowered(arrays, {"bwd_params": BackwardSizes(backward_key=BY_ROW)})


@needs_hopper
@pytest.mark.parametrize(("head_dim", "blocks"), [(128, FUSED), (64, BY_ROW)])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_gradients_are_right(shape: Any, head_dim: int, blocks: BackwardBlocks) -> None:
    assert_right(tensors(*shape, head_dim=head_dim), {"bwd_params": BackwardSizes(backward_key=blocks)})


@needs_hopper
def test_the_order_of_additions_is_fixed() -> None:
    """S17, with more programs than run at once."""
    options = {"bwd_params": BackwardSizes(backward_key=FUSED)}
    run = jax.jit(partial(both_passes, flash_attention_with_lse, options))
    arrays = tensors(2, 8192, 8192, 2, 2)
    first = run(arrays, {})
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, run(arrays, {}), first)


@needs_hopper
def test_keys_past_the_end_give_dquery_nothing() -> None:
    """S4: their dS is infinite where the cotangent of lse is, and their key is 0."""
    query, key, value = tensors(1, 192, 130, 1, 1)
    key = jnp.abs(key)

    def lse(query: Any) -> Any:
        return flash_attention_with_lse(query, key, value, bwd_params=BackwardSizes(backward_key=FUSED))[1]

    (d_query,) = jax.jit(lambda: jax.vjp(lse, query)[1](jnp.full((1, 1, 192), jnp.inf)))()
    assert not jnp.isnan(d_query).any()
