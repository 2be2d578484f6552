"""What each implementation's tables choose, and the candidates that a tuner may try."""

from itertools import product
from typing import Any

import jax
import pytest

from attest.kernels.configs.tunable import MOST_CANDIDATES
from attest.kernels.implementations import IMPLEMENTATIONS
from attest.kernels.operations import FlashAttention, FlashAttentionConfig
from attest.kernels.operations.abstract_call import abstract_call
from attest.kernels.operations.invocation import Invocation
from attest.kernels.pallas.mosaic_gpu.launch.scratch import tile_bytes
from attest.kernels.triton import candidates as of_triton
from attest.kernels.xla.blocks import ChunkSizes

BY_NAME = {x.name: x for x in IMPLEMENTATIONS}
every_implementation = pytest.mark.parametrize("name", BY_NAME)


@pytest.fixture(autouse=True)
def triton_on_a_gpu(monkeypatch):
    monkeypatch.setattr(of_triton, "target_device", lambda: "sm_90")


def tunable(name: str) -> Any:
    return BY_NAME[name].tunable()


def call(length: int = 1024, heads: int = 8, dim: int = 128, **options: Any) -> Any:
    x = jax.ShapeDtypeStruct((2, length, heads, dim), "bfloat16")
    return abstract_call({"query": x, "key": x, "value": x, **options}).call


@every_implementation
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_tables_choice_is_the_first_of_a_few_candidates(name, dim):
    found = tunable(name).candidates(call(dim=dim))
    assert found[0] == tunable(name).chosen(call(dim=dim))
    # Of wide tiles few fit into the shared memory of a Hopper GPU.
    least = 2 if (name, dim) == ("mosaic_gpu", 256) else 4
    assert least <= len(found) == len(set(found)) <= 1 + 3 * MOST_CANDIDATES
    assert all(type(x) is BY_NAME[name].config() for x in found)


@pytest.mark.parametrize(
    ("kernel", "dim", "swept"),
    [
        ("forward", 64, ((128, 256), (64, 128), (4, 8), (2, 3, 4))),
        ("forward", 256, ((64, 128), (32, 64), (4, 8), (1, 2, 3))),
        ("query", 128, ((64, 128), (32, 64, 128), (4, 8), (2, 3))),
        ("query", 256, ((32, 64), (32, 64), (4, 8), (1, 2))),
        ("key", 128, ((32, 64), (64, 128), (4, 8), (1, 2, 3))),
        ("key", 256, ((32, 64), (32, 64), (4, 8), (1, 2))),
    ],
)
def test_every_combination_of_a_triton_kernel_s_sizes_can_be_tried(kernel, dim, swept):
    found = tunable("triton").candidates(call(dim=dim), 100)
    first, *_ = found
    tried = {getattr(x.backward, kernel) if kernel != "forward" else x.forward for x in found}
    assert {of_triton.BlockSizes(*sizes) for sizes in product(*swept)} <= tried
    # Each candidate is that of one kernel.
    for config in found[1:]:
        parts = zip(parts_of(config), parts_of(first), strict=True)
        assert sum(ours != theirs for ours, theirs in parts) == 1


def parts_of(config: Any) -> list[Any]:
    return [config.forward, config.backward.query, config.backward.key, config.backward.bias]


@every_implementation
@pytest.mark.parametrize("most", [1, 2])
def test_an_operation_tries_so_many_sizes_of_each_kernel(name, most):
    found = tunable(name).candidates(call(), most)
    assert 1 + most <= len(found) <= 2 + 3 * most
    assert set(found) <= set(tunable(name).candidates(call()))
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), "float32")
    if name == "xla":
        inv = Invocation("flash_attention", kwargs={"query": x, "key": x, "value": x, "platform": "xla"})
        assert len(FlashAttention(most_candidates=most).candidate_cfgs(inv)) == 1 + 2 * most
        with pytest.raises(ValueError, match="most_candidates: got 0"):
            FlashAttention(most_candidates=0)


@every_implementation
def test_the_forward_part_is_that_of_the_forward_kernel(name):
    found = tunable(name).candidates(call())
    parts = {FlashAttention().forward_part(FlashAttentionConfig(platform=name, config=x)) for x in found}
    assert len(parts) == len({x.forward for x in found}) < len(found)


