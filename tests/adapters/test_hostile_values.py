"""S20: whatever an argument of an adapter is given, it is taken for what it means or refused by its name."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from attest.kernels.adapters import (
    ejkernel,
    flash_attention,
    jax_gpu_mha,
    jax_nn,
    jax_tpu_splash,
    onnx,
    tokamax,
)
from tests.adapters.hostile import HOSTILE

pytestmark = pytest.mark.found_outside

RNG = np.random.default_rng(0)
QKV = tuple(RNG.standard_normal((2, 6, 2, 4)).astype("f") for _ in range(3))
PACKED = tuple(x.reshape(-1, 2, 4) for x in QKV)
STARTS = np.array([0, 4, 12], np.int32)
MULTIPLE = dict(zip(("query", "key", "value"), QKV, strict=True))
LETTERS = dict(zip(("q", "k", "v"), QKV, strict=True))
BY_HEADS = [x[0].swapaxes(0, 1) for x in QKV]
SPLASH = {"mask": np.ones((2, 6, 6), bool), "head_shards": 1, "q_seq_shards": 1}
RING = inspect.signature(ejkernel.ring_flash_attention_call).parameters
# Each function with arguments that make a call.
ADAPTERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "jax.nn": (jax_nn.dot_product_attention, MULTIPLE),
    "tokamax": (tokamax.dot_product_attention, MULTIPLE),
    "tokamax's operation": (tokamax.attention_op, LETTERS),
    "flash_attn_func": (flash_attention.flash_attn_func, LETTERS),
    "flash_attn_kvpacked_func": (
        flash_attention.flash_attn_kvpacked_func, {"q": QKV[0], "kv": np.stack(QKV[1:], 2)}
    ),
    "flash_attn_qkvpacked_func": (flash_attention.flash_attn_qkvpacked_func, {"qkv": np.stack(QKV, 2)}),
    "flash_attn_varlen_func": (
        flash_attention.flash_attn_varlen_func,
        dict(zip(("q", "k", "v"), PACKED, strict=True))
        | {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 8, "max_seqlen_k": 8},
    ),
    "flash_attn_with_kvcache": (
        flash_attention.flash_attn_with_kvcache,
        dict(zip(("q", "k_cache", "v_cache"), QKV, strict=True)),
    ),
    "ejKernel's flash_attention": (ejkernel.flash_attention, MULTIPLE),
    "ejKernel's attention": (ejkernel.attention, MULTIPLE),
    "ejKernel's ring_attention": (ejkernel.ring_attention, MULTIPLE),
    "ejKernel's ring_flash_attention_call": (
        ejkernel.ring_flash_attention_call,
        dict.fromkeys(RING) | MULTIPLE | {"dropout_prob": 0.0, "causal": False},
    ),
    "ONNX": (onnx.attention, dict(zip(("Q", "K", "V"), QKV, strict=True))),
    "mha": (jax_gpu_mha.mha, LETTERS | {"segment_ids": None}),
    "splash attention": (jax_tpu_splash.make_splash_mha, SPLASH),
    "splash attention's kernel": (
        jax_tpu_splash.make_splash_mha(**SPLASH),
        dict(zip(("q", "k", "v"), BY_HEADS, strict=True)),
    ),
}  # fmt: skip


# What takes anything: it has no effect, or only a type of its own would be more than a hint.
TAKES_ANYTHING = {("ejKernel's ring_attention", name) for name in ("policy", "dropout_rng")}
# Without effect where nothing is dropped, as in the library.
UNREAD = {("ejKernel's attention", "dropout_rng"), ("ejKernel's attention", "init_bias")}
# Of several arguments that do not fit each other, one begins the message, and the others are in its text.
ARGUMENT_IN_WORDS = {"q": "query", "k": "key", "k_cache": "key"}
ARGUMENTS = [
    (adapter, argument)
    for adapter, (function, _) in ADAPTERS.items()
    for argument in inspect.signature(function).parameters
    if (adapter, argument) not in TAKES_ANYTHING | UNREAD
]


@pytest.mark.parametrize(("adapter", "argument"), ARGUMENTS)
def test_hostile_values_are_refused_by_the_name_of_the_argument(adapter: str, argument: str) -> None:
    function, arguments = ADAPTERS[adapter]
    taken = []
    for name, value in HOSTILE.items():
        call = partial(function, **{**arguments, argument: value(arguments.get(argument))})
        try:
            call()
        except (ValueError, NotImplementedError) as error:
            text = str(error)
            assert text.startswith((f"{argument}:", f"{argument}.", f"{argument} ")) or (
                # It does not fit another one, or lacks it.
                text.partition(":")[0] in inspect.signature(function).parameters
                and ARGUMENT_IN_WORDS.get(argument, argument) in text
            ), (name, text)
            assert "got " in text, (name, text)
        else:
            taken.append(name)
    assert taken == []


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_arguments_that_are_needed_are_not_none(adapter: str) -> None:
    function, arguments = ADAPTERS[adapter]
    needed = [name for name, x in arguments.items() if x is not None]
    for argument in needed:
        with pytest.raises(ValueError, match=rf"^{argument}: got (a NoneType|None)"):
            function(**{**arguments, argument: None})
