"""Calls with few queries: packed heads and sums in parts give what the call gives as it is."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.kernels import xla
from attest.kernels.call.call import Call, check_call
from attest.kernels.few_queries import finish, pack_heads
from attest.kernels.numerics.exponents import LOG2E
from attest.kernels.numerics.partial import Partial, merge_sums
from attest.kernels.pallas.mosaic_gpu.blocks import choose_parts
from attest.kernels.visibility.intervals import Rows, describe_rows, visible_tile

BATCH, Q, K, K_HEADS, GROUP, DIM = 2, 3, 50, 2, 3, 8
HEADS = K_HEADS * GROUP
RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


QUERY, KEY, VALUE = normal(BATCH, Q, HEADS, DIM), normal(BATCH, K, K_HEADS, DIM), normal(BATCH, K, K_HEADS, 5)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"sliding_window": (9, 0)},
    "cap": {"logits_soft_cap": 1.5, "softmax_scale": 2.0},
    "offsets": {"causal": True, "q_offset": np.array([-2, 20], np.int32)},
    "positions": {"causal": True, "q_positions": np.array([[5, 1, 70]], np.int32)},
    "ranges": {
        "kv_start": np.array([[0, 7, 30]]),
        "kv_end": np.array([[50, 9, 50], [3, 7, 31]]),
        "causal": True,
    },
    "chunks": {"chunk_size": 9, "q_offset": np.array([-2, 20], np.int32)},
    "lengths": {
        "cum_seqlens_q": np.array([0, 3, 5], np.int32),
        "cum_seqlens_k": np.array([0, 31, 31], np.int32),
        "softmax_aux": normal(HEADS, 2),
    },
    "segments": {
        "q_segment_ids": np.array([[0, 1, -1], [2, 0, 5]], np.int32),
        "kv_segment_ids": np.sort(RNG.integers(0, 3, (BATCH, K)), axis=1).astype(np.int32),
    },
    "mask of heads": {"attention_mask": RNG.random((BATCH, HEADS, Q, K)) < 0.3},
    "mask of all heads": {"attention_mask": RNG.random((1, 1, Q, K)) < 0.3},
    "mask of keys": {"attention_mask": RNG.random((BATCH, 1, 1, K)) < 0.3},
    "mask of keys, of heads": {"attention_mask": RNG.random((BATCH, HEADS, 1, K)) < 0.3},
    "mask of rows, of heads": {"attention_mask": RNG.random((1, HEADS, Q, 1)) < 0.6},
    "bias of heads, all rows": {"bias": normal(1, HEADS, 1, K)},
    "bias of all heads": {"bias": normal(BATCH, 1, Q, K)},
    "bias of all heads and rows": {"bias": jnp.where(normal(1, 1, 1, K) < 0, -jnp.inf, 0.0)},
    "shared sinks": {"softmax_aux": normal(1, 2), "attention_mask": np.zeros((1, 1, Q, K), bool)},
    "sinks that are -inf": {"softmax_aux": jnp.full((1, 2), -jnp.inf), "q_offset": -9, "causal": True},
    "huge logits": {"softmax_scale": 1e6},
}


def partial_sums(call: Call, rows: Rows, edges: list[int]) -> Partial:
    """What a kernel would return of keys between the edges, a part after the other."""
    group = call.query.shape[2] // call.key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (call.key, call.value))
    logits = jnp.einsum("bqhd,bkhd->bhqk", call.query, key, precision="highest") * call.softmax_scale
    logits = logits if call.bias is None else logits + call.bias
    if call.logits_soft_cap is not None:
        logits = call.logits_soft_cap * jnp.tanh(logits / call.logits_soft_cap)
    visible = visible_tile(
        jnp.arange(call.key.shape[1]),
        *(None if x is None else x[:, None] for x in (rows.first, rows.last)),
        *(None if x is None else x[:, None] for x in (call.q_segment_ids, call.kv_segment_ids)),
        call.attention_mask,
        call.bias,
    )
    bits = logits * LOG2E if visible is None else jnp.where(visible, logits * LOG2E, -jnp.inf)
    sums: list[Partial] = []
    for begin, end in pairwise(edges):
        here = bits[..., begin:end]
        reference = here.max(axis=-1)
        p = jnp.exp2(here - jnp.where(reference == -jnp.inf, 0.0, reference)[..., None])
        total = jnp.einsum("bhqk,bkhd->bhqd", p, value[:, begin:end], precision="highest")
        sums.append(Partial(total, p.sum(axis=-1), reference))
    return Partial(*(jnp.stack(x) for x in zip(*sums, strict=True)))


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_heads_and_merged_parts_are_the_call_itself(name: str) -> None:
    call = check_call(QUERY, KEY, VALUE, **OPTIONS[name])
    packed, rows = pack_heads(call, describe_rows(call))
    assert packed.query.shape == (BATCH, GROUP * Q, K_HEADS, DIM)
    out, lse = xla.flash_attention_with_lse(QUERY, KEY, VALUE, **OPTIONS[name])
    padding = describe_rows(call).padding
    rows_with_lse = np.ones((BATCH, Q), bool) if padding is None else ~np.asarray(padding)
    kept = np.broadcast_to(rows_with_lse[:, None], lse.shape)
    for edges in ([0, K], [0, 16, 32, 48, K], [0, 1, 49, K]):
        found = finish(partial_sums(packed, rows, edges), call, jnp.float32)
        np.testing.assert_allclose(found.out, out, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(found.lse[kept], lse[kept], rtol=2e-6, atol=2e-6)


def test_what_restricts_no_row_is_dropped() -> None:
    """Without a bound a kernel compares nothing; causal order of one query is none."""
    one = check_call(QUERY[:, :1], KEY, VALUE, causal=True)
    assert pack_heads(one, describe_rows(one))[1] == Rows(None, None, None)
    several = check_call(QUERY, KEY, VALUE, causal=True)
    assert pack_heads(several, describe_rows(several))[1].last is not None


def test_packed_heads_draw_where_the_call_stands_in_the_whole() -> None:
    origin = (1, 2, 3, 8)
    call = check_call(QUERY, KEY, VALUE, dropout_prob=0.5, dropout_seed=7, origin=origin)
    packed = pack_heads(call, describe_rows(call))[0]
    assert packed.positions.origin is not None
    assert tuple(packed.positions.origin) == origin


def test_values_that_are_not_finite_stay_so_where_they_are_seen() -> None:
    call = check_call(QUERY, KEY, VALUE.at[0, 40, 0].set(jnp.inf))
    packed, rows = pack_heads(call, describe_rows(call))
    out = finish(partial_sums(packed, rows, [0, 20, K]), call, jnp.float32).out
    assert not np.isfinite(out[0, :, :GROUP]).any()
    assert np.isfinite(out[0, :, GROUP:]).all()
    assert np.isfinite(out[1]).all()


def test_a_part_that_a_row_does_not_see_has_no_weight() -> None:
    sums = jnp.array([1.0, 0.0])[:, None, None, None]
    reference = jnp.array([0.0, -jnp.inf])[:, None, None, None]
    merged = merge_sums(Partial(jnp.repeat(sums[..., None], 4, axis=-1), sums, reference))
    np.testing.assert_array_equal(merged.total[0, 0, 0, 0], np.ones(4))
    assert merged.norm.item() == 1.0
    assert merged.reference.item() == 0.0


@given(st.integers(1, 2000), st.integers(1, 3000), st.integers(1, 300))
def test_parts_are_equal_but_for_a_last_one_that_is_not_empty(
    tiles: int, k_blocks: int, programs: int
) -> None:
    parts = choose_parts(tiles, k_blocks, programs)
    each = -(-k_blocks // parts)
    assert 1 <= parts <= k_blocks
    assert (parts - 1) * each < k_blocks


def test_parts_are_cut_where_programs_would_be_idle() -> None:
    assert choose_parts(tiles=32, k_blocks=256, programs=132) >= 4
    assert choose_parts(tiles=132, k_blocks=256, programs=132) == 1
    assert choose_parts(tiles=1, k_blocks=1, programs=132) == 1