@every_implementation
def test_every_part_is_chosen_where_the_call_needs_it(name):
    chosen = tunable(name).chosen(call(bias=jax.ShapeDtypeStruct((1, 8, 1024, 1024), "float32")))
    # XLA chooses when the program is lowered, by the platform.
    assert (chosen.forward is None) == (name == "xla")
    if name != "xla":
        assert all(vars(chosen.backward).values())
        without = vars(tunable(name).chosen(call()).backward).values()
        assert [x is None for x in without] == [False, False, True]


@every_implementation
def test_blocks_are_not_much_longer_than_what_they_cut(name):
    """Neither the sequence nor the window."""

    def sizes(window: int) -> set[int]:
        of_window = call(dim=64, sliding_window=(window, 0), causal=True)
        chosen, *others = tunable(name).candidates(of_window)
        return {x.forward.k for x in others if x.forward != chosen.forward}

    assert max(sizes(100)) < 2 * 101
    assert sizes(100) <= sizes(1000)
    assert max(sizes(1000)) >= 128


@every_implementation
def test_neutral_sizes_are_translated_or_refused(name):
    found = tunable(name).translated(call(), {"q_blocksize": 128, "kv_blocksize": 64}, {})
    chosen = tunable(name).chosen(call())
    assert found.forward.k == 64
    assert found.backward == chosen.backward
    assert getattr(found.forward, "q", None) == 128 or found.forward.own == 128
    back = tunable(name).translated(call(), {}, {"kv_blocksize": 128})
    assert back.forward == chosen.forward
    with pytest.raises(ValueError, match=f"bwd_params.blocksize_m: got 3; expected '{name}' to choose it"):
        tunable(name).translated(call(), {}, {"blocksize_m": 3})


def test_hopper_s_candidates_fit_and_stages_that_nobody_asked_for_are_fewer_if_need_be():
    """With 128 and 192 channels, two stages of 128 rows would not fit."""
    x, value = (jax.ShapeDtypeStruct((1, 1024, 8, dim), "bfloat16") for dim in (128, 192))
    wide = abstract_call({"query": x, "key": x, "value": value}).call
    limit = 227 * 1024
    for config in tunable("mosaic_gpu").candidates(wide):
        assert tile_bytes("forward", config.forward, (128, 256), 2) <= limit
        assert tile_bytes("backward_key", config.backward.backward_key, (128, 256), 2) <= limit
    translated = tunable("mosaic_gpu").translated
    assert translated(wide, {}, {"q_blocksize": 128}).backward.backward_key.stages == 1
    assert translated(wide, {}, {"q_blocksize": 128, "num_stages": 2}).backward.backward_key.stages == 2


def test_hopper_s_warps_follow_from_its_rows():
    translated = tunable("mosaic_gpu").translated
    assert (
        translated(call(), {"q_blocksize": 192, "num_warps": 16, "num_stages": 3}, {}).forward.consumers == 3
    )
    for sizes, words in (
        ({"q_blocksize": 100}, "fwd_params.q_blocksize: got 100; expected a multiple of 64 up to 192"),
        ({"q_blocksize": 128, "num_warps": 4}, "fwd_params.num_warps: got 4; expected 12"),
        ({"num_warps": 4}, "fwd_params.num_warps: got 4; expected q_blocksize beside it"),
        ({"num_stages": 1}, "Blocks.stages: got 1; expected at least 2"),
    ):
        with pytest.raises(ValueError, match=words):
            translated(call(), sizes, {})


@every_implementation
def test_blocks_are_capped(name):
    capped = tunable(name).capped(call(), 64, 100).forward
    assert getattr(capped, "q", None) in (64, 128) or capped.own == 64
    assert capped.k <= 128
    if name == "xla":
        # Where nothing is chosen before the program is lowered, a cap is obeyed on every platform.
        assert tunable(name).capped(call(), 4096, 4096).forward == ChunkSizes()
    else:
        assert tunable(name).capped(call(), 4096, 4096) == tunable(name).chosen(call())
