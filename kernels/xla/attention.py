"""Attention without a loop: all logits at once, differentiated by JAX itself.

It keeps the clauses in their order on whole arrays and returns the weights, at a cost of O(Sq * Sk) memory.
Its gradients come from autodiff alone, so it is a second opinion on every hand-written backward pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attest.kernels.annotations import (
    AlibiSlopes,
    AttentionMask,
    Bias,
    CumSeqlens,
    DropoutSeed,
    DropoutShared,
    Flag,
    Key,
    KVPositions,
    KVRange,
    KVSegmentIds,
    Number,
    Origin,
    Out,
    QOffset,
    QPositions,
    QSegmentIds,
    Query,
    RandomKey,
    Sinks,
    Size,
    SlidingWindow,
    Value,
    Weights,
)
from attest.kernels.arguments import AttentionArguments, check_arguments, merged
from attest.kernels.call.call import Call
from attest.kernels.call.leading_axes import split
from attest.kernels.call.options import check_dtype, check_flag, refuse, shown
from attest.kernels.masks.mask_info import MaskInfo
from attest.kernels.varying import vary_together
from attest.kernels.visibility.intervals import describe_rows, visible_tile
from attest.kernels.with_mask_info import with_mask_info
from attest.kernels.xla.all_pairs import whole_alibi, whole_keep_mask
from attest.kernels.xla.tiles import capped, grouped_sinks, scaled_products

# In float32 on every backend: the default of accelerators rounds the weights to TF32 or bfloat16.
_dot = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def attention(
    query: Query,
    key: Key,
    value: Value,
    attention_mask: AttentionMask | None = None,
    bias: Bias | None = None,
    init_bias: Callable[[], Bias] | None = None,
    deterministic: Flag = True,
    dropout_rng: RandomKey | None = None,
    softmax_aux: Sinks | None = None,
    softmax_scale: Number | None = None,
    logits_soft_cap: Number | None = None,
    dtype: Any = None,
    softmax_dtype: Any = None,
    dropout_prob: Number = 0.0,
    causal: Flag = False,
    sliding_window: SlidingWindow | None = None,
    *,
    dropout_seed: DropoutSeed | None = None,
    cum_seqlens_q: CumSeqlens | None = None,
    cum_seqlens_k: CumSeqlens | None = None,
    q_segment_ids: QSegmentIds | None = None,
    kv_segment_ids: KVSegmentIds | None = None,
    q_offset: QOffset | None = None,
    q_positions: QPositions | None = None,
    kv_positions: KVPositions | None = None,
    origin: Origin | None = None,
    chunk_size: Size | None = None,
    kv_start: KVRange | None = None,
    kv_end: KVRange | None = None,
    alibi_slopes: AlibiSlopes | None = None,
    dropout_shared: DropoutShared | None = None,
    mask_info: MaskInfo | None = None,
) -> tuple[Out, Weights]:
    """Compute materialised attention: (out [B, Sq, Hq, Dv], weights [B, Hq, Sq, Sk]), both in `dtype`.

    The weights are the normalised probabilities after dropout, those that multiply the values; hidden pairs
    are 0.

    Args beyond those of `flash_attention`, which means the same by the same names:
        init_bias: called without arguments for a bias where `bias` is None.
        deterministic: True switches dropout off, whatever `dropout_prob` says.
        dropout_rng: a JAX key; the 64-bit seed is `jax.random.bits(dropout_rng, (2,), uint32)`, (low, high)
            words.
        dropout_seed: the seed itself; wins over `dropout_rng`.
        dtype: of out and weights; query's by default. Both are rounded to it once.
        softmax_dtype: of logits, exp and normaliser; float32 by default. Dots accumulate in float32.

    Numerics: inputs are widened to float32, which is exact; the weights multiply the values in
    `softmax_dtype` widened to float32, before they are rounded to `dtype`.

    A hidden key contributes nothing, NaN and inf included (S4). Rows that see no key have weights 0 and out
    0 (S10).

    Raises: ValueError naming the argument (S20).
    """
    if bias is None and init_bias is not None:
        if not callable(init_bias):
            refuse("init_bias", shown(init_bias), "a callable without arguments", "Pass arrays as bias.")
        bias = init_bias()
    drops = not check_flag("deterministic", deterministic)
    if drops and dropout_seed is None and dropout_rng is not None:
        dropout_seed = _seed_of_key(dropout_rng)
    arguments, leading = merged(
        AttentionArguments(
            query=query,
            key=key,
            value=value,
            attention_mask=attention_mask,
            bias=bias,
            softmax_scale=softmax_scale,
            dropout_prob=dropout_prob if drops else 0.0,
            causal=causal,
            dropout_seed=dropout_seed,
            cum_seqlens_q=cum_seqlens_q,
            cum_seqlens_k=cum_seqlens_k,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            softmax_aux=softmax_aux,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            q_offset=q_offset,
            q_positions=q_positions,
            kv_positions=kv_positions,
            origin=origin,
            chunk_size=chunk_size,
            kv_start=kv_start,
            kv_end=kv_end,
            alibi_slopes=alibi_slopes,
            dropout_shared=dropout_shared,
            mask_info=mask_info,
        )
    )
    call = check_arguments(with_mask_info(arguments))
    out_dtype = call.query.dtype.name if dtype is None else check_dtype("dtype", dtype)
    wide = "float32" if softmax_dtype is None else check_dtype("softmax_dtype", softmax_dtype)
    out, weights = _attend(out_dtype, wide, vary_together(call))
    return split(out, leading), split(weights, leading)


@partial(jax.jit, static_argnums=(0, 1))
def _attend(out_dtype: str, softmax_dtype: str, call: Call) -> tuple[jax.Array, jax.Array]:
    batch, q_length, q_heads, head_dim = call.query.shape
    k_length, k_heads = call.key.shape[1:3]
    grouped = (batch, k_heads, q_heads // k_heads, q_length, k_length)

    def per_pair(x: jax.Array) -> jax.Array:
        """Reshape [B, Hq, Sq, Sk] to [B, Hkv, group, Sq, Sk]."""
        return jnp.broadcast_to(x, (batch, q_heads, q_length, k_length)).reshape(grouped)

    visible = _visible(call)
    rows_see = visible.any(axis=-1)  # [B, Hq, Sq]
    # Each `where` cuts a value off from the gradient too: what is stored where nothing looks never becomes 0
    # * NaN.
    query = call.query.astype(jnp.float32).transpose(0, 2, 1, 3)
    query = jnp.where(rows_see[..., None], query, jnp.float32(0)).reshape(*grouped[:4], head_dim)
    key, value = (x.astype(jnp.float32).transpose(0, 2, 1, 3) for x in (call.key, call.value))
    key_finite = jnp.isfinite(key)
    broken = (~key_finite).any(axis=-1)[:, :, None, None, :]
    key = jnp.where(key_finite, key, jnp.float32(0))

    logits = scaled_products(_dot, "bhgqd,bhkd->bhgqk", call, query, key)
    logits = jnp.where(broken, jnp.float32(jnp.nan), logits).astype(softmax_dtype)
    if call.bias is not None:
        bias = jnp.where(call.bias == -jnp.inf, jnp.zeros((), call.bias.dtype), call.bias)
        logits = logits + per_pair(bias.astype(softmax_dtype))
    alibi = whole_alibi(call, describe_rows(call))
    if alibi is not None:
        logits = logits + per_pair(alibi.astype(softmax_dtype))
    if call.logits_soft_cap is not None:
        # The softmax cuts hidden logits off behind the cap, whose own derivative NaN must not reach either.
        logits = jnp.where(per_pair(visible), logits, jnp.zeros((), logits.dtype))
        logits = capped(jnp.tanh(logits / call.logits_soft_cap), call.logits_soft_cap)
    sinks = grouped_sinks(call, softmax_dtype)
    sinks = None if sinks is None else sinks[None, :, :, None]
    weights = _softmax(logits, per_pair(visible), sinks)

    if call.dropout_seed is not None:
        keep = whole_keep_mask(call, call.dropout_seed).reshape(grouped)
        weights = jnp.where(keep, weights * (1 / (1 - call.dropout_prob)), jnp.zeros((), weights.dtype))
    out = _weigh(weights.astype(jnp.float32), value)
    out = out.reshape(batch, q_heads, q_length, call.value.shape[3])
    out = jnp.where(rows_see[..., None], out, jnp.float32(0)).transpose(0, 2, 1, 3)
    weights = weights.reshape(batch, q_heads, q_length, k_length)
    return out.astype(out_dtype), weights.astype(out_dtype)


def _visible(call: Call) -> jax.Array:
    """Return [B, Hq, Sq, Sk] bool: the one tile that is the whole array (S5)."""
    batch, q_length, q_heads, _ = call.query.shape
    k_length = call.key.shape[1]
    rows = describe_rows(call)
    visible = visible_tile(
        jnp.arange(k_length, dtype=jnp.int32),
        None if rows.first is None else rows.first[:, None],
        None if rows.last is None else rows.last[:, None],
        None if call.q_segment_ids is None else call.q_segment_ids[:, None],
        None if call.kv_segment_ids is None else call.kv_segment_ids[:, None],
        call.attention_mask,
        call.bias,
        None if rows.lowest is None else rows.lowest[:, None],
        None if rows.highest is None else rows.highest[:, None],
        None if call.positions.kv is None else call.positions.kv[:, None],
    )
    shape = (batch, q_heads, q_length, k_length)
    return jnp.ones(shape, bool) if visible is None else jnp.broadcast_to(visible, shape)


def _softmax(logits: jax.Array, visible: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Return weights of the visible pairs, 0 elsewhere; sinks take part in the normaliser only (S10, S11)."""
    zero = jnp.zeros((), logits.dtype)
    m = jnp.where(visible, logits, -jnp.inf).max(axis=-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        m = jnp.maximum(m, sinks.max(axis=-1, keepdims=True))
    m = lax.stop_gradient(jnp.where(m == -jnp.inf, zero, m))
    e = jnp.where(visible, jnp.exp(jnp.where(visible, logits - m, zero)), zero)
    total = e.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - m).sum(axis=-1, keepdims=True)
    return e / jnp.where(total == 0, jnp.ones((), logits.dtype), total)


def _weigh(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Return weights @ value, where a non-finite value shows only in the rows that give it weight (S4)."""
    finite = jnp.isfinite(value)
    out = _dot("bhgqk,bhkd->bhgqd", weights, jnp.where(finite, value, jnp.float32(0)))

    def propagate_nonfinite(out: jax.Array) -> jax.Array:
        seen = (weights > 0).astype(jnp.float32), (~finite).astype(jnp.float32)
        return out + jnp.where(_dot("bhgqk,bhkd->bhgqd", *seen) > 0, jnp.float32(jnp.nan), 0.0)

    return lax.cond(finite.all(), lambda out: out, propagate_nonfinite, out)


def _seed_of_key(key: Any) -> jax.Array:
    try:
        return jax.random.bits(key, (2,), jnp.uint32)
    except (TypeError, ValueError):
        refuse("dropout_rng", shown(key), "a JAX random key", "Make one with jax.random.key(seed).")
