"""The public functions of attention: what they refuse, and what `help()` shows."""

import inspect
import re
from dataclasses import fields
from typing import Any, get_type_hints

import numpy as np
import pytest

from attest import kernels
from attest.kernels import triton, xla
from attest.kernels.annotations import Lse, Out
from attest.kernels.arguments import AttentionArguments
from attest.kernels.pallas import mosaic_gpu, tpu
from tests.kernels.kernel_cases import qkv


class Hostile:
    """It raises however its value is asked for."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        """Without its address, so that all processes of a test run give the test the same name."""
        return "Hostile()"


MALFORMED = [
    ("query", {"query": 3}),
    ("query", {"query": None}),
    ("query", {"query": [[1.0]]}),
    ("query", {"query": np.zeros((2, 40), "float32")}),
    ("query", {"query": np.zeros((2, 40, 4, 16), "float64")}),
    ("value", {"value": "float16"}),
    ("key", {"key": np.zeros((2, 40, 4, 300), "float32")}),
    ("bias", {"bias": 1.0}),
    ("logits_dtype", {"logits_dtype": [1, 2]}),
    ("logits_dtype", {"logits_dtype": "float64"}),
    ("logits_dtype", {"logits_dtype": Hostile()}),
    ("dropout_prob", {"dropout_prob": "0.1"}),
    ("dropout_prob", {"dropout_prob": 1.5, "dropout_seed": 1}),
    ("dropout_seed", {"dropout_prob": 0.5}),
]


@pytest.mark.parametrize(("name", "spoilt"), MALFORMED, ids=str)
def test_a_malformed_call_is_refused_in_the_words_of_the_one_that_is_chosen(name, spoilt):
    """S20: never by the choice."""
    arguments = dict(zip(("query", "key", "value"), qkv(), strict=True)) | spoilt
    words = []
    for function in (kernels.flash_attention, xla.flash_attention):
        with pytest.raises(ValueError, match=f"^{name}: got") as refusal:
            function(**arguments)
        words.append(str(refusal.value))
    assert words[0] == words[1]


@pytest.mark.parametrize("wrong", [{"scale": 1.0}, {"query": None}])
def test_arguments_that_do_not_exist_are_a_type_error(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        kernels.flash_attention(*qkv(), **wrong)


def test_help_explains_every_argument():
    for function in (kernels.flash_attention, kernels.flash_attention_with_lse):
        assert list(inspect.signature(function).parameters) == [x.name for x in fields(AttentionArguments)]
    explained = set(re.findall(r"^        (\w+): ", kernels.flash_attention.__doc__, flags=re.MULTILINE))
    assert explained >= set(inspect.signature(kernels.flash_attention).parameters)


@pytest.mark.parametrize("name", ["fwd_params", "bwd_params"])
def test_block_sizes_need_a_platform(name):
    sizes = {name: xla.ChunkSizes(16, 16)}
    with pytest.raises(ValueError, match=rf'^{name}: got a ChunkSizes.*name it, such as platform="triton"'):
        kernels.flash_attention(*qkv(), **sizes)
    named = kernels.flash_attention(*qkv(), **sizes, platform="xla")
    np.testing.assert_array_equal(named, xla.flash_attention(*qkv(), **sizes))


def test_every_implementation_has_the_public_signature():
    for module in (xla, triton, tpu, mosaic_gpu):
        for name in ("flash_attention", "flash_attention_with_lse"):
            assert getattr(module, name).func is getattr(kernels, name)


def test_what_is_returned_is_shown():
    returned = {"flash_attention": Out, "flash_attention_with_lse": tuple[Out, Lse]}
    for name, what in returned.items():
        assert get_type_hints(getattr(kernels, name))["return"] == what


@pytest.mark.parametrize(
    ("function", "spoilt", "words"),
    [
        (
            triton.flash_attention,
            {"head_dim": 300},
            "triton: takes head dims up to 256, and the call has 300",
        ),
        (
            mosaic_gpu.flash_attention,
            {"dtype": "float32"},
            "mosaic_gpu: takes bfloat16 and float16, .* float32",
        ),
        (tpu.flash_attention, {"dtype": "float16"}, "pallas_tpu: takes float32 and bfloat16, .* float16"),
        (tpu.flash_attention, {"dtype": "float32", "positions": True}, "pallas_tpu: takes no kv_positions"),
    ],
)
def test_an_implementation_refuses_what_its_capabilities_exclude(function, spoilt, words):
    query = np.zeros((1, 3, 1, spoilt.get("head_dim", 8)), np.float32).astype(spoilt.get("dtype", "float32"))
    options = {}
    if "positions" in spoilt:
        options = {"kv_positions": np.zeros((1, 3), np.int32)}
    with pytest.raises(NotImplementedError, match=f"^{words}.* Use platform='xla'"):
        function(query, query, query, **options)
