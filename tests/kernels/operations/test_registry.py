"""The registry of kernels, and what platforms and backends mean."""

import jax.numpy as jnp
import numpy as np
import pytest

from attest import flash_attention
from attest.kernels.operations import (
    Backend,
    FlashAttention,
    FlashAttentionConfig,
    NoImplementationError,
    Platform,
    detect_platform,
    kernel_registry,
)
from attest.kernels.operations.registry import KernelRegistry
from tests.kernels.kernel_cases import qkv


def test_our_kernels_are_there():
    assert kernel_registry.list_algorithms() == ["attention", "flash_attention"]
    found = [(x.platform, x.backend) for x in kernel_registry.list_implementations("flash_attention")]
    assert found == [("pallas", "gpu"), ("triton", "gpu"), ("pallas", "tpu"), ("xla", "any")]
    assert detect_platform("flash_attention") is Platform.XLA
    assert detect_platform("flash_attention", "triton") is Platform.TRITON
    assert detect_platform("attention", "auto") is Platform.XLA


def test_get_returns_the_kernel_that_runs_here():
    query, key, value = qkv(1, 5, 6, 2, 1, 4, 4)
    for where in ({}, {"platform": "xla"}, {"backend": "cpu"}, {"platform": "auto", "backend": Backend.ANY}):
        kernel = kernel_registry.get("flash_attention", **where)
        np.testing.assert_array_equal(kernel(query, key, value), flash_attention(query, key, value))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("flash_attention", "pallas", "cpu"), ["'pallas'", "'cpu'", "triton on gpu"]),
        (("attention", "triton"), ["'triton'", "xla on any"]),
        (("flash_attention", "metal"), ["'metal'", "'pallas'"]),
        (("paged_attention",), ["'paged_attention'", "'flash_attention'"]),
    ],
)
def test_what_is_missing_names_what_exists(arguments, names):
    with pytest.raises(NoImplementationError) as error:
        kernel_registry.get(*arguments)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, NotImplementedError)
    assert all(name in str(error.value) for name in names)


def test_a_kernel_is_registered_by_a_decorator_and_found_by_priority():
    registry = KernelRegistry()

    @registry.register("sum", "xla", "any")
    def slow(x):
        return x.sum()

    @registry.register("sum", Platform.XLA, Backend.CPU, priority=1)
    def fast(x):
        return jnp.sum(x)

    assert registry.get("sum") is fast
    assert registry.get("sum", backend="gpu") is slow
    with pytest.raises(NoImplementationError, match="backend: got 'npu'"):
        registry.register("sum", "xla", "npu")


def test_the_operation_runs_what_is_registered_for_its_platform(monkeypatch):
    """A kernel that somebody adds with a higher priority is the one that the platform means."""
    monkeypatch.setattr(kernel_registry, "_kernels", list(kernel_registry._kernels))

    @kernel_registry.register("flash_attention", "xla", "any", priority=9)
    def zeros(query, key, value, **options):
        return jnp.zeros_like(query)

    operation = FlashAttention()
    assert operation.get_impl(FlashAttentionConfig(platform="xla")) is zeros
    query, key, value = qkv(1, 5, 6, 2, 1, 4, 4)
    assert not operation.run(query, key, value, cfg=FlashAttentionConfig(platform="xla")).any()
    assert operation.run(query, key, value, cfg=FlashAttentionConfig()).any()
