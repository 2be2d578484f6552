"""FlashAttention's functions `flash_attn_func` and its kin, on our kernels.

Names, order and defaults are those of `flash_attn` 2; the arguments of FlashAttention 3 that have a meaning
here are keywords. The page docs/how-to/adapters-peers.md lists what differs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.attention import flash_attention_with_lse
from attest.kernels.operations.functions import flash_attention
from attest.kernels.options import check_flag, check_integer, check_number, refuse, shown

type Window = tuple[int, int]
type Result = jax.Array | tuple[jax.Array, jax.Array, None]


def flash_attn_func(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: jax.Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attention_chunk: int = 0,
    dropout_seed: Any = None,
    platform: str | None = None,
) -> Result:
    """Compute attention as FlashAttention's function of this name: out [B, Sq, Hq, Dv], in the dtype of q.

    q: [B, Sq, Hq, D]; k: [B, Sk, Hkv, D]; v: [B, Sk, Hkv, Dv], of one dtype: float32, bfloat16 or float16. Hq
    is a multiple of Hkv. dropout_p: the share of the weights that is dropped, from 0 to below 1 (S12).
    dropout_seed: needed where it is not 0; an int, a uint32 [2], or a JAX random key. softmax_scale: 1 /
    sqrt(D) by default. causal: the last row is aligned with the last key (S6). window_size: (left, right),
    aligned alike (S7); -1 leaves a side open. softcap: c in c * tanh(logits / c) (S3); 0.0 is off.
    alibi_slopes: [Hq] or [B, Hq] float32 (S25), not beside a softcap. deterministic: accepted, since results
    have the same bits in every run (S17). attention_chunk: positions in a chunk (S24); 0 is off. platform: as
    in `attest.flash_attention`.

    return_attn_probs: True returns (out, lse, None): lse [B, Hq, Sq] float32, the natural logarithm of the
    sum of exp over the visible logits, which is differentiable here; probabilities are not computed. A row
    that sees no key has out 0 and lse -inf.

    Raises: ValueError naming a malformed argument; NotImplementedError for what no kernel of ours does.
    """
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, attention_chunk, dropout_seed
    )
    check_flag("deterministic", deterministic)
    with_lse = check_flag("return_attn_probs", return_attn_probs)
    if not with_lse:
        return flash_attention(q, k, v, **options, platform=platform)
    return *flash_attention_with_lse(q, k, v, **options, platform=platform), None


def flash_attn_kvpacked_func(
    q: jax.Array,
    kv: jax.Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: jax.Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_seed: Any = None,
    platform: str | None = None,
) -> Result:
    """Compute `flash_attn_func` of keys and values in one array: kv [B, Sk, 2, Hkv, D].

    Raises: as `flash_attn_func`.
    """
    k, v = _unpacked("kv", kv, 2, 5)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_func(q, k, v, *options, return_attn_probs, dropout_seed=dropout_seed, platform=platform)


def flash_attn_qkvpacked_func(
    qkv: jax.Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: jax.Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_seed: Any = None,
    platform: str | None = None,
) -> Result:
    """Compute `flash_attn_func` of queries, keys and values in one array: qkv [B, S, 3, H, D].

    Raises: as `flash_attn_func`.
    """
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_func(q, k, v, *options, return_attn_probs, dropout_seed=dropout_seed, platform=platform)


def flash_attn_varlen_func(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: jax.Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    dropout_seed: Any = None,
    platform: str | None = None,
) -> Result:
    """Compute attention over sequences that are packed one after another: out [total_q, Hq, Dv] (S9).

    q: [total_q, Hq, D]; k: [total_k, Hkv, D]; v: [total_k, Hkv, Dv]. cu_seqlens_q, cu_seqlens_k: [n + 1]
    int32 or int64, cumulative lengths from 0. max_seqlen_q, max_seqlen_k: the longest length; checked where
    the lengths are known, and not needed for anything else. alibi_slopes: [Hq]. The other arguments are those
    of `flash_attn_func`; the lse is [Hq, total_q].

    Raises: as `flash_attn_func`; NotImplementedError for block_table, and for slopes [n, Hq].
    """
    _refuse_pages(block_table)
    tokens: dict[str, Any] = {"q": q, "k": k, "v": v}
    for name, x in tokens.items():
        if not isinstance(x, jax.Array | np.ndarray) or x.ndim != 3:
            got = f"shape {x.shape}" if isinstance(x, jax.Array | np.ndarray) else f"a {type(x).__name__}"
            refuse(name, got, "[tokens, heads, head_dim]", "Pack the sequences one after another.")
    for name, lengths, longest in (
        ("max_seqlen_q", cu_seqlens_q, max_seqlen_q),
        ("max_seqlen_k", cu_seqlens_k, max_seqlen_k),
    ):
        _check_longest(name, lengths, longest)
    if alibi_slopes is not None and np.ndim(alibi_slopes) != 1:
        raise NotImplementedError(
            f"alibi_slopes: got shape {np.shape(alibi_slopes)}; expected [heads] for packed sequences. Pad "
            "the sequences and call flash_attn_func."
        )
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, 0, dropout_seed)
    check_flag("deterministic", deterministic)
    with_lse = check_flag("return_attn_probs", return_attn_probs)
    options |= {"cum_seqlens_q": cu_seqlens_q, "cum_seqlens_k": cu_seqlens_k, "platform": platform}
    if not with_lse:
        return flash_attention(q[None], k[None], v[None], **options)[0]
    out, lse = flash_attention_with_lse(q[None], k[None], v[None], **options)
    return out[0], lse[0], None


def flash_attn_with_kvcache(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: int | jax.Array | None = None,
    cache_batch_idx: Any = None,
    cache_leftpad: jax.Array | None = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: jax.Array | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    platform: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute attention of new queries over a cache: out [B, Sq, Hq, Dv], or (out, lse).

    q: [B, Sq, Hq, D]; k_cache: [B, Sk, Hkv, D]; v_cache: [B, Sk, Hkv, Dv]. cache_seqlens: how many keys of
    the cache count, an int or [B] integer; all by default. The last row is aligned with the last of them.
    cache_leftpad: [B] integer, the first key that counts. Arrays of JAX do not change in place, so the cache
    must hold the new keys already: k, v and rotary embeddings are refused. num_splits: 0 or 1, which change
    no result. The other arguments are those of `flash_attn_func`.

    Raises: as `flash_attn_func`; NotImplementedError for k, v, rotary_cos, rotary_sin, cache_batch_idx,
    block_table.
    """
    _refuse_pages(block_table)
    advice = "Write them to the cache with jax.lax.dynamic_update_slice, and count them in cache_seqlens."
    others = {
        "k": (k, advice),
        "v": (v, advice),
        "rotary_cos": (rotary_cos, "Rotate q and the keys before they are written to the cache."),
        "rotary_sin": (rotary_sin, "Rotate q and the keys before they are written to the cache."),
        "cache_batch_idx": (
            cache_batch_idx,
            "Give the entries k_cache[cache_batch_idx], and those of v_cache.",
        ),
    }
    for name, (x, what_to_do) in others.items():
        if x is not None:
            raise NotImplementedError(f"{name}: got a {type(x).__name__}; expected None. {what_to_do}")
    check_flag("rotary_interleaved", rotary_interleaved)
    if check_integer("num_splits", num_splits) not in (0, 1):
        advice = "The kernels choose how to split; leave it out."
        raise NotImplementedError(f"num_splits: got {num_splits}; expected 0 or 1. {advice}")
    options = _options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, 0, None)
    with_lse = check_flag("return_softmax_lse", return_softmax_lse)
    options |= {"platform": platform, **_in_cache(q, k_cache, cache_seqlens, cache_leftpad)}
    attend = flash_attention_with_lse if with_lse else flash_attention
    return attend(q, k_cache, v_cache, **options)


