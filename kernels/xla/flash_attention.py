"""Decides how attention runs in O(length) memory anywhere: key chunks, online softmax, recomputation.

The papers' symbols: S = scaled logits, P = probabilities, O = output, L = lse, dS and dP their cotangents,
Delta = rowsum(dO * O). Chunks: the outer loop walks (batch entry, query chunk), the inner one the key chunks
that some row of the query chunk may see; the logits of a tile are [key heads, group, chunk q, chunk k], so
the query heads of a group share their key head without repeating it.

Papers: Milakov and Gimelshein, arXiv 1805.02867 (online softmax); Rabe and Staats, arXiv 2112.05682 (chunks
in JAX); Dao, arXiv 2307.08691 (backward by recomputation from L and Delta).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels.arguments import Call, check_call, check_dtype, check_flag, check_size, refuse
from kernels.varying import vary_together
from kernels.xla.tiles import (
    Grid,
    RowChunks,
    cut,
    cut_pairs,
    cut_rows,
    key_chunk,
    select,
    tile_dropout,
    tile_logits,
)


@dataclass(frozen=True)
class ChunkSizes:
    """How many query rows and key rows one tile holds; larger than a length means the whole length.

    Results do not depend on it beyond rounding (clause S18). Temporary memory grows with heads * q * k.
    """

    q: int = 256
    k: int = 256


@dataclass(frozen=True)
class Settings:
    """What is static beside the call itself."""

    forward: ChunkSizes
    backward: ChunkSizes
    normalize_output: bool
    precision: Any
    logits_dtype: str


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    dropout_seed: int | jax.Array | None = None,
    cum_seqlens_q: jax.Array | None = None,
    cum_seqlens_k: jax.Array | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: ChunkSizes | None = None,
    bwd_params: ChunkSizes | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: jax.Array | None = None,
    normalize_output: bool = True,
    precision: Any = None,
    logits_dtype: Any = None,
    *,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
) -> jax.Array:
    """`flash_attention_with_lse` without the lse: out [B, Sq, Hq, Dv], dtype of query."""
    return flash_attention_with_lse(
        query,
        key,
        value,
        attention_mask,
        bias,
        softmax_scale,
        dropout_prob,
        causal,
        dropout_seed,
        cum_seqlens_q,
        cum_seqlens_k,
        sliding_window,
        fwd_params,
        bwd_params,
        logits_soft_cap,
        softmax_aux,
        normalize_output,
        precision,
        logits_dtype,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
    )[0]


def flash_attention_with_lse(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    dropout_seed: int | jax.Array | None = None,
    cum_seqlens_q: jax.Array | None = None,
    cum_seqlens_k: jax.Array | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: ChunkSizes | None = None,
    bwd_params: ChunkSizes | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: jax.Array | None = None,
    normalize_output: bool = True,
    precision: Any = None,
    logits_dtype: Any = None,
    *,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention in O(length) memory: out [B, Sq, Hq, Dv], and lse [B, Hq, Sq] float32 (natural logarithm).

    Args:
        query: [B, Sq, Hq, D]; key: [B, Sk, Hkv, D]; value: [B, Sk, Hkv, Dv]; one dtype of float32, bfloat16,
            float16.
        attention_mask: [B or 1, Hq or 1, Sq, Sk] bool or integer, non-zero may attend (S5).
        bias: [B or 1, Hq or 1, Sq or 1, Sk] float, added to the scaled logits before the cap (S2); -inf
            hides.
        softmax_scale: static; 1 / sqrt(D) by default (S1).
        dropout_prob, dropout_seed: S12; the seed is an int in [0, 2**64) or a uint32 [2] of its (low, high)
            words.
        causal, sliding_window: bottom-right aligned, per sequence under lengths (S6, S7).
        cum_seqlens_q, cum_seqlens_k: [n + 1] int32; packed where B is 1, padded where B is n (S9).
        fwd_params, bwd_params: chunk sizes of the two passes.
        logits_soft_cap: cap * tanh(logits / cap) (S3).
        softmax_aux: [num_sinks] or [Hq, num_sinks] float sink logits (S11).
        normalize_output: False returns the numerator sum_j exp(t_j - m) v_j instead, m being the row maximum
            over the
            visible capped logits and the sinks. In differentiation m is a constant, so it equals
            out * exp(lse - stop_gradient(m)).
        precision: that of every dot, as `jax.lax.dot_general` takes it. None is the backend's default: full
            float32
            on CPU, but TF32 or bfloat16 products on accelerators unless "highest" is given.
        logits_dtype: the scaled dot products are rounded to it before bias, cap and softmax; float32 by
            default.
            Gradients pass through that rounding unchanged.
        q_segment_ids, kv_segment_ids: [B, Sq], [B, Sk] integer, negative is padding (S8).

    Numerics: inputs are widened to float32, which is exact, and every dot, exp and sum is float32; P and dS
    stay float32 for the second dot (nothing is cast down); out and each gradient are rounded once, to their
    input's dtype. Delta uses out as rounded. Gradients of bias and softmax_aux are accumulated over their
    broadcast axes in float32.

    Rows that see no key: out 0, gradients 0, lse -inf, or logsumexp of the sinks unless the row is padding,
    when it is -inf (S9 to S11). A hidden key contributes nothing, NaN and inf included (S4); a visible
    non-finite value makes the channels it belongs to NaN in the rows that give it weight.

    Differentiable once in reverse mode, in query, key, value, bias and softmax_aux, for cotangents of out
    and lse.

    Raises: ValueError naming the argument (S20).
    """
    call = check_call(
        query,
        key,
        value,
        attention_mask=attention_mask,
        bias=bias,
        softmax_scale=softmax_scale,
        dropout_prob=dropout_prob,
        causal=causal,
        dropout_seed=dropout_seed,
        cum_seqlens_q=cum_seqlens_q,
        cum_seqlens_k=cum_seqlens_k,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        softmax_aux=softmax_aux,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
    )
    settings = Settings(
        forward=_check_chunks("fwd_params", fwd_params),
        backward=_check_chunks("bwd_params", bwd_params),
        normalize_output=check_flag("normalize_output", normalize_output),
        precision=_check_precision(precision),
        logits_dtype="float32" if logits_dtype is None else check_dtype("logits_dtype", logits_dtype),
    )
    return _attend(settings, call)


