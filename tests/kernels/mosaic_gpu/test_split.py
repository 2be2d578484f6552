"""The Hopper kernel whose two warpgroups share 64 keys: when it is chosen, what is refused, its results."""

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
    FEATURES,
    assert_right,
    both_passes,
    lowered,
    lowered_on_mesh,
    needs_hopper,
    split_options,
    tensors,
)

SPLIT = BackwardBlocks(step=64, stages=2, consumers=1, registers=(240, 24), split=True)
ONE_SLOT = replace(SPLIT, stages=1)  # so that tiles of a mask and a bias have room beside the rings
SEPARATE = replace(SPLIT.unsplit, stages=1)
# What these do, "causal, window, cap, negative scale" does, too.
PARTS = ("plain", "causal", "window", "cap", "cap that most logits are near, causal, window")
DIMS = pytest.mark.parametrize("dims", [(256, 256), (192, 192), (192, 128), (64, 64)], ids=str)


def asked(blocks: BackwardBlocks) -> dict[str, Any]:
    return {"bwd_params": BackwardSizes(backward_key=blocks)}


def abstract(head_dim: int, options: dict[str, Any]) -> Call:
    array = jax.ShapeDtypeStruct((1, 512, 2, head_dim), "bfloat16")
    return abstract_call({"query": array, "key": array, "value": array, **options}).call


def sizes_of(head_dim: int, options: dict[str, Any]) -> tuple[BackwardBlocks, BackwardBlocks]:
    """Of backward_query and backward_key."""
    found = chosen(abstract(head_dim, options)).backward
    assert found is not None
    assert found.backward_query is not None
    assert found.backward_key is not None
    return found.backward_query, found.backward_key


@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"logits_soft_cap": 3.0}], ids=str)
def test_the_table_has_it_above_head_dim_128(head_dim: int, options: dict[str, Any]) -> None:
    assert sizes_of(head_dim, options)[1] == SPLIT


def test_beside_tiles_of_pairs_rings_have_one_slot() -> None:
    bias = {"bias": jax.ShapeDtypeStruct((1, 1, 512, 512), "float32")}
    assert sizes_of(256, bias)[1] == ONE_SLOT


def test_neutral_sizes_and_other_candidates_mean_a_launch_for_each_sum() -> None:
    call = abstract(256, {})
    assert translated(call, {}, {}).backward == chosen(call).backward
    found = translated(call, {}, {"kv_blocksize": 128}).backward
    assert found is not None
    assert found.backward_key == replace(SEPARATE, consumers=2)
    others = [x.backward.backward_key for x in candidates(call) if x.backward is not None]
    assert SPLIT in others
    assert SEPARATE in others


def test_the_ring_of_values_has_fewer_slots_where_shared_memory_is_short() -> None:
    query, _ = sizes_of(256, {})
    assert (query.stages, query.value_slots) == (2, 1)
    assert sizes_of(192, {})[0].value_slots == 2
    found = translated(abstract(256, {}), {}, {"num_stages": 1}).backward
    assert found is not None
    assert found.backward_query is not None
    assert found.backward_query.value_slots == 1


@pytest.mark.parametrize("name", ["backward_key", "backward_bias"])
def test_rings_of_other_kernels_have_as_many_slots(name: str) -> None:
    blocks = replace(SEPARATE, value_stages=2)
    with pytest.raises(ValueError, match=rf"BackwardSizes\.{name}\.value_stages: got 2; expected None"):
        BackwardSizes(**{name: blocks})


@pytest.mark.parametrize("name", [name for name in FEATURES if name not in PARTS])
def test_every_feature_lowers(name: str) -> None:
    program = lowered_on_mesh(tensors(256), FEATURES[name] | asked(ONE_SLOT))
    assert "flash_backward_split" in program
    assert "flash_backward_key" not in program


@pytest.mark.parametrize("dims", [(192, 128), (64, 64)], ids=str)
def test_it_takes_head_dims_for_which_the_table_has_another(dims: tuple[int, int]) -> None:
    assert "flash_backward_split" in lowered(tensors(*dims), {"causal": True, **asked(SPLIT)})


def test_tiles_that_do_not_fit_are_refused_by_name() -> None:
    options = {"bias": normal(1, 1, 200, 300), **asked(SPLIT)}
    with pytest.raises(ValueError, match=r"flash_backward_split needs .* bytes of shared memory"):
        lowered(tensors(256), options)


REFUSED = [
    ({"separate": True}, "separate True, fused False, ping_pong False with 1 consumers"),
    ({"fused": True, "registers": (232, 24)}, "fused True"),
    ({"ping_pong": True}, "ping_pong True"),
    ({"consumers": 2, "registers": (112, 24)}, "with 2 consumers"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"BackwardBlocks\.split: got .*{words}.*; expected none of these"):
        replace(SPLIT, **changes)


def test_registers_are_counted_for_both_warpgroups() -> None:
    assert SPLIT.warpgroups == 3
    with pytest.raises(ValueError, match=r"BackwardBlocks\.registers: .*528 in all"):
        replace(SPLIT, registers=(240, 48))


@needs_hopper
@pytest.mark.parametrize("name", FEATURES)
def test_both_sums_have_the_bits_of_a_launch_each(name: str) -> None:
    floats, rest = split_options(FEATURES[name])

    def found(blocks: BackwardBlocks) -> Any:
        run = jax.jit(partial(both_passes, flash_attention_with_lse, rest | asked(blocks)))
        return [run(tensors(256), floats) for _ in range(3)]

    first, *others = found(ONE_SLOT)
    for other in (*others, found(SEPARATE)[0]):
        jax.tree.map(np.testing.assert_array_equal, other, first)


@needs_hopper
@DIMS
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"logits_soft_cap": 3.0}], ids=str)
def test_gradients_are_right(dims: tuple[int, int], options: dict[str, Any]) -> None:
    assert_right(tensors(*dims), options | asked(SPLIT))


@needs_hopper
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 3.0}], ids=str)
def test_what_is_hidden_changes_nothing(options: dict[str, Any]) -> None:
    """S4, in either sum: the first query sees the first keys alone, which no query before it sees."""
    query, key, value = tensors(256)

    def gradients(query: Any, options: dict[str, Any]) -> Any:
        run = jax.jit(partial(both_passes, flash_attention_with_lse, options))
        return run((query, key, value), {})[1][0]

    options = options | {"causal": True, **asked(SPLIT)}
    clean, found = gradients(query, options), gradients(query.at[:, 0].set(jnp.nan), options)
    seen = 1 + key.shape[1] - query.shape[1]  # the keys that the first query sees
    for i in (1, 2):
        np.testing.assert_array_equal(found[i][:, seen:], clean[i][:, seen:])
        assert jnp.isnan(found[i][:, :seen]).any()
