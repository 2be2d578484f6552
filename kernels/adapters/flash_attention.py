"""FlashAttention's functions `flash_attn_func` and its kin, on our kernels.

Names, order and defaults are those of `flash_attn` 2; the arguments of FlashAttention 3 that have a meaning
here are keywords. The page docs/how-to/adapters-peers.md lists what differs.
"""

from typing import Any

import jax

from attest.kernels.adapters.flash_attention_arguments import (
    NAMES,
    NAMES_WITH_CACHE,
    check_starts,
    check_tokens,
    in_cache,
    in_sequences,
    options_of,
    refuse_pages,
    unpacked,
)
from attest.kernels.adapters.shared import renamed
from attest.kernels.attention import flash_attention_with_lse
from attest.kernels.call.arrays import check_is_array
from attest.kernels.call.options import check_flag, check_integer
from attest.kernels.operations.functions import flash_attention

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
    options = options_of(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, attention_chunk, dropout_seed
    )
    check_flag("deterministic", deterministic)
    with_lse = check_flag("return_attn_probs", return_attn_probs)
    with renamed(NAMES):
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
    k, v = unpacked("kv", kv, 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    seed: dict[str, Any] = {"dropout_seed": dropout_seed, "platform": platform}
    with renamed({"k": "kv", "v": "kv"}):
        return flash_attn_func(q, k, v, *options, return_attn_probs, **seed)


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
    q, k, v = unpacked("qkv", qkv, 3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    seed: dict[str, Any] = {"dropout_seed": dropout_seed, "platform": platform}
    with renamed({"q": "qkv", "k": "qkv", "v": "qkv"}):
        return flash_attn_func(q, k, v, *options, return_attn_probs, **seed)


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
    seqused_k: jax.Array | None = None,
    dropout_seed: Any = None,
    platform: str | None = None,
) -> Result:
    """Compute attention over sequences that are packed one after another: out [total_q, Hq, Dv] (S9).

    q: [total_q, Hq, D]; k: [total_k, Hkv, D]; v: [total_k, Hkv, Dv]. cu_seqlens_q, cu_seqlens_k: [n + 1]
    int32 or int64, cumulative lengths from 0. max_seqlen_q, max_seqlen_k: the longest length; checked where
    the lengths are known, and not needed for anything else. seqused_k: [n] integer, how many keys of each
    sequence count, its first ones; all by default. The last row is aligned with the last of them.
    alibi_slopes: [Hq]. The other arguments are those of `flash_attn_func`; the lse is [Hq, total_q].

    Raises: as `flash_attn_func`; NotImplementedError for block_table, and for slopes [n, Hq].
    """
    refuse_pages(block_table)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tokens(name, x)
    check_starts("cu_seqlens_q", cu_seqlens_q, q.shape[0], "max_seqlen_q", max_seqlen_q)
    check_starts("cu_seqlens_k", cu_seqlens_k, k.shape[0], "max_seqlen_k", max_seqlen_k)
    if alibi_slopes is not None:
        check_is_array("alibi_slopes", alibi_slopes)
        if alibi_slopes.ndim != 1:
            raise NotImplementedError(
                f"alibi_slopes: got shape {alibi_slopes.shape}; expected [heads] for packed sequences. Pad "
                "the sequences and call flash_attn_func."
            )
    options = options_of(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, 0, dropout_seed
    )
    check_flag("deterministic", deterministic)
    with_lse = check_flag("return_attn_probs", return_attn_probs)
    options |= {"cum_seqlens_q": cu_seqlens_q, "cum_seqlens_k": cu_seqlens_k, "platform": platform}
    options |= in_sequences(q, cu_seqlens_q, cu_seqlens_k, seqused_k)
    with renamed(NAMES):
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
    refuse_pages(block_table)
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
    options = options_of(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, 0, None)
    with_lse = check_flag("return_softmax_lse", return_softmax_lse)
    options |= {"platform": platform, **in_cache(q, k_cache, cache_seqlens, cache_leftpad)}
    attend = flash_attention_with_lse if with_lse else flash_attention
    with renamed(NAMES_WITH_CACHE):
        return attend(q, k_cache, v_cache, **options)
