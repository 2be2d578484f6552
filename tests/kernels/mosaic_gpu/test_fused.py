"""The Hopper kernel of dquery, dkey and dvalue together: when it is chosen, what is refused, its results."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.kernels.call.call import Call
from attest.kernels.operations.abstract_call import abstract_call
from attest.kernels.pallas.mosaic_gpu import BackwardBlocks, BackwardSizes, flash_attention_with_lse
from attest.kernels.pallas.mosaic_gpu.candidates import candidates, chosen, translated
from tests.kernels.kernel_cases import normal
from tests.kernels.mosaic_gpu.test_kernels import (
    assert_right,
    both_passes,
    lowered,
    lowered_on_mesh,
    needs_hopper,
)

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


HIDING: list[dict[str, Any]] = [
    {"sliding_window": (50, 50)},
    {"attention_mask": np.ones((1, 1, 1, 300), bool)},
    {"bias": np.zeros((1, 1, 200, 1), np.float32)},
    {"kv_end": np.full((1, 200), 7)},
]


# Sizes for which the table has fused blocks: head dim, queries, options.
CHOSEN: list[tuple[int, int, dict[str, Any]]] = [
    (128, 4096, {}),
    (128, 4096, {"softmax_scale": 0.3, "softmax_aux": jax.ShapeDtypeStruct((2, 2), "float32")}),
    (128, 2048, {"causal": True}),
    (64, 2048, {}),
]


def sizes_of(
    head_dim: int, queries: int, keys: int, options: dict[str, Any], key_heads: int = 2
) -> BackwardSizes:
    found = chosen(abstract(head_dim, queries, keys, options, key_heads)).backward
    assert found is not None
    return found


def abstract(head_dim: int, queries: int, keys: int, options: dict[str, Any], key_heads: int = 2) -> Call:
    query = jax.ShapeDtypeStruct((1, queries, 2, head_dim), "bfloat16")
    key = jax.ShapeDtypeStruct((1, keys, key_heads, head_dim), "bfloat16")
    return abstract_call({"query": query, "key": key, "value": key, **options}).call


@pytest.mark.parametrize(("head_dim", "length", "options"), CHOSEN)
def test_one_kernel_sums_all_gradients_where_that_is_faster(
    head_dim: int, length: int, options: dict[str, Any]
) -> None:
    sizes = sizes_of(head_dim, length, length, options)
    assert sizes.fused
    assert sizes.backward_query is None
    assert not sizes_of(head_dim, length - 64, length, options).fused
    assert sizes_of(head_dim, length, length, options, key_heads=1).fused
    assert not sizes_of(head_dim, length, length, {"logits_soft_cap": 3.0, **options}).fused
    assert not sizes_of(head_dim, length, length, {"sliding_window": (9, 9), **options}).fused


def test_two_kernels_run_where_programs_would_wait_for_their_turns() -> None:
    """Programs of a head add one after another: they need as many steps as programs run at once."""
    assert not sizes_of(128, 4096, 1 << 20, {}).fused
    assert sizes_of(128, 132 * 64, 1 << 20, {}).fused


def test_the_tables_choice_lowers() -> None:
    program = lowered_on_mesh(tensors(1, 8192, 8192, 1, 1), {"causal": True})
    assert "flash_backward_fused" in program
    assert "flash_backward_joint" not in program
    assert "flash_backward_query" not in program


@pytest.mark.parametrize("options", HIDING, ids=lambda options: next(iter(options)))
def test_it_is_refused_where_more_than_causal_order_hides_pairs(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"backward_key\.fused: got True; expected False for calls that"):
        lowered(tensors(*SHAPES[0]), options | {"bwd_params": BackwardSizes(backward_key=FUSED)})


def traced(arrays: Any, sizes: BackwardSizes) -> str:
    """The program of both passes before it is lowered, which names the kernels that it launches."""
    call = partial(both_passes, flash_attention_with_lse, {"bwd_params": sizes})
    return str(jax.make_jaxpr(call)(arrays, {}))


def test_a_choice_of_the_caller_is_respected() -> None:
    arrays = tensors(1, 4096, 4096, 1, 1)
    for sizes in (BackwardSizes(backward_query=APART), BackwardSizes(backward_key=APART)):
        assert "flash_backward_fused" not in traced(arrays, sizes)
    assert "flash_backward_fused" in traced(tensors(*SHAPES[0]), BackwardSizes(backward_key=FUSED))


def test_a_tuner_tries_both_forms_and_neutral_sizes_mean_two_kernels() -> None:
    call = abstract(128, 4096, 4096, {})
    forms = {x.backward.fused for x in candidates(call) if x.backward is not None}
    assert forms == {True, False}
    neutral = translated(call, {}, {"kv_blocksize": 128}).backward
    assert neutral is not None
    assert neutral.backward_query is not None
    assert translated(call, {"kv_blocksize": 128}, {}).backward == chosen(call).backward


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
@pytest.mark.parametrize(
    ("head_dim", "blocks", "options"),
    [(128, FUSED, {}), (128, FUSED, {"causal": True}), (64, BY_ROW, {})],
    ids=["128", "128 causal", "64"],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_gradients_are_right(
    shape: Any, head_dim: int, blocks: BackwardBlocks, options: dict[str, Any]
) -> None:
    sizes = BackwardSizes(backward_key=blocks)
    assert_right(tensors(*shape, head_dim=head_dim), {"bwd_params": sizes, **options})


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
def test_what_causal_order_hides_changes_nothing() -> None:
    """S4: the last key is seen by the last query alone, the first query sees the first key alone."""
    options = {"causal": True, "bwd_params": BackwardSizes(backward_key=FUSED)}
    run = jax.jit(partial(both_passes, flash_attention_with_lse, options))
    query, key, value = tensors(2, 520, 520, 4, 2)
    _, ((d_query, d_key, d_value), _) = run((query, key, value), {})
    _, (found, _) = run((query, key.at[:, -1].set(jnp.nan), value.at[:, -1].set(jnp.inf)), {})
    np.testing.assert_array_equal(found[0][:, :-1], d_query[:, :-1])
    assert jnp.isnan(found[0][:, -1]).any()
    _, (found, _) = run((query.at[:, 0].set(jnp.nan), key, value), {})
    np.testing.assert_array_equal(found[1][:, 1:], d_key[:, 1:])
    np.testing.assert_array_equal(found[2][:, 1:], d_value[:, 1:])


@needs_hopper
def test_keys_past_the_end_give_dquery_nothing() -> None:
    """S4: their dS is infinite where the cotangent of lse is, and their key is 0."""
    query, key, value = tensors(1, 192, 130, 1, 1)
    key = jnp.abs(key)

    def lse(query: Any) -> Any:
        return flash_attention_with_lse(query, key, value, bwd_params=BackwardSizes(backward_key=FUSED))[1]

    (d_query,) = jax.jit(lambda: jax.vjp(lse, query)[1](jnp.full((1, 1, 192), jnp.inf)))()
    assert not jnp.isnan(d_query).any()
