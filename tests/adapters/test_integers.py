"""S20: adapters check integers as they were given, before anything narrows them to 32 bits."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attest.kernels.adapters import (
    ejkernel,
    flash_attention,
    jax_gpu_mha,
    jax_nn,
    jax_tpu_splash,
    onnx,
    tokamax,
)
from attest.kernels.adapters.shared import as_mask
from tests.adapters.tokamax_masks import CausalMask, Mask
from tests.kernels.integers import Case, aliases, check_makes_a_difference, check_taken_as_given

pytestmark = pytest.mark.found_outside

B, SQ, SK, HQ = 2, 5, 7, 2
RNG = np.random.default_rng(0)
QKV = tuple(RNG.standard_normal((B, length, HQ, 4)).astype("f") for length in (SQ, SK, SK))
SELF = tuple(RNG.standard_normal((B, SQ, HQ, 4)).astype("f") for _ in range(3))
PACKED = tuple(x.reshape(-1, HQ, 4) for x in QKV)
STARTS = (np.array([0, 4, 9], np.int32), np.array([0, 5, 12], np.int32))

of_jax = partial(jax_nn.dot_product_attention, *QKV)
of_flash = partial(flash_attention.flash_attn_func, *QKV)
in_cache = partial(flash_attention.flash_attn_with_kvcache, *QKV)
of_tokamax = partial(tokamax.dot_product_attention, *QKV)
op_of_tokamax = partial(tokamax.attention_op, *QKV)
of_ejkernel = partial(ejkernel.flash_attention, *SELF)
ring_of_ejkernel = partial(ejkernel.ring_attention, *SELF)
splash = jax_tpu_splash.make_splash_mha_single_device(np.ones((HQ, SQ, SQ), bool))


def of_onnx(**options: Any) -> Any:
    return onnx.attention(*(x.swapaxes(1, 2) for x in QKV), **options).Y


def of_splash(q_ids: Any) -> Any:
    """The keys have ids of the dtype of the queries' ids."""
    ids = SimpleNamespace(q=q_ids, kv=KEY_IDS[1].astype(q_ids.dtype))
    return splash(*(x[1].swapaxes(0, 1) for x in SELF), ids)


def packed(starts_q: Any = STARTS[0], starts_k: Any = STARTS[1], **options: Any) -> Any:
    return flash_attention.flash_attn_varlen_func(*PACKED, starts_q, starts_k, 5, 7, **options)


def limited(**limits: Any) -> Any:
    nothing = dict.fromkeys(("bool_mask", "causal_mask", "q_start", "q_end", "k_start", "k_end"))
    return op_of_tokamax(mask=Mask(**{**nothing, **limits}))