# One jitted entry: an eager call compiles once per signature instead of retracing its loops on every call.
@partial(jax.jit, static_argnums=0)
def _attend(settings: Settings, call: Call) -> tuple[jax.Array, jax.Array]:
    batch, q_length, q_heads, _ = call.query.shape
    if batch == 0:
        empty = jnp.zeros((0, q_length, q_heads, call.value.shape[3]), call.query.dtype)
        return empty, jnp.zeros((0, q_heads, q_length), jnp.float32)
    return _flash(settings, vary_together(call))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(settings: Settings, call: Call) -> tuple[jax.Array, jax.Array]:
    out, lse, _ = _forward(settings, call)
    return out, lse


def _flash_fwd(settings: Settings, call: Call) -> tuple[tuple[jax.Array, jax.Array], Any]:
    out, lse, row_max = _forward(settings, call)
    return (out, lse), (call, out, lse, row_max)


def _flash_bwd(
    settings: Settings,
    residuals: tuple[Call, jax.Array, jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[Call]:
    return (_backward(settings, *residuals, *cotangents),)


_flash.defvjp(_flash_fwd, _flash_bwd)


def _forward(settings: Settings, call: Call) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out, lse, and the maximum over visible keys alone: [B, Hq, Sq] float32, -inf where a row sees none."""
    grid = cut(call, settings.forward.q, settings.forward.k)
    pairs = cut_pairs(call, grid)
    keys, values = grid.split_keys(call.key), grid.split_keys(call.value)
    non_finite = (~jnp.isfinite(values).all()).astype(jnp.int32)
    sinks = _group_sinks(call)
    dot = partial(jnp.einsum, precision=settings.precision)
    lanes = (grid.k_heads, grid.group, grid.q)

    def row_chunk(args: tuple[jax.Array, jax.Array, RowChunks]) -> tuple[jax.Array, jax.Array, jax.Array]:
        step, Q, row = args

        def key_tile(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
            m, norm, acc = carry
            K, V = (select(x, key_chunk(grid, step, j)) for x in (keys, values))
            products = dot("hgqd,hkd->hgqk", Q, K)
            S, _, _ = tile_logits(call, grid, pairs, row, step, j, products, settings.logits_dtype)
            m_new = jnp.maximum(m, S.max(axis=-1))
            shift = _finite_or_zero(m_new)
            P = jnp.exp(S - shift[..., None])
            alpha = jnp.exp(m - shift)
            norm = alpha * norm + P.sum(axis=-1)
            P_kept = tile_dropout(call, grid, pairs, step, j, P)
            acc = alpha[..., None] * acc + dot("hgqk,hkd->hgqd", P_kept, _zero_non_finite(V))

            # A hidden value must not leak as 0 * NaN, so non-finite values are left out above and, should
            # there be any, shown here to the rows that give them weight. A loop of no or one turn, because
            # vmap would make a cond pay for both branches.
            def reveal(_: jax.Array, acc: jax.Array) -> jax.Array:
                seen = (P_kept > 0).astype(jnp.float32), (~jnp.isfinite(V)).astype(jnp.float32)
                return jnp.where(dot("hgqk,hkd->hgqd", *seen) > 0, jnp.float32(jnp.nan), acc)

            return m_new, norm, lax.fori_loop(jnp.int32(0), non_finite, reveal, acc)

        start = (
            jnp.full(lanes, -jnp.inf, jnp.float32),
            jnp.zeros(lanes, jnp.float32),
            jnp.zeros((*lanes, values.shape[-1]), jnp.float32),
        )
        m, norm, acc = lax.fori_loop(row.k_start, row.k_stop, key_tile, vary_together((start, Q))[0])
        row_max = m
        if sinks is not None:
            m = jnp.maximum(row_max, sinks.max(axis=-1)[..., None])
            shift = _finite_or_zero(m)
            alpha = jnp.exp(row_max - shift)
            norm = alpha * norm + jnp.exp(sinks[..., None, :] - shift[..., None]).sum(axis=-1)
            acc = alpha[..., None] * acc
        lse = _finite_or_zero(m) + jnp.log(norm)
        if row.padding is not None:
            lse = jnp.where(row.padding[None, None], -jnp.inf, lse)
        if settings.normalize_output:
            acc = acc / jnp.where(norm == 0, jnp.float32(1), norm)[..., None]
        return acc.astype(call.query.dtype), lse, row_max

    steps = jnp.arange(grid.batch * grid.q_count, dtype=jnp.int32)
    out, lse, row_max = lax.map(row_chunk, (steps, grid.split_rows(call.query), cut_rows(call, grid)))
    return grid.join_rows(out), grid.join_row_values(lse), grid.join_row_values(row_max)


def _backward(
    settings: Settings,
    call: Call,
    out: jax.Array,
    lse: jax.Array,
    row_max: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
) -> Call:
    """The cotangents of a call's float arrays, in the arrays' own dtypes (S14, S15)."""
    grid = cut(call, settings.backward.q, settings.backward.k)
    pairs = cut_pairs(call, grid)
    keys, values = (_zero_non_finite(grid.split_keys(x)) for x in (call.key, call.value))
    sinks = _group_sinks(call)
    dot = partial(jnp.einsum, precision=settings.precision)

    # Rows that see no key take no part, whatever their query and cotangent hold.
    row_max = grid.split_row_values(row_max, -jnp.inf)
    sees = (row_max != -jnp.inf)[..., None]
    queries, d_outs = (jnp.where(sees, grid.split_rows(x), jnp.float32(0)) for x in (call.query, d_out))
    lses = grid.split_row_values(lse, -jnp.inf)
    d_lses = jnp.where(lses == -jnp.inf, jnp.float32(0), grid.split_row_values(d_lse, 0))
    if settings.normalize_output:
        deltas = (d_outs * grid.split_rows(out)).sum(axis=-1) - d_lses
    else:
        # out = O exp(L - m): the part of Delta that comes through O cancels the one that comes through L.
        m = row_max if sinks is None else jnp.maximum(row_max, sinks.max(axis=-1)[None, ..., None])
        d_outs, deltas = d_outs * jnp.exp(lses - _finite_or_zero(m))[..., None], -d_lses

    def row_chunk(sums: tuple[jax.Array, jax.Array, jax.Array | None], args: tuple[Any, ...]):
        step, Q, dO, L, delta, row = args

        def key_tile(j: jax.Array, carry: tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None]]):
            dQ, (dK, dV, dbias) = carry
            at = key_chunk(grid, step, j)
            K, V = select(keys, at), select(values, at)
            products = dot("hgqd,hkd->hgqk", Q, K)
            S, visible, slope = tile_logits(call, grid, pairs, row, step, j, products, settings.logits_dtype)
            P = _hide(visible, jnp.exp(S - L[..., None]))
            dP = tile_dropout(call, grid, pairs, step, j, dot("hgqd,hkd->hgqk", dO, V))
            dS = P * (dP - delta[..., None])
            dS = _hide(visible, dS if slope is None else dS * slope)
            P_kept = tile_dropout(call, grid, pairs, step, j, P)
            dQ = dQ + dot("hgqk,hkd->hgqd", dS, K)
            dK = _add_at(dK, at, dot("hgqk,hgqd->hkd", dS, Q))
            dV = _add_at(dV, at, dot("hgqk,hgqd->hkd", P_kept, dO))
            if dbias is not None:
                dbias = _add_bias_tile(grid, dbias, step, j, dS)
            return dQ, (dK, dV, dbias)

        dQ, sums = lax.fori_loop(
            row.k_start, row.k_stop, key_tile, (vary_together((jnp.zeros_like(Q), Q))[0], sums)
        )
        return sums, (dQ * call.softmax_scale).astype(call.query.dtype)

    steps = jnp.arange(grid.batch * grid.q_count, dtype=jnp.int32)
    sums = (
        jnp.zeros_like(keys),
        jnp.zeros_like(values),
        None if pairs.bias is None else jnp.zeros_like(pairs.bias),
    )
    rows = (steps, queries, d_outs, lses, deltas, cut_rows(call, grid))
    (dK, dV, dbias), dQ = lax.scan(row_chunk, vary_together((sums, queries))[0], rows)
    return replace(
        call,
        query=grid.join_rows(dQ),
        key=grid.join_keys((dK * call.softmax_scale).astype(call.key.dtype)),
        value=grid.join_keys(dV.astype(call.value.dtype)),
        bias=None if call.bias is None else _round_bias(grid, dbias, call.bias),
        softmax_aux=None if sinks is None else _sink_cotangent(call, sinks, lses, deltas),
        attention_mask=None,
        q_segment_ids=None,
        kv_segment_ids=None,
        cum_seqlens_q=None,
        cum_seqlens_k=None,
        dropout_seed=None,
    )


def _group_sinks(call: Call) -> jax.Array | None:
    """The sinks as [k_heads, group, num_sinks] float32, or [1, 1, num_sinks] where all heads share them."""
    sinks = call.softmax_aux
    if sinks is None:
        return None
    k_heads = call.key.shape[2]
    heads = (k_heads, call.query.shape[2] // k_heads) if sinks.ndim == 2 else (1, 1)
    return sinks.astype(jnp.float32).reshape(*heads, sinks.shape[-1])


def _sink_cotangent(call: Call, sinks: jax.Array, lses: jax.Array, deltas: jax.Array) -> jax.Array:
    """sum over batch, rows and shared heads of p_sink * (0 - delta): a sink has no value (S14)."""
    assert call.softmax_aux is not None
    padding = lses == -jnp.inf
    p = jnp.exp(sinks[None, ..., None, :] - jnp.where(padding, jnp.float32(0), lses)[..., None])
    per_head = -jnp.where(padding[..., None], jnp.float32(0), p * deltas[..., None]).sum(axis=(0, 3))
    if call.softmax_aux.ndim == 1:
        per_head = per_head.sum(axis=(0, 1))
    return per_head.reshape(call.softmax_aux.shape).astype(call.softmax_aux.dtype)


def _add_bias_tile(grid: Grid, dbias: jax.Array, step: jax.Array, j: jax.Array, dS: jax.Array) -> jax.Array:
    tile = grid.tile(dbias, step, j)
    broadcast = tuple(axis for axis in range(3) if tile.shape[axis] == 1)
    tile = tile + dS.sum(axis=broadcast, keepdims=True)
    return lax.dynamic_update_slice(dbias, tile[None], grid.tile_start(dbias, step, j))


def _round_bias(grid: Grid, dbias: jax.Array | None, bias: jax.Array) -> jax.Array:
    assert dbias is not None
    return grid.join_heads(dbias, bias.shape).astype(bias.dtype)


def _add_at(total: jax.Array, index: jax.Array, x: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(total, select(total, index) + x, index, axis=0)


def _hide(visible: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if visible is None else jnp.where(visible, x, jnp.float32(0))


def _zero_non_finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.float32(0))


def _finite_or_zero(m: jax.Array) -> jax.Array:
    """A shift for exp: 0 for a row that has seen nothing, since -inf - -inf is NaN."""
    return jnp.where(m == -jnp.inf, jnp.float32(0), m)


def _check_chunks(name: str, chunks: Any) -> ChunkSizes:
    if chunks is None:
        return ChunkSizes()
    if not isinstance(chunks, ChunkSizes):
        refuse(name, f"a {type(chunks).__name__}", "ChunkSizes", "Build it as ChunkSizes(q=256, k=256).")
    return ChunkSizes(check_size(f"{name}.q", chunks.q), check_size(f"{name}.k", chunks.k))


def _check_precision(precision: Any) -> Any:
    """Anything `jax.lax.dot_general` takes, hashable."""
    if isinstance(precision, list):
        precision = tuple(precision)
    try:
        jax.eval_shape(partial(jnp.dot, precision=precision), *(jax.ShapeDtypeStruct((1, 1), "float32"),) * 2)
    except (TypeError, ValueError):
        refuse(
            "precision",
            repr(precision),
            "a precision of jax.lax.dot_general",
            "None is the backend's default.",
        )
    return precision
