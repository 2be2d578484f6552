"""Which blocks the Hopper kernels take: the table, and the kinds of work that it tells apart."""

from typing import Any

import jax.numpy as jnp
import pytest

from attest.kernels.call.call import check_call
from attest.kernels.contract import Settings
from attest.kernels.pallas.mosaic_gpu import passes
from attest.kernels.pallas.mosaic_gpu.blocks import Blocks, choose, choose_backward
from attest.kernels.pallas.mosaic_gpu.candidates import TUNABLE
from attest.kernels.pallas.mosaic_gpu.spec import work_of


def test_the_table_has_blocks_for_all_work() -> None:
    """The first row that fits is taken; what asks for nothing special fits a row without a name."""
    assert choose(128, 128, ["cap", "pairs"]).k < choose(128, 128, ["cap"]).k == choose(128, 128, []).k
    assert choose_backward("backward_key", 128, 128, ["pairs", "cap"]).separate
    assert choose(64, 64, ["narrow", "ranges"], 8192).k < choose(64, 64, ["ranges"], 8192).k
    assert not choose_backward("backward_key", 128, 128, []).separate
    assert choose_backward("backward_key", 256, 256, []).split


@pytest.mark.parametrize(
    ("options", "narrow"),
    [
        ({}, False),
        ({"sliding_window": (255, 0)}, True),
        ({"sliding_window": (256, 0)}, False),
        ({"sliding_window": (128, 128)}, False),
        ({"sliding_window": (128, 128), "causal": True}, True),
        ({"sliding_window": (8, None)}, False),
    ],
)
def test_a_window_of_few_keys_is_work_of_its_own(options: dict[str, Any], narrow: bool) -> None:
    array = jnp.zeros((1, 600, 1, 64), jnp.bfloat16)
    assert ("narrow" in work_of(check_call(array, array, array, **options))) == narrow


@pytest.mark.parametrize(
    ("options", "keys", "bounds"),
    [({}, 256, False), ({}, 200, True), ({"causal": True}, 256, True), ({"sliding_window": 9}, 256, True)],
)
def test_bounds_are_work_of_their_own(options: dict[str, Any], keys: int, bounds: bool) -> None:
    query, key = (jnp.zeros((1, length, 1, 64), jnp.bfloat16) for length in (256, keys))
    assert ("bounds" in work_of(check_call(query, key, key, **options))) == bounds


def test_three_consumers_take_a_bias_alone() -> None:
    """With a bound or a mask beside it, 160 registers are too few."""
    work = ["pairs", "bias_tiles"]
    assert choose(64, 64, work, 2048, lambda blocks: blocks.stages == 2).consumers == 3
    for more in ("bounds", "mask_tiles"):
        assert choose(64, 64, [*work, more], 2048).consumers == 2


def test_blocks_that_do_not_fit_are_passed_over() -> None:
    first = choose(64, 64, ["pairs"], 2048)
    assert choose(64, 64, ["pairs"], 2048, lambda blocks: blocks != first) != first


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({}, True),
        ({"softmax_aux": jnp.zeros((1, 1))}, True),
        ({"alibi_slopes": jnp.ones(4)}, False),
        ({"bias": jnp.zeros((1, 1, 1, 600))}, False),
    ],
    ids=["plain", "sinks", "ALiBi", "bias"],
)
def test_a_tuner_begins_with_the_blocks_that_run(
    options: dict[str, Any], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one query are for packed heads, where these can be packed."""
    query, key = (jnp.zeros((1, length, 4, 64), jnp.bfloat16) for length in (1, 600))
    call = check_call(query, key, key, **options)

    ran: dict[str, Blocks] = {}

    def instead_of(name: str) -> Any:
        return lambda *arguments: ran.update({name: next(x for x in arguments if isinstance(x, Blocks))})

    for name in ("_sums", "_of_few"):
        monkeypatch.setattr(passes, name, instead_of(name))
    passes.PASSES.forward(Settings(None, None, True, None, "float32"), call)
    assert ran == {"_of_few" if packed else "_sums": TUNABLE.chosen(call).forward}
