"""The makers of splash attention on our kernels, against JAX's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as library,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)

from attest.kernels.adapters import jax_tpu_splash as ours
from attest.kernels.adapters.jax_tpu_splash_masks import mask_arguments
from tests.adapters.roundings import check
from tests.kernels.kernel_cases import normal

HEADS, KEY_HEADS, ROWS, KEYS = 4, 2, 12, 18
SHAPE = (ROWS, KEYS)
Q, K, V = normal(HEADS, ROWS, 8), normal(KEY_HEADS, KEYS, 8, seed=2), normal(KEY_HEADS, KEYS, 6, seed=3)
SINKS = normal(HEADS, seed=4)
IDS = library.SegmentIds(jnp.arange(ROWS) // 5 - 1, jnp.arange(KEYS) // 5 - 1)


class Backwards(masks.CausalMask):
    """A mask of a user, who has other rows."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__(shape)
        self.q_sequence = self.q_sequence[::-1].copy()


def permuted() -> Any:
    mask = masks.CausalMask(SHAPE)
    mask.q_sequence = mask.q_sequence[::-1].copy()
    return mask


CAUSAL, FULL = masks.CausalMask(SHAPE), masks.FullMask(SHAPE)
LOCAL = masks.LocalMask(SHAPE, (3, 2), offset=1)
RANDOM = masks.NumpyMask(np.random.default_rng(0).random(SHAPE) < 0.6)
# The mask of each head, and the options that it becomes; None: it becomes an array.
MASKS: dict[str, tuple[list[Any], dict[str, Any] | None]] = {
    "full": ([FULL] * HEADS, {}),
    "causal": ([masks.CausalMask(SHAPE) for _ in range(HEADS)], {"causal": True, "q_offset": 0}),
    "causal with an offset": ([masks.CausalMask(SHAPE, 3)] * HEADS, {"causal": True, "q_offset": 3}),
    "local": ([LOCAL] * HEADS, {"sliding_window": (3, 2), "q_offset": 1}),
    "local without ends": ([masks.LocalMask(SHAPE, (None, None), 1)] * HEADS, {}),
    "local with an open side": (
        [masks.LocalMask(SHAPE, (None, 2), 0)] * HEADS,
        {"sliding_window": (None, 2), "q_offset": 0},
    ),
    "local, all keys ahead": ([masks.LocalMask(SHAPE, (-1, 4), 0)] * HEADS, None),
    "chunks": (
        [masks.ChunkedCausalMask(SHAPE, 5)] * HEADS,
        {"causal": True, "chunk_size": 5, "q_offset": 0},
    ),
    "causal and local": (
        [CAUSAL & masks.LocalMask(SHAPE, (4, None), 0)] * HEADS,
        {"causal": True, "sliding_window": (4, None), "q_offset": 0},
    ),
    "causal and local with another offset": ([CAUSAL & LOCAL] * HEADS, None),
    "causal or local": ([CAUSAL | LOCAL] * HEADS, None),
    "causal and an array": ([CAUSAL & (RANDOM | CAUSAL)] * HEADS, None),
    "several": ([CAUSAL, FULL, LOCAL, RANDOM], None),
    "rows of a user": ([permuted()] * HEADS, None),
    "a class of a user": ([Backwards(SHAPE)] * HEADS, None),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_shows_what_it_shows_in_jax(name: str) -> None:
    """Known forms stay options, so that kernels skip blocks."""
    heads, expected = MASKS[name]
    mask = masks.MultiHeadMask(heads)
    shape, options, array = mask_arguments(mask)
    assert shape == mask.shape
    assert (array is None, options) == ((True, expected) if expected is not None else (False, {}))
    kernel = ours.make_splash_mha_single_device(mask)
    seen = np.stack([np.asarray(head[:, :]) for head in heads])
    # Equal logits: out of a row is the mean of the values that it sees.
    out = kernel(jnp.zeros_like(Q), K, V)
    weights = seen / np.maximum(seen.sum(-1, keepdims=True), 1)
    np.testing.assert_allclose(out, weights @ np.repeat(V, HEADS // KEY_HEADS, axis=0), rtol=0, atol=2e-6)


CALLS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "plain": ({}, None, None),
    "soft cap": ({"attn_logits_soft_cap": 3.0}, None, None),
    "sinks": ({}, None, SINKS),
    "segments": ({}, IDS, None),
    "all": ({"attn_logits_soft_cap": 3.0}, IDS, SINKS),
}


@pytest.mark.parametrize(
    "mask", [masks.MultiHeadMask([CAUSAL] * HEADS), masks.MultiHeadMask([CAUSAL, FULL] * 2)]
)
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_jax(name: str, mask: Any) -> None:
    """The reference of JAX computes in float64."""
    options, ids, sinks = CALLS[name]
    arrays = (Q, K, V) if sinks is None else (Q, K, V, sinks)
    kernel = ours.make_splash_mha_single_device(mask, **options)
    reference = library.make_masked_mha_reference(mask)
    check(
        lambda q, k, v, *sinks: kernel(q, k, v, ids, *sinks),
        lambda q, k, v, *sinks: reference(q, k, v, ids, *sinks, **options),
        *arrays,
    )


def test_without_an_axis_of_heads() -> None:
    mask = masks.MultiHeadMask([CAUSAL] * HEADS)
    kernel = ours.make_splash_mqa_single_device(mask)
    check(
        kernel,
        library.make_masked_mqa_reference(mask),
        Q,
        K[0],
        V[0],
    )


def test_jax_s_kernel_in_its_interpreter() -> None:
    """The same calls to both, in a batch by `jax.vmap`, with the residuals."""
    shape = (128, 256)
    mask = masks.MultiHeadMask([masks.LocalMask(shape, (40, 8), offset=3)] * 2)
    arrays = normal(2, 2, 128, 32), normal(2, 1, 256, 32, seed=2), normal(2, 1, 256, 32, seed=3)
    ids = library.SegmentIds(jnp.arange(128)[None] // 64, jnp.arange(256)[None] // 64)
    ids = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), ids)
    (out, (lse,)), (want, (want_lse,)) = (
        jax.jit(jax.vmap(make(mask, save_residuals=True, interpret=True), in_axes=(0, 0, 0, 0, None)))(
            *arrays, ids, SINKS[:2]
        )
        for make in (ours.make_splash_mha_single_device, library.make_splash_mha_single_device)
    )
    np.testing.assert_allclose(out, want, rtol=0, atol=4e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=4e-6)


@pytest.mark.parametrize("array", [jnp.asarray, np.asarray])
def test_a_mask_may_be_an_array(array: Any) -> None:
    mask = array(np.stack([RANDOM.array, CAUSAL[:, :]] * 2))
    of_objects = ours.make_splash_mha_single_device(masks.MultiHeadMask([RANDOM, CAUSAL] * 2))
    made = ours.make_splash_mha_single_device(mask)
    np.testing.assert_array_equal(made(Q, K, V), of_objects(Q, K, V))


def test_the_kernel_passes_through_programs() -> None:
    """It is a pytree, whose array may be traced."""
    kernel = ours.make_splash_mha(masks.MultiHeadMask([CAUSAL, RANDOM] * 2), head_shards=1, q_seq_shards=1)
    np.testing.assert_allclose(
        jax.jit(lambda f, *x: f(*x))(kernel, Q, K, V), kernel(Q, K, V), rtol=0, atol=2e-6
    )


def test_a_row_that_sees_no_key_is_zero() -> None:
    kernel = ours.make_splash_mha_single_device(
        masks.MultiHeadMask([masks.CausalMask(SHAPE, -2)] * HEADS), save_residuals=True
    )
    out, (lse,) = kernel(Q, K, V)
    assert not out[:, :2].any()
    assert np.isneginf(lse[:, :2]).all()
    assert np.isfinite(lse[:, 2:]).all()


MADE: dict[str, tuple[dict[str, Any], str]] = {
    "a mask of one head": ({"mask": CAUSAL}, "mask: got a CausalMask; expected a MultiHeadMask"),
    "numbers": ({"mask": np.ones((4, 12, 18))}, "mask: got float64 of shape"),
    "two axes": ({"mask": np.ones(SHAPE, bool)}, r"mask: got bool of shape \(12, 18\)"),
    "block sizes": ({"block_sizes": 128}, "block_sizes: got a int; expected None, or BlockSizes"),
    "a flag": ({"interpret": 1}, "interpret: got 1"),
    "another flag": ({"downcast_smem_data": None}, "downcast_smem_data: got None"),
    "residuals": ({"save_residuals": "yes"}, "save_residuals: got 'yes'"),
    "heads": ({"is_mqa": 0}, "is_mqa: got 0"),
    "shards": ({"head_shards": 0}, "head_shards: got 0"),
    "shards of rows": ({"q_seq_shards": 1.5}, "q_seq_shards: got 1.5"),
    "a mask value that is seen": ({"mask_value": -10.0}, "mask_value: got -10.0; expected at most -65504.0"),
    "a cap": ({"attn_logits_soft_cap": -1.0}, "attn_logits_soft_cap: got -1.0"),
    "a name": ({"residual_checkpoint_name": "x"}, "residual_checkpoint_name: got a str; .*attention_lse"),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_what_makers_refuse(name: str) -> None:
    given, message = MADE[name]
    arguments = {"mask": masks.MultiHeadMask([CAUSAL] * HEADS), "head_shards": 1, "q_seq_shards": 1, **given}
    with pytest.raises(ValueError, match=f"^{message}"):
        ours.make_splash_mha(**arguments)


CALLED: dict[str, tuple[dict[str, Any], str]] = {
    "a batch": ({"q": Q[None]}, r"q: got shape .* expected 3 axes"),
    "no heads": ({"k": K[0]}, r"k: got shape \(18, 8\)"),
    "rows that the mask lacks": ({"q": Q[:, :5]}, r"mask: got shape \(4, 12, 18\); expected \(4, 5, 18\)"),
    "heads that the mask lacks": ({"q": Q[:2]}, r"mask: got shape .* \(2, 12, 18\)"),
    "other values": ({"v": V[:, :5]}, "v: got"),
    "ids that are no pair": ({"segment_ids": IDS.q}, "segment_ids: got a .*; expected None, or SegmentIds"),
    "ids of another length": (
        {"segment_ids": library.SegmentIds(IDS.q[:3], IDS.kv)},
        "segment_ids.q: got shape",
    ),
    "ids of two dtypes": (
        {"segment_ids": library.SegmentIds(IDS.q, IDS.kv.astype("int16"))},
        "segment_ids.kv: got dtype int16; expected int32",
    ),
    "sinks of key heads": ({"sinks": SINKS[:2]}, r"sinks: got shape \(2,\); expected \(4,\)"),
    "integer sinks": ({"sinks": SINKS.astype(int)}, "sinks: got dtype int32"),
}


@pytest.mark.parametrize("name", CALLED)
def test_what_a_call_refuses(name: str) -> None:
    given, message = CALLED[name]
    kernel = ours.make_splash_mha_single_device(masks.MultiHeadMask([CAUSAL] * HEADS))
    with pytest.raises(ValueError, match=f"^{message}"):
        kernel(**{"q": Q, "k": K, "v": V, **given})


def test_a_mask_split_by_hand_is_refused() -> None:
    kernel = ours.make_splash_mha_single_device(masks.MultiHeadMask([CAUSAL] * HEADS))
    with pytest.raises(NotImplementedError, match=r"^manual_sharding_spec: got .* outside jax.shard_map"):
        kernel.manual_sharding_spec(None)
