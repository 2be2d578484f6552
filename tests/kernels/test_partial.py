"""Unrounded results: they round to the ordinary ones, and those of parts of the keys merge to the whole's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import normal, qkv

from attest.kernels import triton, xla
from attest.kernels.arguments import check_call
from attest.kernels.cotangents import row_terms
from attest.kernels.implementation import Implementation, Settings
from attest.kernels.implementations import MOSAIC_GPU, PALLAS_TPU, TRITON, XLA
from attest.kernels.pallas import tpu
from attest.kernels.partial import merge_parts
from tests.kernels.interpreted import needs_compiler, needs_interpreter, run_interpreted
from tests.kernels.test_pallas_interpreter import needs_interpreter as needs_tpu_interpreter
from tests.kernels.test_pallas_interpreter import needs_none, run_in_interpreter


@dataclass(frozen=True)
class Kernel:
    """An implementation, its block sizes, and what jits a function of it."""

    implementation: Implementation
    sizes: Any
    jit: Callable[[Any], Any] = jax.jit

    def settings(self, unrounded: bool) -> Settings:
        passes = self.implementation.load()
        forward, backward = passes.check_forward(self.sizes), passes.check_backward(self.sizes)
        return Settings(forward, backward, True, passes.check_precision("highest"), "float32", unrounded)


def _interpreted(function: Any) -> Any:
    from attest.kernels.pallas.interpreter import interpreted

    def run(*arguments: Any) -> Any:
        with interpreted(1):
            return jax.jit(function)(*arguments)

    return run


kernels = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(Kernel(XLA, xla.ChunkSizes(16, 12)), id="xla", marks=needs_compiler),
        pytest.param(Kernel(XLA, None), id="xla in one piece", marks=needs_compiler),
        pytest.param(Kernel(TRITON, triton.BlockSizes(16, 16)), id="triton", marks=needs_interpreter),
        pytest.param(
            Kernel(PALLAS_TPU, tpu.BlockSizes(16, 16), _interpreted), id="tpu", marks=needs_tpu_interpreter
        ),
    ],
)


@needs_compiler
def test_triton_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


@needs_none
def test_tpu_in_a_process_of_its_own() -> None:
    run_in_interpreter(__file__)


def both_passes(kernel: Kernel, call: Any, unrounded: bool) -> dict[str, Any]:
    """out and the gradients of a call, the latter from terms that are those of the rounded out."""
    passes = kernel.implementation.load()
    rounded, settings = kernel.settings(False), kernel.settings(unrounded)

    def run(call: Any) -> dict[str, Any]:
        kept = passes.forward(rounded, call)
        d_out = normal(*kept.out.shape, dtype=kept.out.dtype)
        d_lse = normal(*kept.lse.shape, seed=2)
        terms = row_terms(call, *kept[:3], d_out, d_lse, True, hides=True)
        gradients = passes.backward(settings, call, terms, kept.kept)
        return {"out": passes.forward(settings, call).out} | gradients._asdict()

    return kernel.jit(run)(call)


@kernels
def test_unrounded_results_round_to_the_ordinary_ones(kernel: Kernel) -> None:
    """To the bit; and some bits are lost by it, so that they were not rounded before."""
    query, key, value = qkv(1, 20, 26, 2, 1, dtype="bfloat16")
    bias = normal(1, 2, 20, 26, dtype="bfloat16")
    call = check_call(query=query, key=key, value=value, bias=bias, causal=True)
    ordinary, unrounded = (both_passes(kernel, call, way) for way in (False, True))
    assert set(unrounded) == {"out", "query", "key", "value", "bias"}
    for name, x in unrounded.items():
        assert x.dtype == jnp.float32, name
        rounded = x.astype(jnp.bfloat16)
        np.testing.assert_array_equal(rounded, ordinary[name].astype(jnp.bfloat16), err_msg=name)
        assert (rounded.astype(jnp.float32) != x).any(), name


@kernels
def test_parts_merge_to_the_whole(kernel: Kernel) -> None:
    """Rows that see no key of a part, or of any, included."""
    query, key, value = qkv(1, 20, 26, 2, 1)
    offset = -3  # the first rows see no key
    passes, settings = kernel.implementation.load(), kernel.settings(True)

    def of_keys(keys: slice) -> Any:
        call = check_call(
            query=query, key=key[:, keys], value=value[:, keys], causal=True, q_offset=offset - keys.start
        )
        return kernel.jit(lambda call: passes.forward(settings, call)[:2])(call)

    whole = of_keys(slice(0, 26))
    parts = [of_keys(keys) for keys in (slice(0, 7), slice(7, 26))]
    merged = merge_parts(*(jnp.stack(x) for x in zip(*parts, strict=True)))
    for got, want in zip(merged, whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    rounded = [(out.astype(jnp.bfloat16).astype(jnp.float32), lse) for out, lse in parts]
    worse = merge_parts(*(jnp.stack(x) for x in zip(*rounded, strict=True)))[0]
    assert float(jnp.abs(worse - whole[0]).max()) > 1e-4


def test_a_part_that_a_row_does_not_see_counts_for_nothing() -> None:
    """Whatever is stored there."""
    outs = jnp.array([[[[[1.0]], [[jnp.nan]]]], [[[[3.0]], [[jnp.inf]]]]])
    lses = jnp.log(jnp.array([[[[1.0, 0.0]]], [[[3.0, 0.0]]]]))
    out, lse = merge_parts(outs, lses)
    np.testing.assert_allclose(out[0, :, 0, 0], [2.5, 0.0], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], [np.log(4.0), -np.inf], rtol=1e-6)


def test_the_hopper_kernels_refuse_by_name() -> None:
    query, key, value = qkv(head_dim=64, value_dim=64, dtype="bfloat16")
    call = check_call(query=query, key=key, value=value)
    settings = Kernel(MOSAIC_GPU, None).settings(True)
    with pytest.raises(NotImplementedError, match="mosaic_gpu: rounds its results"):
        MOSAIC_GPU.load().forward(settings, call)
