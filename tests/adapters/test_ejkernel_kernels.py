"""ejKernel's kernel-level function, by its 18 positional arguments."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest import flash_attention, flash_attention_with_lse
from attest.kernels.adapters.ejkernel_kernels import LN2, flash_attention_call
from attest.kernels.operations import BwdParams, FwdParams
from tests.kernels.kernel_cases import normal, qkv

# The order of ejkernel 0.0.80.3.
ORDER = (
    "query", "key", "value", "attention_mask", "bias", "softmax_scale", "dropout_prob", "causal",
    "dropout_seed", "fwd_params", "bwd_params", "cum_seqlens_q", "cum_seqlens_k", "sliding_window",
    "logits_soft_cap", "softmax_aux", "q_segment_ids", "kv_segment_ids",
)  # fmt: skip
IDS = np.array([[0, 0, 0, 1, 1, 1, 1, -1]], np.int32)
LENGTHS = np.array([0, 3, 8], np.int32)


@pytest.mark.found_outside
@pytest.mark.parametrize(
    "given",
    [
        {"cum_seqlens_q": LENGTHS, "cum_seqlens_k": LENGTHS},
        {"q_segment_ids": IDS, "kv_segment_ids": IDS},
    ],
    ids=["lengths", "segments"],
)
def test_arguments_go_by_position(given: dict[str, Any]) -> None:
    query, key, value = qkv(1, 8, 8, 2, 2, 8, 8)
    options = {
        "attention_mask": normal(1, 1, 8, 8) > -1,
        "bias": normal(1, 2, 8, 8),
        "softmax_scale": 0.5,
        "dropout_prob": 0.25,
        "causal": True,
        "dropout_seed": 3,
        "sliding_window": (4, 0),
        "logits_soft_cap": 5.0,
        "softmax_aux": normal(2, 1),
        **given,
    }
    by_name = {"query": query, "key": key, "value": value, **options}
    sizes = {"fwd_params": FwdParams(q_blocksize=8, num_warps=4), "bwd_params": BwdParams(kv_blocksize=8)}
    called = [(by_name | sizes).get(name) for name in ORDER]
    np.testing.assert_allclose(
        flash_attention_call(*called), flash_attention(**by_name), rtol=1e-5, atol=1e-5
    )

    def loss(function: Any) -> Any:
        return jax.grad(lambda query, key, value: (function(query, key, value) ** 2).sum(), argnums=(0, 1, 2))

    found = loss(lambda *x: flash_attention_call(*x, *called[3:]))(query, key, value)
    wanted = loss(lambda *x: flash_attention(*x, **options))(query, key, value)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.found_outside
def test_the_order_and_the_defaults_are_those_of_ejkernel() -> None:
    parameters = inspect.signature(flash_attention_call).parameters
    assert tuple(parameters) == ORDER
    defaults = {name: x.default for name, x in parameters.items() if x.default is not x.empty}
    assert defaults == dict.fromkeys(ORDER[3:]) | {"dropout_prob": 0.0, "causal": False}


@pytest.mark.found_outside
def test_ln2_makes_a_natural_logarithm_of_one_of_base_2() -> None:
    query, key, value = qkv(1, 4, 4, 1, 1, 8, 8)
    _, lse = flash_attention_with_lse(query, key, value, softmax_scale=1.0)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    np.testing.assert_allclose(jnp.log2(jnp.exp(logits).sum(-1)) * LN2, lse, rtol=1e-5)


def test_what_is_malformed_is_refused_by_name() -> None:
    query, key, value = qkv(1, 4, 4, 1, 1, 8, 8)
    with pytest.raises(ValueError, match=r"^dropout_seed: got None; expected a seed where dropout_prob > 0"):
        flash_attention_call(query, key, value, None, None, None, 0.5)
    with pytest.raises(ValueError, match=r"^fwd_params: got a dict; expected"):
        flash_attention_call(query, key, value, fwd_params={"q_blocksize": 8})
