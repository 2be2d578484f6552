"""The arguments of the kernels of this folder: validated, defaults filled in, arrays apart from options."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Window = tuple[int | None, int | None]
FLOATS = ("float16", "bfloat16", "float32")


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

    Raises ValueError naming the argument that is wrong, what it is and what was expected.
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "attention_mask": attention_mask,
        "bias": bias,
        "cum_seqlens_q": cum_seqlens_q,
        "cum_seqlens_k": cum_seqlens_k,
        "softmax_aux": softmax_aux,
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
    }
    arrays = {name: array for name, array in arrays.items() if array is not None}
    _check_shapes(arrays)
    _check_lengths(arrays)
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale: got {softmax_scale}, expected a finite number")
    if logits_soft_cap is not None and not 0 < logits_soft_cap < math.inf:
        raise ValueError(f"logits_soft_cap: got {logits_soft_cap}, expected a finite number above 0")
    if not 0 <= dropout_prob < 1:
        raise ValueError(f"dropout_prob: got {dropout_prob}, expected a probability in [0, 1)")
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
    if window is None:
        return None
    sides = (window, window) if isinstance(window, int) else tuple(window)
    if len(sides) != 2 or any(side is not None and side < 0 for side in sides):
        raise ValueError(f"sliding_window: got {window}, expected two sides of at least 0 or None")
    return sides


def _seed_words(seed: Any) -> Any:
    if seed is None:
        raise ValueError("dropout_seed: got None, expected an integer where dropout_prob is above 0")
    if isinstance(seed, int):
        if not 0 <= seed < 2**64:
            raise ValueError(f"dropout_seed: got {seed}, expected an integer of 64 bits")
        return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    return jnp.stack([jnp.asarray(seed).astype(jnp.uint32), jnp.uint32(0)])


def _expect(name: str, array: Any, shape: tuple[int | tuple[int, ...], ...], kinds: str) -> None:
    fits = len(array.shape) == len(shape) and all(
        length in (wanted if isinstance(wanted, tuple) else (wanted,))
        for length, wanted in zip(array.shape, shape, strict=True)
    )
    kind = "f" if array.dtype.name in FLOATS else array.dtype.kind
    if not fits or kind not in kinds:
        raise ValueError(
            f"{name}: got {array.dtype.name}{array.shape}, expected {shape}, dtype of kind {kinds}"
        )


def _check_shapes(arrays: dict[str, Any]) -> None:
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    for name, array in (("query", query), ("key", key), ("value", value)):
        if len(array.shape) != 4 or array.dtype.name not in FLOATS or array.dtype != query.dtype:
            raise ValueError(f"{name}: got dtype {array.dtype}, shape {array.shape}, expected 4 float axes")
    batch, q_len, q_heads, head_dim = query.shape
    _, kv_len, kv_heads, _ = key.shape
    _expect("key", key, (batch, kv_len, kv_heads, head_dim), "f")
    _expect("value", value, (batch, kv_len, kv_heads, value.shape[3]), "f")
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(f"key: got {kv_heads} heads, expected a divisor of the {q_heads} heads of query")
    planes = ((1, batch), (1, q_heads))
    if "attention_mask" in arrays:
        _expect("attention_mask", arrays["attention_mask"], (*planes, q_len, kv_len), "biu")
    if "bias" in arrays:
        _expect("bias", arrays["bias"], (*planes, (1, q_len), kv_len), "f")
    if "softmax_aux" in arrays:
        aux = arrays["softmax_aux"]
        per_head = ((1, q_heads),) if len(aux.shape) == 2 else ()
        _expect("softmax_aux", aux, (*per_head, aux.shape[-1] if aux.shape else 1), "f")
    if ("q_segment_ids" in arrays) != ("kv_segment_ids" in arrays):
        raise ValueError("q_segment_ids, kv_segment_ids: got one of the two, expected both or neither")
    for name, length in (("q_segment_ids", q_len), ("kv_segment_ids", kv_len)):
        if name in arrays:
            _expect(name, arrays[name], (batch, length), "i")


def _check_lengths(arrays: dict[str, Any]) -> None:
    names = ("cum_seqlens_q", "cum_seqlens_k")
    if (names[0] in arrays) != (names[1] in arrays):
        raise ValueError("cum_seqlens_q, cum_seqlens_k: got one of the two, expected both or neither")
    batch = arrays["query"].shape[0]
    for name, array in ((names[0], arrays["query"]), (names[1], arrays["key"])):
        if name not in arrays:
            continue
        cum, other = arrays[name], arrays[names[0]]
        if cum.dtype != np.int32 or cum.shape != other.shape or len(cum.shape) != 1 or cum.shape[0] < 2:
            raise ValueError(f"{name}: got {cum.dtype}{cum.shape}, expected int32 [sequences + 1]")
        if batch > 1 and cum.shape[0] != batch + 1:
            raise ValueError(
                f"{name}: got {cum.shape[0] - 1} lengths, expected {batch}, as the batch has rows"
            )
        if isinstance(cum, Tracer):
            continue
        cum = np.asarray(cum)
        sizes = np.diff(cum)
        room = array.shape[1] - (int(sizes.sum()) if batch == 1 else int(sizes.max()))
        if cum[0] != 0 or (sizes < 0).any() or room < 0:
            raise ValueError(
                f"{name}: got {cum}, expected totals from 0 of lengths that fit {array.shape[1]}"
            )