LENGTHS = np.array([3, 4])
MASK = np.ones((1, 1, SQ, SQ), int)
MASK[0, 0, 1, 2] = 0
PLACES = np.arange(B * SQ).reshape(B, SQ) % SQ
IDS, KEY_IDS = np.ones((B, SQ), int), 1 + np.arange(B * SQ).reshape(B, SQ) % 2
CASES: dict[str, Case] = {
    "jax.nn, query_seq_lengths": Case(
        "query_seq_lengths", lambda x: of_jax(query_seq_lengths=x), LENGTHS, at=(1,)
    ),
    "jax.nn, key_value_seq_lengths": Case(
        "key_value_seq_lengths", lambda x: of_jax(key_value_seq_lengths=x), LENGTHS, at=(1,)
    ),
    "jax.nn, local_window_size": Case("local_window_size", lambda x: of_jax(local_window_size=x), 1, 100),
    "a mask of Flax and Equinox": Case("mask", lambda x: as_mask("mask", x, 4), MASK, 1, 1, (0, 0, 1, 2)),
    "FlashAttention, window_size": Case("window_size", lambda x: of_flash(window_size=(x, 0)), 1, 100),
    "FlashAttention, attention_chunk": Case("attention_chunk", lambda x: of_flash(attention_chunk=x), 2, 100),
    "FlashAttention, cu_seqlens_q": Case("cu_seqlens_q", lambda x: packed(starts_q=x), STARTS[0], at=(1,)),
    "FlashAttention, cu_seqlens_k": Case("cu_seqlens_k", lambda x: packed(starts_k=x), STARTS[1], at=(1,)),
    "FlashAttention, seqused_k": Case("seqused_k", lambda x: packed(seqused_k=x), LENGTHS, at=(1,)),
    "FlashAttention, cache_seqlens": Case(
        "cache_seqlens", lambda x: in_cache(cache_seqlens=x), LENGTHS, at=(1,)
    ),
    "FlashAttention, one cache_seqlens": Case("cache_seqlens", lambda x: in_cache(cache_seqlens=x), 3),
    "FlashAttention, cache_leftpad": Case(
        "cache_leftpad", lambda x: in_cache(cache_leftpad=x), LENGTHS, at=(1,)
    ),
    "ONNX, nonpad_kv_seqlen": Case(
        "nonpad_kv_seqlen", lambda x: of_onnx(nonpad_kv_seqlen=x), LENGTHS, at=(1,)
    ),
    "ONNX, left_window_size": Case("left_window_size", lambda x: of_onnx(left_window_size=x), 1, 100),
    "ONNX, right_window_size": Case("right_window_size", lambda x: of_onnx(right_window_size=x), 1, 100),
    "mha, segment_ids": Case("segment_ids", lambda x: jax_gpu_mha.mha(*SELF, x), IDS, 9, -1, (1, 2)),
    "splash attention, segment_ids": Case("segment_ids.q", of_splash, IDS[1], 9, -1, (2,)),
    "tokamax, query_seq_lengths": Case(
        "query_seq_lengths", lambda x: of_tokamax(query_seq_lengths=x), LENGTHS, SQ, 0, (1,)
    ),
    "tokamax, key_value_seq_lengths": Case(
        "key_value_seq_lengths", lambda x: of_tokamax(key_value_seq_lengths=x), LENGTHS, SK, 0, (1,)
    ),
    "tokamax, local_window_size": Case(
        "local_window_size", lambda x: of_tokamax(local_window_size=(x, 1)), 1, 100, -100
    ),
    "tokamax, right side of a window": Case(
        "local_window_size", lambda x: of_tokamax(local_window_size=(1, x)), 1, 100, -100
    ),
    "tokamax, q_start": Case(
        "mask.q_start", lambda x: limited(q_start=x), np.full((B, 1, SK), 3), 100, 0, (1, 0, 2)
    ),
    "tokamax, q_end": Case(
        "mask.q_end", lambda x: limited(q_end=x), np.full((B, 1, SK), 3), 100, 0, (1, 0, 2)
    ),
    "tokamax, k_start": Case(
        "mask.k_start", lambda x: limited(k_start=x), np.full((B, 1, SQ), 3), 100, 0, (1, 0, 2)
    ),
    "tokamax, k_end": Case(
        "mask.k_end", lambda x: limited(k_end=x), np.full((B, 1, SQ), 3), 100, 0, (1, 0, 2)
    ),
    "tokamax, offset": Case("mask.offset", lambda x: op_of_tokamax(mask=CausalMask(x, None)), 1, 100, -100),
    "tokamax, window_size": Case(
        "mask.window_size", lambda x: op_of_tokamax(mask=CausalMask(3, x)), 2, 100, -100
    ),
    "tokamax, window_size beside an array": Case(
        "mask.window_size", lambda x: op_of_tokamax(mask=CausalMask(jnp.int32(3), x)), 2, 100, -100
    ),
    "tokamax, q_indices": Case(
        "q_indices",
        lambda x: op_of_tokamax(q_indices=x, is_causal=True),
        np.full((B, 1, SQ), 3),
        100,
        -100,
        (1, 0, 2),
    ),
    "tokamax, k_indices": Case(
        "k_indices",
        lambda x: op_of_tokamax(k_indices=x, is_causal=True),
        np.full((B, 1, SK), 3),
        100,
        -100,
        (1, 0, 2),
    ),
    "ejKernel, attention_mask": Case(
        "attention_mask", lambda x: of_ejkernel(attention_mask=x), MASK, 1, 1, (0, 0, 1, 2)
    ),
    "ejKernel, attention's attention_mask": Case(
        "attention_mask",
        lambda x: ejkernel.attention(*SELF, attention_mask=x)[0].astype("f"),
        MASK,
        1,
        1,
        (0, 0, 1, 2),
    ),
    "ejKernel, q_segment_ids": Case(
        "q_segment_ids", lambda x: of_ejkernel(q_segment_ids=x, kv_segment_ids=KEY_IDS), IDS, 9, -1, (1, 2)
    ),
    "ejKernel, ring's q_segment_ids": Case(
        "q_segment_ids",
        lambda x: ring_of_ejkernel(q_segment_ids=x, kv_segment_ids=KEY_IDS),
        IDS,
        9,
        -1,
        (1, 2),
    ),
    "ejKernel, ring's kv_segment_ids": Case(
        "kv_segment_ids",
        lambda x: ring_of_ejkernel(q_segment_ids=IDS, kv_segment_ids=x),
        KEY_IDS,
        9,
        -1,
        (1, 1),
    ),
    "ejKernel, a MaskInfo of its own": Case(
        "q_segment_ids",
        lambda x: of_ejkernel(
            mask_info=SimpleNamespace(_attention_mask=None, _q_segment_ids=x, _kv_segment_ids=KEY_IDS)
        ),
        IDS,
        9,
        -1,
        (1, 2),
    ),
    "ejKernel, q_offset": Case("q_offset", lambda x: of_ejkernel(q_offset=x, causal=True), 0, 100, -100),
    "ejKernel, sliding_window": Case("sliding_window", lambda x: of_ejkernel(sliding_window=x), 1, 100),
    "ejKernel, ring's sliding_window beside first keys": Case(
        "sliding_window", lambda x: ring_of_ejkernel(sliding_window=x, attention_sink_size=1), 1, 100
    ),
    "ejKernel, ring's q_offset beside first keys": Case(
        "q_offset",
        lambda x: ring_of_ejkernel(sliding_window=1, attention_sink_size=1, q_offset=x),
        1,
        100,
        -100,
    ),
    "ejKernel, attention_sink_size": Case(
        "attention_sink_size", lambda x: ring_of_ejkernel(sliding_window=1, attention_sink_size=x), 1, 100
    ),
    "ejKernel, q_position_ids": Case(
        "q_position_ids",
        lambda x: ring_of_ejkernel(q_position_ids=x, kv_position_ids=PLACES, causal=True),
        PLACES,
        100,
        -100,
        (1, 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=5)
@given(data=st.data())
def test_arguments_of_adapters(name: str, data: Any) -> None:
    check_taken_as_given(CASES[name], *data.draw(aliases(CASES[name])))


@pytest.mark.parametrize("name", CASES)
def test_what_the_entries_mean_differs(name: str) -> None:
    check_makes_a_difference(CASES[name])


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint32", "uint64"])
def test_lengths_of_any_dtype_that_the_array_has_count(dtype: str) -> None:
    got = of_jax(key_value_seq_lengths=LENGTHS.astype(dtype))
    np.testing.assert_array_equal(got, of_jax(key_value_seq_lengths=LENGTHS.astype(np.int32)))
