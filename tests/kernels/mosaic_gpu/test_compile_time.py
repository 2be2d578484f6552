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

from attest.kernels.pallas.mosaic_gpu import flash_attention
from tests.kernels.jaxprs import equations

SHAPE = (1, 256, 2)  # batch, length, heads


def tensors(head_dim: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (jax.ShapeDtypeStruct((*SHAPE, head_dim), jnp.bfloat16),) * 3


def both_passes(options: dict[str, Any], *arrays: jax.Array) -> Any:
    out, pull = jax.vjp(partial(flash_attention, **options), *arrays)
    return pull(out)


def products(head_dim: int, options: dict[str, Any]) -> list[tuple[str, int]]:
    """The kernels of both passes that repair, with how many products each has instructions for."""
    program = jax.make_jaxpr(partial(both_passes, options))(*tensors(head_dim))
    return [
        (eqn.params["name"], sum(it.primitive.name.startswith("wgmma_ref") for it in equations(eqn)))
        for eqn in equations(program.jaxpr)
        if str(eqn.params.get("name")).startswith("flash_repair")
    ]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_repair_kernels_have_one_copy_of_each_product(head_dim: int) -> None:
    """S and P V; S, dP and dS K; for dkey S, dP and dS Q, and for dvalue S and P dO."""
    found = products(head_dim, {"causal": True})
    assert found == [("flash_repair_out", 2), ("flash_repair_query", 3), ("flash_repair_key", 5)]


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
