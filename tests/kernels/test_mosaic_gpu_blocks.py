"""Which blocks the Hopper kernels take: the table, and the kinds of work that it tells apart."""

from typing import Any

import jax.numpy as jnp
import pytest

from attest.kernels.arguments import check_call
from attest.kernels.pallas.mosaic_gpu.blocks import choose, choose_backward
from attest.kernels.pallas.mosaic_gpu.spec import work_of


def test_the_table_has_blocks_for_all_work() -> None:
    """The first row that fits is taken; what asks for nothing special fits a row without a name."""
    assert choose(128, 128, ["cap", "pairs"]).k < choose(128, 128, ["cap"]).k == choose(128, 128, []).k
    assert choose_backward("backward_key", 128, 128, ["pairs", "cap"]).separate
    assert choose(64, 64, ["narrow", "ranges"], 8192).k < choose(64, 64, ["ranges"], 8192).k
    assert not choose_backward("backward_key", 128, 128, []).separate
    assert choose_backward("backward_key", 256, 256, []).separate


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
