"""The arguments of the kernels of this folder: validated, defaults filled in, arrays apart from options."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from attest.conformance.validation import validate_call

Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Options:
    """What is static about a call."""

    scale: float
    rate: float = 0.0
    causal: bool = False
    window: Window | None = None
    cap: float | None = None
    normalized: bool = True


def arguments(
    query: Any,
    key: Any,
    value: Any,
    *,
    attention_mask: Any = None,
    bias: Any = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: Any = None,
    causal: bool = False,
    sliding_window: Any = None,
    cum_seqlens_q: Any = None,
    cum_seqlens_k: Any = None,
    softmax_aux: Any = None,
    logits_soft_cap: float | None = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    normalize_output: bool = True,
) -> tuple[Options, dict[str, Any]]:
    """Return the options and the given arrays by name, the seed as two words of 32 bits.

    Raises ValueError, or what else `validate_call` raises, naming the argument that is wrong.
    """
    given = {
        "attention_mask": attention_mask,
        "bias": bias,
        "cum_seqlens_q": cum_seqlens_q,
        "cum_seqlens_k": cum_seqlens_k,
        "softmax_aux": softmax_aux,
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
    }
    validate_call(
        query,
        key,
        value,
        **given,
        softmax_scale=softmax_scale,
        dropout_prob=dropout_prob,
        dropout_seed=dropout_seed,
        causal=causal,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        normalize_output=normalize_output,
    )
    arrays = {"query": query, "key": key, "value": value}
    arrays |= {name: array for name, array in given.items() if array is not None}
    if dropout_prob > 0:
        arrays["dropout_seed"] = _seed_words(dropout_seed)
    return Options(
        scale=1 / math.sqrt(query.shape[3]) if softmax_scale is None else float(softmax_scale),
        rate=float(dropout_prob),
        causal=bool(causal),
        window=_window(sliding_window),
        cap=None if logits_soft_cap is None else float(logits_soft_cap),
        normalized=bool(normalize_output),
    ), arrays


def _window(window: Any) -> Window | None:
    return (window, window) if isinstance(window, int) else None if window is None else tuple(window)


def _seed_words(seed: Any) -> Any:
    if isinstance(seed, int):
        return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    return jnp.stack([jnp.asarray(seed).astype(jnp.uint32), jnp.uint32(0)])
