"""The canonical form of an attention call, and the checks that every implementation shares.

Every kernel of ours checks its arguments here and nowhere else, so that all of them refuse the same calls
with the same messages (clause S20). A refusal is a `ValueError` with the name of the argument, what was got,
what was expected, and what to do about it.

Shapes, dtypes and options are checked always. Values inside arrays can be checked only where they are
concrete: cumulative lengths that `jax.jit` traces are trusted.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.call.alibi import check_slopes
from attest.kernels.call.arrays import check_float, check_is_array, check_pairs, is_integer, known_numbers
from attest.kernels.call.key_ranges import check_chunk_size, check_ranges, hide_rows
from attest.kernels.call.options import (
    check_dropout_prob,
    check_dropout_shared,
    check_flag,
    check_integer,
    check_scale,
    check_soft_cap,
    refuse,
    shown,
)
from attest.kernels.call.positions import Positions, check_positions
from attest.kernels.call.sequences import check_lengths, check_segments
from attest.kernels.call.wide_keys import check_dtype_of_query

SEED_LIMIT = 2**64
_STATIC: dict[str, Any] = {"static": True}

type Window = tuple[int | None, int | None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Call:
    """One attention call, validated: arrays are pytree leaves, options are static and hashable.

    B is the batch, Sq and Sk the lengths, Hq and Hkv the numbers of heads, D and Dv the head dims of
    semantics.
    """

    query: jax.Array  # [B, Sq, Hq, D] float
    key: jax.Array  # [B, Sk, Hkv, D], dtype of query
    value: jax.Array  # [B, Sk, Hkv, Dv], dtype of query
    attention_mask: jax.Array | None  # [B or 1, Hq or 1, Sq or 1, Sk or 1] bool
    bias: jax.Array | None  # [B or 1, Hq or 1, Sq or 1, Sk or 1] float
    q_segment_ids: jax.Array | None  # [B, Sq] int32
    kv_segment_ids: jax.Array | None  # [B, Sk] int32
    cum_seqlens_q: jax.Array | None  # [n + 1] int32
    cum_seqlens_k: jax.Array | None  # [n + 1] int32
    softmax_aux: jax.Array | None  # [1, num_sinks], which all heads share, or [Hq, num_sinks], float
    dropout_seed: jax.Array | None  # [2] uint32: low and high word; None where nothing is dropped
    positions: Positions
    kv_start: jax.Array | None  # [B or 1, Sq] int32, from 0 to Sk
    kv_end: jax.Array | None  # [B or 1, Sq] int32, from 0 to Sk
    alibi_slopes: jax.Array | None  # [B or 1, Hq] float32, constants
    softmax_scale: float = field(metadata=_STATIC)
    logits_soft_cap: float | None = field(metadata=_STATIC)
    dropout_prob: float = field(metadata=_STATIC)
    causal: bool = field(metadata=_STATIC)
    sliding_window: Window = field(metadata=_STATIC)
    chunk_size: int | None = field(metadata=_STATIC)
    dropout_shared: str = field(metadata=_STATIC)  # "", "b", "h" or "bh": coordinates of dropout that are 0


def check_call(
    query: Any,
    key: Any,
    value: Any,
    *,
    attention_mask: Any = None,
    bias: Any = None,
    softmax_scale: Any = None,
    dropout_prob: Any = 0.0,
    causal: Any = False,
    dropout_seed: Any = None,
    dropout_shared: Any = None,
    cum_seqlens_q: Any = None,
    cum_seqlens_k: Any = None,
    sliding_window: Any = None,
    logits_soft_cap: Any = None,
    softmax_aux: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_offset: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
    origin: Any = None,
    chunk_size: Any = None,
    kv_start: Any = None,
    kv_end: Any = None,
    alibi_slopes: Any = None,
) -> Call:
    """Return the arguments that all kernels share, checked and in canonical form (S1 to S29).

    Shapes are those of `Call`. Further forms accepted: an integer `attention_mask` (non-zero may attend); a
    mask or bias of 2 or 3 axes, which lacks the first ones; `alibi_slopes` [Hq]; a mask that hides whole
    rows becomes ranges;
    `softmax_aux` of shape [num_sinks], shared by all heads, where that is not as many as heads; segment ids
    of any integer dtype; lengths as int64; `sliding_window` an int w, meaning (w, w); `dropout_seed` a Python
    int in [0, 2**64), or a uint32 array [2] of its (low, high) words, the form to use where the seed is
    traced, or a typed key of `jax.random`, whose words are `jax.random.bits(key, (2,), "uint32")`.

    Raises: ValueError naming the argument.
    """
    query, key, value = _check_qkv(query, key, value)
    batch, q_length, q_heads, head_dim = query.shape
    k_length = key.shape[1]
    scale = (
        1.0 / math.sqrt(head_dim) if softmax_scale is None else check_scale("softmax_scale", softmax_scale)
    )
    segments = check_segments(q_segment_ids, kv_segment_ids, batch, q_length, k_length)
    lengths = check_lengths(cum_seqlens_q, cum_seqlens_k, batch, q_length, k_length)
    probability, shared = check_dropout_prob(dropout_prob), check_dropout_shared(dropout_shared)
    start, end = check_ranges(kv_start, kv_end, batch, q_length, k_length)
    whole = (batch, q_heads, q_length, k_length)
    mask = check_mask(attention_mask, whole)
    if mask is not None and mask.shape[1] == mask.shape[3] == 1:
        mask, end = None, hide_rows(end, mask[:, 0, :, 0], q_length, k_length)
    return Call(
        query=query,
        key=key,
        value=value,
        attention_mask=mask,
        bias=check_bias(bias, whole),
        q_segment_ids=segments[0],
        kv_segment_ids=segments[1],
        cum_seqlens_q=lengths[0],
        cum_seqlens_k=lengths[1],
        softmax_aux=_check_sinks(softmax_aux, q_heads),
        dropout_seed=_check_seed(dropout_seed, probability),
        positions=check_positions(
            q_offset,
            q_positions,
            kv_positions,
            origin,
            sequences=batch if lengths[0] is None else lengths[0].shape[0] - 1,
            batch=batch,
            q_length=q_length,
            k_length=k_length,
        ),
        kv_start=start,
        kv_end=end,
        alibi_slopes=check_slopes(alibi_slopes, batch, q_heads),
        softmax_scale=scale,
        logits_soft_cap=check_soft_cap(logits_soft_cap),
        dropout_prob=probability,
        causal=check_flag("causal", causal),
        sliding_window=check_window(sliding_window),
        chunk_size=check_chunk_size(chunk_size),
        dropout_shared=shared if probability > 0.0 else "",
    )


def _check_qkv(query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    expected = {
        "query": "[batch, query length, query heads, head_dim]",
        "key": "[batch, key length, key heads, head_dim]",
        "value": "[batch, key length, key heads, value head_dim]",
    }
    arrays: list[Any] = []
    for (name, shape), x in zip(expected.items(), (query, key, value), strict=True):
        check_is_array(name, x)
        if x.ndim != 4:
            refuse(name, f"shape {x.shape}", f"4 axes {shape}", "Add or merge axes to this layout.")
        check_float(name, x)
        if x.shape[2] == 0 or x.shape[3] == 0:
            refuse(
                name, f"shape {x.shape}", "at least one head and one channel", "Skip the call if it has none."
            )
        arrays.append(x)
    q, k, v = arrays
    for name, x in (("key", k), ("value", v)):
        check_dtype_of_query(name, x, q)
        if x.shape[0] != q.shape[0]:
            refuse(
                name,
                f"batch {x.shape[0]} in shape {x.shape}",
                f"{q.shape[0]}, the batch of query",
                "Repeat it.",
            )
    if k.shape[3] != q.shape[3]:
        refuse(
            "key", f"head_dim {k.shape[3]}", f"{q.shape[3]}, that of query", "Only value may have another."
        )
    if v.shape[1:3] != k.shape[1:3]:
        refuse(
            "value",
            f"shape {v.shape}",
            f"length and heads {k.shape[1:3]}, those of key",
            "Check the axis order.",
        )
    if q.shape[2] % k.shape[2]:
        refuse(
            "query",
            f"{q.shape[2]} heads with {k.shape[2]} key heads",
            "a multiple of the key heads",
            "Query head h reads key head h // (query heads / key heads).",
        )
    # jnp.asarray returns an array of JAX as it is, after a while.
    q, k, v = (x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays)
    return q, k, v


def check_mask(mask: Any, whole: tuple[int, int, int, int]) -> jax.Array | None:
    """Return a mask as bool with four axes (S5). whole: batch, query heads, rows and keys."""
    if mask is None:
        return None
    check_is_array("attention_mask", mask)
    if mask.dtype != np.bool_ and not is_integer(mask.dtype):
        refuse(
            "attention_mask",
            f"dtype {mask.dtype}",
            "bool or an integer dtype",
            "A mask of 0 and 1? Pass it as bool, mask != 0. Values to add to the logits are a bias.",
        )
    mask = check_pairs("attention_mask", mask, whole)
    # Compared in its own dtype: a 64-bit mask narrowed first could lose its only set bit.
    return jnp.asarray(mask if mask.dtype == np.bool_ else mask != 0)


def check_bias(bias: Any, whole: tuple[int, int, int, int]) -> jax.Array | None:
    """Return a bias with four axes (S2). whole: batch, query heads, rows and keys."""
    if bias is None:
        return None
    check_is_array("bias", bias)
    check_float("bias", bias)
    # Outside of what is differentiated by hand, so that the gradient has the shape that was given.
    return check_pairs("bias", jnp.asarray(bias), whole)


_SINK_ADVICE = "Sinks that all heads share are softmax_aux[None, :], one sink a head is softmax_aux[:, None]."


def _check_sinks(sinks: Any, heads: int) -> jax.Array | None:
    if sinks is None:
        return None
    check_is_array("softmax_aux", sinks)
    check_float("softmax_aux", sinks)
    per_head = sinks.ndim == 2 and sinks.shape[0] in (1, heads)
    if sinks.size == 0 or not (sinks.ndim == 1 or per_head):
        expected = f"[num_sinks], [1, num_sinks] or [{heads}, num_sinks] with at least one sink"
        refuse("softmax_aux", f"shape {sinks.shape}", expected, _SINK_ADVICE)
    if sinks.ndim == 1 and sinks.shape[0] == heads > 1:
        expected = (
            f"[1, {heads}] or [{heads}, 1], as {heads} heads could share {heads} sinks or have one each"
        )
        refuse("softmax_aux", f"shape {sinks.shape}", expected, _SINK_ADVICE)
    # Outside of what is differentiated by hand, so that the gradient has the shape that was given.
    return jnp.asarray(sinks).reshape(-1, sinks.shape[-1])


def _check_seed(seed: Any, dropout_prob: float) -> jax.Array | None:
    """Check the seed, even one that nothing uses, and return its two words."""
    if seed is None:
        if dropout_prob > 0.0:
            refuse(
                "dropout_seed", None, "a seed where dropout_prob > 0", "Pass an int, or a uint32 [2] array."
            )
        return None
    if isinstance(seed, jax.Array | np.ndarray) and seed.shape == (2,) and seed.dtype == np.uint32:
        return jnp.asarray(seed) if dropout_prob > 0.0 else None
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if seed.shape != ():
            refuse("dropout_seed", f"{seed.size} keys", "one key", "Split keys outside of the call.")
        return jax.random.bits(seed, (2,), "uint32") if dropout_prob > 0.0 else None
    number = check_integer(
        "dropout_seed", seed, "Pass a traced seed as a uint32 [2] array of (low, high) words."
    )
    if not 0 <= number < SEED_LIMIT:
        refuse("dropout_seed", shown(number), "0 <= dropout_seed < 2**64", "Reduce it modulo 2**64.")
    words = np.array([number & 0xFFFFFFFF, number >> 32], np.uint32)
    return known_numbers(words) if dropout_prob > 0.0 else None


def check_window(window: Any) -> Window:
    """Return the sides of a sliding window (S7)."""
    if window is None:
        return None, None
    sides: tuple[Any, ...]
    if isinstance(window, tuple | list):
        sides = tuple(window)
    else:
        side = check_integer("sliding_window", window, "Pass an int w for (w, w), or a pair (left, right).")
        sides = (side, side)
    if len(sides) != 2:
        refuse("sliding_window", shown(window), "an int or a pair (left, right)", "None leaves a side open.")
    left, right = (None if side is None else check_integer("sliding_window", side) for side in sides)
    if (left is not None and left < 0) or (right is not None and right < 0):
        refuse(
            "sliding_window", shown(window), "sides >= 0", "None leaves a side open; (0, 0) is the diagonal."
        )
    return left, right
