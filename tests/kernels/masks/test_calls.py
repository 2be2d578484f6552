"""Calls that take a MaskInfo: what it says and what the other arguments say, together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest import flash_attention, flash_attention_with_lse
from attest.kernels.operations import MaskInfo
from attest.kernels.xla import attention
from tests.kernels.kernel_cases import normal

BATCH, Q, K, HEADS = 2, 5, 7, 2
QUERY, KEY, VALUE = normal(BATCH, Q, HEADS, 8), normal(BATCH, K, 1, 8, seed=2), normal(BATCH, K, 1, 8, seed=3)
MASK = np.random.default_rng(4).random((BATCH, 1, Q, K)) < 0.6
SEGMENTS = (
    np.array([[0, 0, 1, 1, -1], [0, 1, 1, 1, 1]]),
    np.array([[0, 0, 0, 1, 1, 1, -1], [0] * 3 + [1] * 4]),
)
LENGTHS = MaskInfo().apply_kv_lengths(jnp.array([3, 6]))
PLACES = np.arange(K)[None, ::-1]

# A MaskInfo and other arguments, and the MaskInfo that says all of it.
TOGETHER: dict[str, tuple[MaskInfo, dict[str, Any], MaskInfo]] = {
    "causal": (LENGTHS, {"causal": True}, LENGTHS.apply_causal()),
    "NumPy's causal": (LENGTHS, {"causal": np.True_}, LENGTHS.apply_causal()),
    "window": (LENGTHS, {"sliding_window": 1}, LENGTHS.apply_sliding_window(1)),
    "mask": (
        MaskInfo.from_segments(*SEGMENTS),
        {"attention_mask": MASK},
        MaskInfo.from_segments(*SEGMENTS).apply_attention_mask(MASK),
    ),
    "segments": (
        LENGTHS,
        {"q_segment_ids": SEGMENTS[0], "kv_segment_ids": SEGMENTS[1]},
        LENGTHS.apply_segments(*SEGMENTS),
    ),
    "offset": (
        MaskInfo().apply_causal().apply_chunked(3),
        {"q_offset": 1},
        MaskInfo().apply_causal().apply_chunked(3).with_positions(q_offset=1),
    ),
    "positions of keys": (
        MaskInfo().apply_causal(),
        {"kv_positions": PLACES},
        MaskInfo().apply_causal().with_positions(None, PLACES),
    ),
    "nothing": (LENGTHS, {}, LENGTHS),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_all_conditions_count(name: str) -> None:
    info, options, whole = TOGETHER[name]
    mask = whole.get_or_compute_attention_mask(Q, K)
    out, lse = flash_attention_with_lse(QUERY, KEY, VALUE, mask_info=info, **options)
    by_mask, _ = flash_attention_with_lse(QUERY, KEY, VALUE, jnp.broadcast_to(mask, (BATCH, 1, Q, K)))
    np.testing.assert_allclose(out, by_mask, rtol=1e-5, atol=1e-6)
    assert lse.shape == (BATCH, HEADS, Q)
    materialised, weights = attention(QUERY, KEY, VALUE, mask_info=info, **options)
    np.testing.assert_allclose(materialised, out, rtol=1e-5, atol=1e-6)
    assert not weights[np.broadcast_to(~mask, weights.shape)].any()


def test_causal_order_beside_lengths_of_a_batch_of_one() -> None:
    arrays = QUERY[:1], KEY[:1], VALUE[:1]
    info = MaskInfo().apply_kv_lengths(3).apply_causal()
    mask = jnp.broadcast_to(info.get_or_compute_attention_mask(Q, K), (1, 1, Q, K))
    np.testing.assert_allclose(
        flash_attention(*arrays, mask_info=info), flash_attention(*arrays, mask), rtol=1e-5, atol=1e-6
    )


def test_a_mask_info_is_an_argument_of_jit() -> None:
    run = jax.jit(lambda query, info: flash_attention(query, KEY, VALUE, mask_info=info))
    np.testing.assert_allclose(
        run(QUERY, LENGTHS), flash_attention(QUERY, KEY, VALUE, mask_info=LENGTHS), rtol=1e-6
    )


def test_several_batch_dimensions_are_one_in_a_mask_info() -> None:
    arrays = (x.reshape(1, BATCH, *x.shape[1:]) for x in (QUERY, KEY, VALUE))
    out = flash_attention(*arrays, MASK[None], mask_info=LENGTHS)
    wanted = flash_attention(QUERY, KEY, VALUE, MASK, mask_info=LENGTHS)
    np.testing.assert_allclose(out[0], wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("info", "options", "words"),
    [
        ("causal", {}, r"^mask_info: got a str; expected a MaskInfo"),
        (
            LENGTHS,
            {"cum_seqlens_q": np.array([0, 5, 9]), "cum_seqlens_k": np.array([0, 7, 9])},
            r"^cum_seqlens_q: got lengths beside mask_info; expected None\. Use MaskInfo\.from_cu_seqlens",
        ),
        (
            MaskInfo().with_positions(q_offset=1),
            {"q_positions": np.zeros((1, Q), np.int32)},
            r"^q_positions: got positions beside those of mask_info",
        ),
        (
            MaskInfo.from_segments(*SEGMENTS),
            {"q_segment_ids": SEGMENTS[0], "kv_segment_ids": SEGMENTS[1]},
            r"^q_segment_ids: got segment ids beside those that are there",
        ),
        (LENGTHS, {"causal": 1}, r"^causal: got 1; expected True or False"),
        (MaskInfo().apply_kv_lengths(jnp.array([1, 2, 3])), {}, r"^mask_info.kv_lengths: got shape"),
        (LENGTHS, {"query": QUERY[0, 0]}, r"^query: got shape"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(info: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        flash_attention(**{"query": QUERY, "key": KEY, "value": VALUE, "mask_info": info, **options})
