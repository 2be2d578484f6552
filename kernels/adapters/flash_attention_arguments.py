"""FlashAttention's arguments: their checks, and those of `attest.flash_attention` that mean the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.adapters.shared import counts
from attest.kernels.call.arrays import check_is_array, is_integer, saturated
from attest.kernels.call.options import check_integer, check_number, refuse, shown

# FlashAttention's name of an argument, by ours.
NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "dropout_prob": "dropout_p",
    "sliding_window": "window_size",
    "logits_soft_cap": "softcap",
    "chunk_size": "attention_chunk",
    "cum_seqlens_q": "cu_seqlens_q",
    "cum_seqlens_k": "cu_seqlens_k",
}
_LARGEST = int(np.iinfo(np.int32).max)
NAMES_WITH_CACHE = {**NAMES, "key": "k_cache", "value": "v_cache"}


def options_of(
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    attention_chunk: Any,
    dropout_seed: Any,
) -> dict[str, Any]:
    """Return the arguments of `attest.flash_attention` that mean the same.

    Raises: ValueError naming the argument; NotImplementedError for slopes beside a cap.
    """
    probability = check_number("dropout_p", dropout_p)
    if not 0.0 <= probability < 1.0:
        refuse("dropout_p", probability, "0 <= dropout_p < 1", "Give the share of the weights to drop.")
    if probability > 0.0 and dropout_seed is None:
        advice = "FlashAttention draws from torch's generator; pass an int or a JAX random key."
        refuse("dropout_seed", None, "a seed where dropout_p > 0", advice)
    cap = check_number("softcap", softcap)
    if cap < 0.0:
        refuse("softcap", cap, "a positive number, or 0.0 for no cap", "Pass 0.0.")
    chunk = check_integer("attention_chunk", attention_chunk)
    if chunk < 0:
        refuse("attention_chunk", chunk, "a positive integer, or 0 for no chunks", "Pass 0.")
    if cap and alibi_slopes is not None:
        # Theirs joins the capped logits, ours those before the cap (S25).
        advice = "Leave one of them out; attest.flash_attention adds slopes before the cap."
        raise NotImplementedError(f"alibi_slopes: got slopes beside softcap {cap:g}; expected one. {advice}")
    return {
        "dropout_prob": probability,
        "dropout_seed": dropout_seed,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "sliding_window": _window(window_size),
        "logits_soft_cap": cap or None,
        "chunk_size": chunk or None,
        "alibi_slopes": alibi_slopes,
    }


def _window(window: Any) -> tuple[int | None, int | None]:
    if not isinstance(window, tuple | list) or len(window) != 2:
        refuse("window_size", shown(window), "a pair (left, right)", "Pass (-1, -1) for no window.")
    left, right = (check_integer("window_size", side) for side in window)
    if left < -1 or right < -1:
        refuse(
            "window_size", shown(window), "sides >= 0, or -1 for an open one", "Pass (-1, -1) for no window."
        )
    return None if left == -1 else left, None if right == -1 else right


def unpacked(name: str, x: Any, count: int) -> list[Any]:
    """Return the arrays that are packed along axis 2 of one with five.

    Raises: ValueError naming the argument.
    """
    check_is_array(name, x)
    if x.ndim != 5 or x.shape[2] != count:
        expected = f"[batch, length, {count}, heads, head_dim]"
        refuse(name, f"shape {x.shape}", expected, "Stack the arrays along axis 2.")
    return [x[:, :, each] for each in range(count)]


def refuse_pages(block_table: Any) -> None:
    """Raise NotImplementedError for a table of pages."""
    if block_table is not None:
        raise NotImplementedError(
            f"block_table: got a {type(block_table).__name__}; expected None. Gather the pages of each "
            "sequence with jnp.take before the call."
        )


def check_tokens(name: str, x: Any) -> None:
    """Refuse what is no array [tokens, heads, head_dim]."""
    check_is_array(name, x)
    if x.ndim != 3:
        advice = "Pack the sequences one after another."
        refuse(name, f"shape {x.shape}", "[tokens, heads, head_dim]", advice)


def check_starts(name: str, starts: Any, tokens: int, longest_name: str, longest: Any) -> None:
    """Refuse what are no cumulative lengths, and a longest length that is exceeded, where they are known.

    What is wrong with the numbers otherwise is left to the checks of the call. tokens: how many there are.
    """
    check_is_array(name, starts)
    if starts.ndim != 1 or starts.shape[0] < 2 or not is_integer(starts.dtype):
        got, expected = f"{starts.dtype} of shape {starts.shape}", "integers [n + 1] with n >= 1"
        refuse(name, got, expected, "Sum the lengths of the sequences from 0.")
    limit = check_integer(longest_name, longest)
    if not isinstance(starts, Tracer):
        found = int(np.diff(np.asarray(starts).astype(np.int64)).max())
        if limit < found <= tokens:
            advice = "Pass the length of the longest."
            refuse(longest_name, limit, f"at least {found}, the longest sequence", advice)


def in_sequences(q: Any, starts_q: Any, starts_k: Any, used: Any) -> dict[str, Any]:
    """Return the ranges of keys that count in packed sequences, and the positions of their rows.

    q: [total_q, heads, head_dim]. used: how many keys of each sequence count, its first ones; None is all.
    The last row of a sequence has the position of the last of them.

    Raises: ValueError naming the argument.
    """
    if used is None or starts_q.shape != starts_k.shape:
        return {}
    count = starts_k.shape[0] - 1
    known = None if isinstance(starts_k, Tracer) else np.diff(np.asarray(starts_k).astype(np.int64))
    most = _LARGEST if known is None else max(0, int(known.max()))
    number = counts("seqused_k", used, count, most, "sequence")
    if known is not None and not isinstance(used, Tracer):
        over = np.asarray(used) > known
        if over.any():
            at = int(over.argmax())
            got, expected = f"{int(np.asarray(used)[at])} for sequence {at}", f"at most {known[at]}, its keys"
            refuse("seqused_k", got, expected, "Clip them to the sequences.")
    first_rows, first_keys = _int32(starts_q), _int32(starts_k)
    number = jnp.minimum(number, jnp.diff(first_keys))
    rows = jnp.arange(q.shape[0], dtype=jnp.int32)
    sequence = jnp.searchsorted(first_rows, rows, side="right") - 1
    ends = (first_keys[:-1] + number)[jnp.clip(sequence, 0, count - 1)]
    return {"kv_end": ends[None], "q_offset": number - jnp.diff(first_rows)}


def _int32(x: Any) -> jax.Array:
    """Return integers as int32; known ones that it does not hold are refused by the checks of the call."""
    return saturated(x)


def in_cache(q: Any, k_cache: Any, lengths: Any, first: Any) -> dict[str, Any]:
    """Return the ranges of keys of a cache that count, and where the rows stand.

    What else is malformed is left to the checks of the call.

    Raises: ValueError naming the argument.
    """
    for name, x in (("q", q), ("k_cache", k_cache)):
        check_is_array(name, x)
    if q.ndim != 4 or k_cache.ndim != 4 or (lengths is None and first is None):
        return {}
    batch, rows, keys = q.shape[0], q.shape[1], k_cache.shape[1]
    given: dict[str, Any] = {}
    if lengths is not None:
        end = _of_batch("cache_seqlens", lengths, batch, keys)
        given["kv_end"] = jnp.broadcast_to(end[:, None], (batch, rows))
        given["q_offset"] = end - rows
    if first is not None:
        start = _of_batch("cache_leftpad", first, batch, keys)
        given["kv_start"] = jnp.broadcast_to(start[:, None], (batch, rows))
    return given


def _of_batch(name: str, x: Any, batch: int, keys: int) -> jax.Array:
    """Return a number of keys for each batch entry, [B] int32; an int is that of all."""
    if not isinstance(x, jax.Array | np.ndarray):
        number = check_integer(name, x, f"Pass an int, or an integer array ({batch},).")
        if not 0 <= number <= keys:
            refuse(name, number, f"numbers from 0 to {keys}", "Clip them to the cache.")
        x = np.full(batch, number, np.int32)
    return counts(name, x, batch, keys, "batch entry")
