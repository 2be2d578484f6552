"""The operators with EasyDeL's interface."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attest
from attest.kernels import xla
from attest.kernels.operations import FlashAttention, FlashAttentionConfig, MaskInfo, NoImplementationError
from attest.kernels.operations.easydel import (
    AttentionOutput,
    FlashAttn,
    OperationImpl,
    OperationMetadata,
    OperationRegistry,
    VanillaAttn,
)
from tests.kernels.kernel_cases import normal, qkv

QKV = qkv(2, 40, 40, 4, 2, 16, 16)
BIAS = normal(1, 4, 40, 40)
METHODS = ("native", "cpu", "gpu", "cuda", "rocm", "tpu")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_one_signature(method):
    operator = OperationRegistry.create("flash_attn2", OperationMetadata(softmax_scale=0.3))
    options: Any = {"sliding_window": (3, 2), "logits_soft_cap": 2.0}
    found = getattr(operator, f"forward_{method}")(
        *QKV, MaskInfo().apply_causal(), normal(1, 4, 40, 40), **options
    )
    assert isinstance(found, AttentionOutput)
    assert found.attention_weights is None
    assert found.cache_view is None
    want = attest.flash_attention(*QKV, bias=BIAS, causal=True, softmax_scale=0.3, **options)
    np.testing.assert_array_equal(found.attention_outputs, want)
    called = operator(*QKV, MaskInfo().apply_causal(), BIAS, **options)
    np.testing.assert_array_equal(called.attention_outputs, want)


def test_an_argument_wins_over_the_metadata():
    operator = FlashAttn(OperationMetadata(softmax_scale=0.3, dropout_prob=0.5))
    found = operator(*QKV, softmax_scale=0.1, dropout_prob=0.0).attention_outputs
    np.testing.assert_array_equal(found, attest.flash_attention(*QKV, softmax_scale=0.1))
    with pytest.raises(ValueError, match="dropout_seed: got None"):
        operator(*QKV)
    found = operator(*QKV, dropout_seed=3).attention_outputs
    want = attest.flash_attention(*QKV, softmax_scale=0.3, dropout_prob=0.5, dropout_seed=3)
    np.testing.assert_array_equal(found, want)


def test_dtypes_of_the_metadata():
    meta = OperationMetadata(runtime_dtype=jnp.bfloat16, runtime_softmax_dtype="bfloat16")
    bias = normal(1, 4, 40, 40)
    found = FlashAttn(meta)(*QKV, bias=bias).attention_outputs
    cast = [x.astype("bfloat16") for x in (*QKV, bias)]
    want = attest.flash_attention(*cast[:3], bias=cast[3], logits_dtype="bfloat16")
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype("float32"), want.astype("float32"))


def test_masks_and_segments_are_honoured_beside_a_bias():
    ids = jnp.repeat(jnp.arange(4), 10)[None].repeat(2, 0)
    mask = normal(2, 1, 40, 40) > 0
    options: Any = {
        "attention_mask": mask, "q_segment_ids": ids, "kv_segment_ids": ids, "bias": normal(1, 4, 40, 40),
    }  # fmt: skip
    found = FlashAttn()(*QKV, **options, cache_metadata=None, mode="train").attention_outputs
    np.testing.assert_array_equal(found, attest.flash_attention(*QKV, **options))
    with pytest.raises(TypeError, match="block_tables: no such argument"):
        FlashAttn()(*QKV, block_tables=ids)


def test_block_sizes_are_upper_hints_and_configs_are_exact():
    given = FlashAttentionConfig(config=xla.Config(xla.ChunkSizes(8, 8)))
    operator = FlashAttn(OperationMetadata(blocksize_q=16, blocksize_k=24))
    query, key, value = qkv(1, 300, 300, 1, 1, 8, 8)
    arguments = {"query": query, "key": key, "value": value}
    capped = operator._config(FlashAttention(), arguments)
    assert capped is not None
    assert capped.config.forward == xla.ChunkSizes(16, 24)
    assert FlashAttn(OperationMetadata(blocksize_q=4096))._config(FlashAttention(), arguments) is None
    configured = FlashAttn(OperationMetadata(blocksize_q=16, operation_configs={"flash_attn2": given}))
    assert configured._config(FlashAttention(), arguments) == given
    for found in (operator, configured, FlashAttn()):
        np.testing.assert_allclose(
            found(query, key, value).attention_outputs,
            attest.flash_attention(query, key, value),
            rtol=1e-5,
            atol=1e-5,
        )


def test_vanilla_attention_returns_its_weights():
    rng = jax.random.key(1)
    found = VanillaAttn(OperationMetadata(softmax_scale=0.2))(
        *QKV, causal=True, dropout_rng=rng, deterministic=False, dropout_prob=0.2
    )
    out, weights = xla.attention(
        *QKV, causal=True, softmax_scale=0.2, dropout_rng=rng, deterministic=False, dropout_prob=0.2
    )
    np.testing.assert_array_equal(found.attention_outputs, out)
    np.testing.assert_array_equal(found.attention_weights, weights)


def test_the_output_is_a_pytree():
    found = jax.jit(VanillaAttn())(*QKV)
    assert len(jax.tree.leaves(found)) == 2
    assert len(jax.tree.leaves(jax.jit(FlashAttn())(*QKV))) == 1
    gradient = jax.grad(lambda q: FlashAttn()(q, *QKV[1:]).attention_outputs.sum())(QKV[0])
    assert gradient.shape == QKV[0].shape


def test_the_registry():
    assert OperationRegistry.list_implementations() == ["flash_attn2", "vanilla"]
    assert OperationRegistry.get("flash_attn2") is FlashAttn
    assert (
        OperationRegistry.create("vanilla", requires_cache=False).get_impl_metadata().requires_cache is False
    )
    with pytest.raises(NoImplementationError, match="impl_name: got 'ring'; expected one of 'flash_attn2'"):
        OperationRegistry.get("ring")

    class Half(OperationImpl):
        @classmethod
        def get_impl_name(cls) -> tuple[str, ...]:
            return "half", "hälfte"

        def forward_gpu(self, x):
            return "gpu"

        def forward_native(self, x):
            return x / 2

    try:
        OperationRegistry.register(Half)
        operator: Any = OperationRegistry.create("hälfte")
        assert operator(3.0) == 1.5
        assert operator.forward_cuda(3.0) == "gpu"
    finally:
        for name in Half.get_impl_name():
            OperationRegistry._operators.pop(name)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"runtime_dtype": "int8"}, "runtime_dtype"),
        ({"dropout_prob": 2.0}, "dropout_prob"),
        ({"blocksize_q": 0}, "blocksize_q"),
        ({"platform": "metal"}, "platform"),
        ({"softmax_scale": "x"}, "softmax_scale"),
    ],
)
def test_malformed_metadata_is_refused(fields, name):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        OperationMetadata(**fields)


def test_metadata_of_another_class_is_refused():
    with pytest.raises(ValueError, match="metadata: got a SimpleNamespace"):
        FlashAttn(SimpleNamespace())  # pyright: ignore[reportArgumentType]