def _options(
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    attention_chunk: Any,
    dropout_seed: Any,
) -> dict[str, Any]:
    """The arguments of `attest.flash_attention` that mean the same."""
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


def _unpacked(name: str, x: Any, count: int, ndim: int) -> list[Any]:
    """The arrays that are packed along axis 2."""
    if not isinstance(x, jax.Array | np.ndarray):
        refuse(name, f"a {type(x).__name__}", "a JAX or NumPy array", "Convert it with jnp.asarray.")
    if x.ndim != ndim or x.shape[2] != count:
        expected = f"[batch, length, {count}, heads, head_dim]"
        refuse(name, f"shape {x.shape}", expected, "Stack the arrays along axis 2.")
    return [x[:, :, each] for each in range(count)]


def _refuse_pages(block_table: Any) -> None:
    if block_table is not None:
        raise NotImplementedError(
            f"block_table: got a {type(block_table).__name__}; expected None. Gather the pages of each "
            "sequence with jnp.take before the call."
        )


def _check_longest(name: str, lengths: Any, longest: Any) -> None:
    """Refuse a longest length that is exceeded, where the lengths are known."""
    limit = check_integer(name, longest)
    known = isinstance(lengths, jax.Array | np.ndarray) and not isinstance(lengths, Tracer)
    if known and lengths.ndim == 1 and lengths.size > 1:
        found = int(np.max(np.diff(np.asarray(lengths).astype(np.int64))))
        if found > limit:
            refuse(name, limit, f"at least {found}, the longest sequence", "Pass the length of the longest.")


def _in_cache(q: Any, k_cache: Any, lengths: Any, first: Any) -> dict[str, Any]:
    """The ranges of keys that count, and where the rows stand; what is malformed is left to the checks."""
    arrays = all(isinstance(x, jax.Array | np.ndarray) and x.ndim == 4 for x in (q, k_cache))
    if not arrays or (lengths is None and first is None):
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
    """A number of keys for each batch entry, [B] int32, checked where its values are known."""
    if not isinstance(x, jax.Array | np.ndarray):
        x = np.full(batch, check_integer(name, x))
    if x.shape != (batch,) or not jnp.issubdtype(x.dtype, jnp.integer):
        expected = f"an int, or an integer array ({batch},)"
        refuse(name, f"shape {x.shape} of {x.dtype}", expected, "Give every batch entry its number.")
    if not isinstance(x, Tracer) and x.size:
        low, high = int(np.min(np.asarray(x))), int(np.max(np.asarray(x)))
        if low < 0 or high > keys:
            got = low if low < 0 else high
            refuse(name, got, f"numbers from 0 to {keys}, the length of the cache", "Correct the lengths.")
    return jnp.asarray(x).astype(jnp.int32)
