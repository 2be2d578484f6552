"""One launch for the gradients of few tiles: when there is one, and that bits are those of two launches."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.kernels.pallas.mosaic_gpu import BackwardBlocks, BackwardSizes, flash_attention
from attest.kernels.pallas.mosaic_gpu.blocks import choose_backward, rounds
from attest.kernels.pallas.mosaic_gpu.candidates import chosen
from attest.kernels.pallas.mosaic_gpu.joint import choose_query_blocks, is_joint
from tests.kernels.mosaic_gpu.test_kernels import launches, lowered, needs_hopper, tensors
from tests.kernels.mosaic_gpu.test_key_heads import abstract

KEY = BackwardBlocks(step=64, stages=2, consumers=2, registers=(240, 24))
QUERY = replace(KEY, ping_pong=True)
THREE = replace(QUERY, consumers=3, registers=(160, 32))
APART, JOINT = ["flash_backward_key", "flash_backward_query"], ["flash_backward_joint"]


def sizes(key: BackwardBlocks, query: BackwardBlocks | None = QUERY) -> dict[str, Any]:
    return {"bwd_params": BackwardSizes(backward_key=key, backward_query=query)}


@pytest.mark.parametrize(
    ("shape", "options", "joint"),
    [
        # Batch, queries, keys, heads, key heads, head dim. Measured on an H200: docs/log/hopper.md.
        ((4, 128, 128, 8, 8, 64), {"causal": True}, True),  # 32 programs of each kernel
        ((1, 1536, 1536, 16, 16, 64), {}, True),  # 384 programs take three rounds, and twice 192 take four
        ((1, 1024, 1024, 16, 16, 64), {"causal": True}, True),
        ((8, 1024, 1024, 16, 16, 64), {"causal": True}, False),
        ((2, 1024, 1024, 16, 16, 128), {"causal": True}, False),
        ((2, 1024, 1024, 24, 24, 128), {}, False),  # six rounds either way
        ((2, 300, 300, 8, 8, 256), {"causal": True}, False),  # two warpgroups share keys
    ],
)
def test_few_tiles_of_both_kernels_are_in_one_launch(
    shape: Any, options: dict[str, Any], joint: bool
) -> None:
    call = abstract(*shape, **options)
    backward = chosen(call).backward
    assert backward is not None
    assert backward.backward_key is not None
    assert backward.backward_query is not None
    assert is_joint(call, backward.backward_key, backward.backward_query) == joint


@given(st.integers(1, 9), st.integers(1, 3000), st.integers(1, 24), st.sampled_from([64, 80, 96, 128]))
def test_blocks_of_queries_suit_one_launch_only_where_there_is_one(
    batch: int, length: int, heads: int, head_dim: int
) -> None:
    call = abstract(batch, length, length, heads, heads, head_dim, causal=True)
    apart = choose_query_blocks(call, replace(KEY, joint=False))
    found = choose_query_blocks(call, KEY)
    assert found == apart or is_joint(call, KEY, found)
    assert is_joint(call, replace(KEY, joint=True), choose_query_blocks(call, replace(KEY, joint=True)))


@pytest.mark.parametrize(
    ("joint", "query", "kernels"),
    [(True, QUERY, JOINT), (False, QUERY, APART), (None, QUERY, JOINT), (None, THREE, APART)],
)
def test_the_form_may_be_chosen(joint: bool | None, query: BackwardBlocks, kernels: list[str]) -> None:
    program = lowered(tensors(64), {"causal": True, **sizes(replace(KEY, joint=joint), query)})
    assert sorted(set(launches(program)) - {"flash_forward"}) == kernels


def test_one_launch_of_unlike_programs_is_refused() -> None:
    words = r"bwd_params\.backward_key\.joint: got True with 2 consumers beside 3; expected False, or as many"
    with pytest.raises(ValueError, match=words):
        lowered(tensors(64), sizes(replace(KEY, joint=True), THREE))
    with pytest.raises(ValueError, match=r"BackwardBlocks\.joint: got separate True"):
        replace(KEY, joint=True, separate=True)


@pytest.mark.parametrize(
    ("tiles", "full", "bounded"), [(1, 1, 1), (132, 1, 1), (198, 2, 1.5), (265, 3, 265 / 132)]
)
def test_rounds_are_whole_where_tiles_are_equally_long(tiles: int, full: float, bounded: float) -> None:
    assert (rounds(tiles, ["full"]), rounds(tiles, ["bounds"])) == (full, bounded)


@pytest.mark.parametrize(("length", "heads", "consumers"), [(1024, 32, 2), (2048, 32, 2), (8064, 22, 3)])
def test_blocks_of_queries_waste_few_rows_and_fill_rounds(length: int, heads: int, consumers: int) -> None:
    blocks = choose_backward("backward_query", 128, 128, ["full"], queries=length, heads=heads)
    assert blocks.consumers == consumers


def gradients(shape: Any, key: BackwardBlocks, hidden: float, **options: Any) -> Any:
    """Out and the gradients of a causal call whose last key, which only the last query sees, is `hidden`."""
    batch, length, heads, shared, head_dim = shape
    keys = jax.random.split(jax.random.key(length), 4)
    query, cotangent = (
        jax.random.normal(it, (batch, length, heads, head_dim), jnp.bfloat16) for it in keys[:2]
    )
    k, v = (jax.random.normal(it, (batch, length, shared, head_dim), jnp.bfloat16) for it in keys[2:])
    k = k.at[:, -1].set(hidden)

    @jax.jit
    def run(*arrays: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *it: flash_attention(*it, causal=True, **options, **sizes(key)), *arrays)
        return out, pull(cotangent)

    return jax.tree.leaves(run(query, k, v))


@needs_hopper
@pytest.mark.parametrize("hidden", [0.5, np.nan], ids=["finite", "NaN"])
@pytest.mark.parametrize("shape", [(1, 200, 2, 2, 64), (2, 640, 6, 2, 128), (1, 1000, 8, 1, 96)])
def test_bits_are_those_of_two_launches(shape: Any, hidden: float) -> None:
    found, expected = (gradients(shape, replace(KEY, joint=it), hidden) for it in (True, False))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))
        assert np.isfinite(np.asarray(a[:, :-1], np.float32)).all() or np.isnan(hidden)
