"""S22: what a policy of `jax.checkpoint` saves by its name, a gradient does not compute again."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest import flash_attention
from attest.kernels import xla
from attest.kernels.contract import Implementation
from attest.kernels.implementations import MOSAIC_GPU, PALLAS_TPU, TRITON, XLA
from attest.kernels.triton.target import recorded
from tests.kernels.interpreted import needs_compiler
from tests.kernels.kernel_cases import normal, qkv

pytestmark = needs_compiler

NAMES = ("flash_attention_out", "flash_attention_lse")
KEEPS = jax.checkpoint_policies.save_only_these_names(*NAMES)
IN_BLOCKS: dict[str, Any] = {"fwd_params": xla.ChunkSizes(16, 12), "bwd_params": xla.ChunkSizes(12, 17)}
OPTIONS = {"causal": True, "softmax_aux": normal(4, 1)}


def counted(implementation: Implementation) -> Implementation:
    """The implementation, with a forward pass that a jaxpr shows as one operation of this name."""
    passes = implementation.load()

    def forward_pass(*arguments: Any) -> Any:
        return passes.forward(*arguments)

    named = replace(passes, forward=jax.jit(forward_pass, static_argnums=0))
    return replace(implementation, load=lambda: named)


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params):
            if hasattr(parameter, "eqns"):
                yield from equations(parameter)


def forward_passes(function: Any, *arrays: jax.Array) -> int:
    with recorded("sm_90"):  # So that Triton kernels can be traced without a GPU.
        jaxpr = jax.make_jaxpr(function)(*arrays).jaxpr
    return sum(equation.params.get("name") == "forward_pass" for equation in equations(jaxpr))


def gradients(policy: Any, implementation: Implementation, options: dict[str, Any]) -> Any:
    def block(*arrays: jax.Array) -> jax.Array:
        return flash_attention(*(2 * x for x in arrays), platform=implementation, **options).astype("float32")

    return jax.grad(lambda *arrays: jnp.sin(jax.checkpoint(block, policy=policy)(*arrays)).sum(), (0, 1, 2))


@pytest.mark.parametrize(
    ("implementation", "dtype", "options"),
    [
        pytest.param(XLA, "float32", OPTIONS, id="xla in one piece"),
        pytest.param(XLA, "float32", OPTIONS | IN_BLOCKS, id="xla"),
        pytest.param(PALLAS_TPU, "float32", OPTIONS, id="pallas_tpu"),
        pytest.param(TRITON, "float32", OPTIONS, id="triton"),
        pytest.param(MOSAIC_GPU, "bfloat16", OPTIONS, id="mosaic_gpu"),
    ],
)
def test_the_forward_pass_runs_once_if_its_results_are_saved(
    implementation: Implementation, dtype: str, options: dict[str, Any]
) -> None:
    run = partial(gradients, implementation=counted(implementation), options=options)
    arrays = qkv(dtype=dtype)
    assert forward_passes(run(KEEPS), *arrays) == 1
    assert forward_passes(run(None), *arrays) == 2
    # One of the names is not enough.
    alone = [jax.checkpoint_policies.save_only_these_names(name) for name in NAMES]
    assert [forward_passes(run(policy), *arrays) for policy in alone] == [2, 2]


@pytest.mark.parametrize("options", [OPTIONS, OPTIONS | IN_BLOCKS], ids=["in one piece", "in blocks"])
def test_gradients_do_not_depend_on_what_is_saved(options: dict[str, Any]) -> None:
    arrays = qkv()
    for got, want in zip(
        jax.jit(gradients(KEEPS, XLA, options))(*arrays),
        jax.jit(gradients(None, XLA, options))(*arrays),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
