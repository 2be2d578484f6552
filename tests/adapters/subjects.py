"""Adapters with dialects of their own as Subjects: `attest check tests.adapters.subjects:SPLASH`."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as masks

from attest.conformance.peers._windows import sides_of
from attest.conformance.subject import Limits, Sharding, Subject
from attest.conformance.subjects.auto import SUBJECTS
from attest.kernels.adapters import jax_gpu_mha, jax_tpu_splash, onnx
from attest.reference.semantics import Semantics


def _by_heads(*arrays: Any) -> list[Any]:
    return [x.swapaxes(1, 2) for x in arrays]


def _onnx(
    query: Any,
    key: Any,
    value: Any,
    *,
    attention_mask: Any = None,
    bias: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    sliding_window: Any = None,
    logits_soft_cap: float | None = None,
) -> Any:
    left, right = (-1 if side is None else side for side in sides_of(sliding_window))
    mask = bias if attention_mask is None else attention_mask
    if mask is not None:
        # The operator hides the keys past the last axis of a mask.
        mask = jnp.broadcast_to(mask, (*mask.shape[:-1], key.shape[1]))
    out = onnx.attention(
        *_by_heads(query, key, value),
        mask,
        is_causal=causal,
        left_window_size=left,
        right_window_size=right,
        scale=softmax_scale,
        softcap=logits_soft_cap or 0.0,
    )
    return out.Y.swapaxes(1, 2)


def _mha(
    query: Any, key: Any, value: Any, *, softmax_scale: float = 1.0, causal: bool = False
) -> tuple[Any, Any]:
    return tuple(jax_gpu_mha.mha(query, key, value, None, softmax_scale, causal, return_residuals=True))


def _splash(
    query: Any,
    key: Any,
    value: Any,
    *,
    attention_mask: Any = None,
    softmax_aux: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    causal: bool = False,
    sliding_window: Any = None,
    logits_soft_cap: float | None = None,
) -> Any:
    heads, shape = query.shape[2], (query.shape[1], key.shape[1])
    parts = [masks.CausalMask(shape)] if causal else []
    if sliding_window is not None:
        parts.append(masks.LocalMask(shape, sides_of(sliding_window), offset=0))
    one = parts[0] if parts else masks.FullMask(shape)
    mask: Any = masks.MultiHeadMask([one & parts[1] if len(parts) > 1 else one] * heads)
    sinks = None
    if softmax_aux is not None:
        sinks = jax.nn.logsumexp(jnp.atleast_2d(softmax_aux).astype(jnp.float32), axis=-1)
        sinks = jnp.broadcast_to(sinks, (heads,))
    segments = None if q_segment_ids is None else masks.SegmentIds(q_segment_ids, kv_segment_ids)

    def attend(q: Any, k: Any, v: Any, ids: Any, pairs: Any) -> Any:
        kernel = jax_tpu_splash.make_splash_mha_single_device(
            mask if pairs is None else pairs, save_residuals=True, attn_logits_soft_cap=logits_soft_cap
        )
        return kernel(q, k, v, ids, sinks)

    pairs = attention_mask
    if pairs is not None:
        pairs = jnp.broadcast_to(pairs, (query.shape[0], heads, *shape))
    out, (lse,) = jax.vmap(attend)(*_by_heads(query, key, value), segments, pairs)
    return out.swapaxes(1, 2), lse


def _subject(name: str, call: Any, features: set[str], semantics: Semantics, **limits: Any) -> Subject:
    """Return a Subject with the arithmetic of `attest.flash_attention`, whose kernels the adapters call."""
    (fastest,) = SUBJECTS
    return replace(
        fastest,
        name=name,
        call=call,
        features=frozenset({*features, "gqa", "value_dim"}),
        semantics=semantics,
        limits=Limits(validates=False, **limits),
        sharding=Sharding(),
    )


def _together(*names: str) -> frozenset[str]:
    return frozenset(names)


ONNX = replace(
    _subject(
        "adapters.onnx",
        _onnx,
        {"scale", "bias", "mask", "broadcast", "causal", "window", "soft_cap"},
        Semantics(
            causal="top_left",
            window="top_left",
            gradients=frozenset({"query", "key", "value", "bias"}),
            lse_gradient=False,
        ),
        excludes=(_together("bias", "mask"), _together("bias", "soft_cap")),
    ),
    returns_lse=False,
)
MHA = _subject(
    "adapters.mha",
    _mha,
    {"scale", "causal"},
    Semantics(
        default_scale="one", causal="top_left", lse_base="two", gradients=frozenset({"query", "key", "value"})
    ),
)
SPLASH = _subject(
    "adapters.splash_attention",
    _splash,
    {"mask", "broadcast", "causal", "window", "segments", "sinks", "soft_cap"},
    Semantics(
        default_scale="one",
        causal="top_left",
        window="top_left",
        segments="equality",
        gradients=frozenset({"query", "key", "value", "softmax_aux"}),
    ),
    excludes=(_together("mask", "causal"), _together("mask", "window")),
)
