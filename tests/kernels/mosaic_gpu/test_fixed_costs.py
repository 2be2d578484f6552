"""What a call of the Hopper forward kernel costs beside its products: launches, loads and comparisons."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attest.kernels.pallas.mosaic_gpu import Blocks, flash_attention, flash_attention_with_lse
from attest.kernels.pallas.mosaic_gpu.bodies.forward import first_compared
from tests.kernels.mosaic_gpu.test_scratch import changed, spec, with_pairs

FEW = Blocks(k=64, stages=2, consumers=1, registers=(240, 24), partial_sums=True, programs=132)


def program_of(call: Any, shape: tuple[int, ...], keys: tuple[int, ...], **options: Any) -> str:
    query, key = (jnp.zeros(shape, "bfloat16") for shape in (shape, keys))
    run = jax.jit(lambda query, key: call(query, key, key, **options))
    return export.export(run, platforms=["cuda"])(query, key).mlir_module()


def types_of(program: str) -> tuple[str, str]:
    """The types of what the first kernel takes, and of what it returns."""
    line = next(line for line in program.splitlines() if "mosaic_gpu_v2" in line)
    before, results = line.rsplit("->", 1)
    return before.rsplit(" : (", 1)[1], results


@pytest.mark.parametrize(
    ("queries", "options", "moved"),
    [
        (1, {}, False),
        (1, {"causal": True}, False),
        (2, {}, True),
        (1, {"kv_end": np.full((40, 1), 90, np.int32)}, True),
    ],
)
def test_the_heads_of_one_query_are_read_where_they_are(
    queries: int, options: dict[str, Any], moved: bool
) -> None:
    """A repair, which follows where pairs may be hidden, reads them as rows."""
    program = program_of(flash_attention, (40, queries, 8, 128), (40, 130, 2, 128), **options)
    assert ("stablehlo.transpose" in program) == moved


@pytest.mark.parametrize(("batch", "whole"), [(40, True), (1, False)])
def test_the_kernel_stores_out_itself_where_one_program_takes_all_keys(batch: int, whole: bool) -> None:
    """Of parts, out is float32 sums."""
    program = program_of(
        flash_attention, (batch, 1, 8, 128), (batch, 700, 2, 128), fwd_params=replace(FEW, programs=8)
    )
    assert ("bf16" in types_of(program)[1]) == whole


def test_sinks_of_one_query_are_added_to_its_sums() -> None:
    """The kernel has a sink for each head, and rows of several heads."""
    program = program_of(
        flash_attention_with_lse,
        (140, 1, 8, 128),
        (140, 130, 2, 128),
        softmax_aux=jnp.zeros((8, 1), jnp.float32),
    )
    assert "bf16" not in types_of(program)[1]


def test_a_persistent_kernel_of_a_tile_for_each_program_has_no_schedule() -> None:
    """A launch without one begins sooner: it loads nothing before its first tile."""
    shape = (1, 256, 2, 64)
    for programs, schedules in ((3, 1), (4, 0), (5, 0)):
        blocks = Blocks(64, 2, 2, registers=(240, 24), partial_sums=True, programs=programs)
        operands, _ = types_of(program_of(flash_attention, shape, shape, causal=True, fwd_params=blocks))
        assert operands.count("xi32>") == schedules


@pytest.mark.parametrize(
    ("span", "compared"),
    [((0, 0, 4, 4), False), ((2, 2, 3, 4), False), ((0, 1, 3, 4), True), ((2, 2, 2, 4), True)],
)
def test_a_full_first_block_is_not_compared_where_ranges_say_so(
    span: tuple[int, int, int, int], compared: bool
) -> None:
    it = changed(spec(128), visibility={"segments": True})
    assert bool(first_compared(it, span)) == compared


def test_the_first_block_is_compared_always_or_never_where_no_range_says_it() -> None:
    span = 0, 0, 4, 4
    assert first_compared(spec(128), span) is False
    assert first_compared(changed(spec(128), visibility={"causal": True}), span) is True
    assert first_compared(changed(with_pairs(128), visibility={"segments": True}), span) is True
    capped = changed(spec(128), visibility={"segments": True}, logits={"cap": 2.0})
    assert first_compared(capped, span) is True
