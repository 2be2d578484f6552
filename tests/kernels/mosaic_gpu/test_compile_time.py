"""What keeps the compilation of the Hopper kernels short: few kernels, few loops, and nothing inferred.

Counts, not seconds: they are the same on every machine.
"""

import logging
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.experimental.mosaic.gpu import layout_inference

from attest.kernels.pallas.mosaic_gpu import BackwardBlocks, BackwardSizes, flash_attention
from tests.kernels.jaxprs import equations
from tests.kernels.mosaic_gpu.test_kernels import FUSED

SHAPE = (1, 256, 2)  # batch, length, heads
APART = BackwardSizes(
    backward_key=BackwardBlocks(step=64, stages=2, consumers=2, registers=(240, 24), joint=False)
)


def tensors(head_dim: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (jax.ShapeDtypeStruct((*SHAPE, head_dim), jnp.bfloat16),) * 3


def both_passes(options: dict[str, Any], *arrays: jax.Array) -> Any:
    out, pull = jax.vjp(partial(flash_attention, **options), *arrays)
    return pull(out)


def products(head_dim: int, options: dict[str, Any]) -> dict[str, int]:
    """The kernels of forward + backward, with how many products each has instructions for."""
    program = jax.make_jaxpr(partial(both_passes, options))(*tensors(head_dim))
    return {
        eqn.params["name"]: sum(it.primitive.name.startswith("wgmma_ref") for it in equations(eqn))
        for eqn in equations(program.jaxpr)
        if eqn.primitive.name == "mpmd_map"
    }


@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_have_one_copy_of_each_product_in_a_loop_and_in_a_repair(head_dim: int) -> None:
    """A first S and a last P V, and S and P V; S, dP and dS K; S, dP, P dO and dS Q: compared and not.

    In a repair S and P V; S, dP and dS K; for dkey S, dP and dS Q, and for dvalue S and P dO.
    """
    expected = {"flash_forward": 2 + 2 * 2, "flash_backward_query": 2 * 3, "flash_backward_key": 2 * 4}
    repairs = {"flash_forward": 2, "flash_backward_query": 3, "flash_backward_key": 5}
    found = products(head_dim, {"causal": True, "bwd_params": APART})
    assert found == {it: expected[it] + repairs[it] for it in expected}


def test_launches_that_repair_have_one_copy_of_each_product() -> None:
    found = products(64, {"causal": True, "bwd_params": FUSED})
    repairs = {name: count for name, count in found.items() if name.startswith("flash_repair")}
    assert repairs == {"flash_repair_query": 3, "flash_repair_key": 5}


@pytest.mark.parametrize("options", [{}, {"causal": True, "logits_soft_cap": 9.0}], ids=["plain", "capped"])
def test_mosaic_infers_no_layouts(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def infer(*_: Any, **__: Any) -> None:
        raise AssertionError("Mosaic infers layouts, which takes most of the time of lowering")

    monkeypatch.setattr(layout_inference, "infer_layout", infer)
    run = jax.jit(partial(both_passes, options))
    export.export(run, platforms=["cuda"])(*tensors(64))


@pytest.mark.parametrize("options", [{"causal": True}, {"sliding_window": (70, 0)}, {"chunk_size": 64}])
def test_tracing_compiles_nothing(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        jax.jit(partial(both_passes, options)).trace(*tensors(64))
    assert not [it for it in caplog.messages if it.startswith("Compiling")]
