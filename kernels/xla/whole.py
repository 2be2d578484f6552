"""Attention of a small problem in one piece: all logits at once, the batch as an axis, no loop.

It is what tiles of `attest.kernels.xla.flash_attention` compute where there is one tile for each batch
entry, in the same arithmetic, without the loops that a compiler and a processor take longer for than for the
products. The backward pass keeps the weights, as memory for them is at hand.

Axes: b batch, h key heads, g query heads of a key head, q queries, k keys, d channels. The rows of a product,
r, are q for each of g.
"""

import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attest.kernels.arguments import Call
from attest.kernels.cotangents import RowTerms
from attest.kernels.implementation import Backward, Forward, Settings
from attest.kernels.symbolic import is_symbolic
from attest.kernels.visibility import Rows, describe_rows, visible_tile
from attest.kernels.xla.all_pairs import whole_alibi, whole_keep_mask
from attest.kernels.xla.tiles import (
    Weighed,
    any_nonfinite,
    grouped_sinks,
    restricted_logits,
    scaled_products,
)

# The sizes up to which a problem is small.
LIMITS = tomllib.loads((Path(__file__).parent / "whole.toml").read_text())


def takes(call: Call) -> bool:
    """Return whether a call is small enough, by the logits of a head and those of the whole call."""
    batch, q_length, heads, _ = call.query.shape
    pairs = q_length * call.key.shape[1]
    return (
        not is_symbolic(call)
        and 0 < pairs <= LIMITS["pairs"]
        and batch * heads * pairs <= LIMITS["all_pairs"]
    )


def forward(settings: Settings, call: Call) -> Forward:
    """Return the results of the pass; it keeps `Weighed`, its arrays [b, h, g, q, k], unless unrounded."""
    dot = partial(jnp.einsum, precision=settings.precision)
    rows = describe_rows(call)
    visible = _visible(call, rows)
    query, key, value = _by_head(call)
    S, slope = _logits(settings, call, rows, visible, query, key)

    row_max = S.max(axis=-1)
    m = row_max
    sinks = grouped_sinks(call)
    if sinks is not None:
        sinks = sinks[None, :, :, None]
        m = jnp.maximum(m, sinks.max(axis=-1))
    shift = m if visible is None else jnp.where(m == -jnp.inf, jnp.float32(0), m)
    P = jnp.exp(S - shift[..., None])
    norm = _sum_keys(P)
    if sinks is not None:
        norm = norm + jnp.exp(sinks - shift[..., None]).sum(axis=-1)
    lse = shift + jnp.log(norm)
    keep = _keep(call, P)
    hides = visible is not None or keep is not None
    out = _weigh(dot, call, _rows(_dropped(call, keep, P)), value, hides)
    if settings.normalize_output:
        # The largest weight is 1, so the norm is less than that only where a row sees nothing.
        divisor = norm if visible is None else jnp.maximum(norm, jnp.float32(1))
        out = out / divisor.reshape(*out.shape[:3], 1)
    lse, row_max = (x.reshape(x.shape[0], -1, x.shape[3]) for x in (lse, row_max))
    out = _by_token(call, out).astype(settings.result_dtype(call.query.dtype))
    return Forward(out, lse, row_max, None if settings.unrounded else Weighed(norm, P, slope, keep))


def backward(settings: Settings, call: Call, terms: RowTerms, kept: Weighed | None) -> Backward:
    """Return the gradients of a call's float arrays in float32 (S14, S15)."""
    dot = partial(jnp.einsum, precision=settings.precision)
    rows = describe_rows(call)
    visible = _visible(call, rows)
    query, key, value = _by_head(replace(call, query=terms.query))
    if visible is not None or call.dropout_seed is not None:
        key, value = (jnp.where(jnp.isfinite(x), x, jnp.float32(0)) for x in (key, value))
    if kept is None:
        kept = _weighed_by_lse(call, terms.lse, *_logits(settings, call, rows, visible, query, key))

    # P is relative to the row maximum: what it is divided by goes to the rows of dO and Delta.
    divisor = kept.norm
    if visible is not None:
        # A row that is not a number must not reach the keys that are hidden from it.
        divisor = jnp.where((divisor == 0) | jnp.isnan(divisor), jnp.inf, divisor)
    of_rows = 1 / divisor
    delta = terms.delta.reshape(of_rows.shape) * of_rows
    of_d_out = of_rows if terms.weight is None else of_rows * terms.weight.reshape(of_rows.shape)
    dO = _query_rows(call, terms.d_out)
    dO = dO * of_d_out.reshape(*dO.shape[:3], 1)

    P = kept.weights if visible is None else jnp.where(visible, kept.weights, jnp.float32(0))
    dV = dot("bhrk,bhrd->bhkd", _rows(_dropped(call, kept.keep, P)), dO)
    dP = _dropped(call, kept.keep, _split_rows(call, dot("bhrd,bhkd->bhrk", dO, value)))
    dS = P * (dP - delta[..., None])
    if kept.slope is not None:
        dS = dS * kept.slope
    if visible is not None:
        dS = jnp.where(visible, dS, jnp.float32(0))
    dQ = dot("bhrk,bhkd->bhrd", _rows(dS), key) * call.softmax_scale
    dK = dot("bhrk,bhrd->bhkd", _rows(dS), query) * call.softmax_scale
    d_bias = None
    if call.bias is not None:
        by_head = dS.reshape(call.query.shape[0], call.query.shape[2], *dS.shape[3:])
        broadcast = tuple(axis for axis, size in enumerate(call.bias.shape) if size == 1)
        d_bias = by_head.sum(axis=broadcast, keepdims=True)
    dQ, dK, dV = _by_token(call, dQ), dK.transpose(0, 2, 1, 3), dV.transpose(0, 2, 1, 3)
    return Backward(dQ, dK, dV, d_bias)


def _logits(
    settings: Settings,
    call: Call,
    rows: Rows,
    visible: jax.Array | None,
    query: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """The logits [b, h, g, q, k] of query and key by head, and the derivative of the cap."""
    dot = partial(jnp.einsum, precision=settings.precision)
    products = _split_rows(call, scaled_products(dot, "bhrd,bhkd->bhrk", call, query, key))
    bias, alibi = (_by_pair(call, x) for x in (call.bias, whole_alibi(call, rows)))
    return restricted_logits(call, products, bias, alibi, visible, settings.logits_dtype)


def _weighed_by_lse(call: Call, lse: jax.Array, S: jax.Array, slope: jax.Array | None) -> Weighed:
    """What the forward pass would keep, from the lse of `RowTerms`: the weights are normalised by it."""
    L = lse.reshape(S.shape[:-1])
    # No weight is above 1: see `RowTerms`.
    P = jnp.exp(jnp.minimum(S - L[..., None], jnp.float32(0)))
    return Weighed(jnp.ones_like(L), P, slope, _keep(call, P))


def _keep(call: Call, P: jax.Array) -> jax.Array | None:
    """The pairs that dropout keeps, in the shape of P; None without dropout."""
    return None if call.dropout_seed is None else whole_keep_mask(call, call.dropout_seed).reshape(P.shape)


def _by_head(call: Call) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The query [b, h, r, d], key and value [b, h, k, d], float32."""
    key, value = (x.astype(jnp.float32).transpose(0, 2, 1, 3) for x in (call.key, call.value))
    return _query_rows(call, call.query), key, value


def _query_rows(call: Call, x: jax.Array) -> jax.Array:
    """[B, Sq, Hq, C] as [b, h, r, C] float32."""
    batch, q_length, q_heads, channels = x.shape
    k_heads = call.key.shape[2]
    x = x.astype(jnp.float32).reshape(batch, q_length, k_heads, q_heads // k_heads, channels)
    return x.transpose(0, 2, 3, 1, 4).reshape(batch, k_heads, -1, channels)


def _by_token(call: Call, x: jax.Array) -> jax.Array:
    """The inverse of `_query_rows`."""
    batch, q_length, q_heads, _ = call.query.shape
    x = x.reshape(batch, q_heads, q_length, x.shape[3])
    return x.transpose(0, 2, 1, 3)


def _split_rows(call: Call, x: jax.Array) -> jax.Array:
    """[b, h, r, k] as [b, h, g, q, k]."""
    return x.reshape(*x.shape[:2], -1, call.query.shape[1], x.shape[3])


def _rows(x: jax.Array) -> jax.Array:
    """The inverse of `_split_rows`."""
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def _by_pair(call: Call, x: jax.Array | None) -> jax.Array | None:
    """[B or 1, Hq or 1, Sq or 1, Sk or 1] as [b or 1, h or 1, g or 1, q or 1, k or 1]."""
    if x is None:
        return None
    heads = (1, 1) if x.shape[1] == 1 else (call.key.shape[2], call.query.shape[2] // call.key.shape[2])
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def _visible(call: Call, rows: Rows) -> jax.Array | None:
    """Which pairs are visible, broadcast only as far as needed; None where all are."""
    # A single query is the last token, unless it has a position of its own: nothing comes after it.
    placed = rows.padding is not None or call.positions.given or call.kv_end is not None
    sees_the_last = call.query.shape[1] == 1 and not placed
    last = None if sees_the_last else rows.last

    def spread(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x[:, None, None]

    return visible_tile(
        jnp.arange(call.key.shape[1], dtype=jnp.int32),
        spread(rows.first),
        spread(last),
        spread(call.q_segment_ids),
        spread(call.kv_segment_ids),
        _by_pair(call, call.attention_mask),
        _by_pair(call, call.bias),
        spread(rows.lowest),
        spread(rows.highest),
        spread(call.positions.kv),
    )


def _sum_keys(P: jax.Array) -> jax.Array:
    """The sum over keys, of many in two steps: compilers add one after the other."""
    length, step = P.shape[-1], LIMITS["summed_keys"]
    whole = length - length % step
    if length <= step:
        return P.sum(axis=-1)
    total = P[..., :whole].reshape(*P.shape[:-1], -1, step).sum(axis=-1).sum(axis=-1)
    return total + P[..., whole:].sum(axis=-1)


def _dropped(call: Call, keep: jax.Array | None, x: jax.Array) -> jax.Array:
    """x with dropped pairs at 0 and the kept ones scaled by 1 / (1 - r) (S12)."""
    return x if keep is None else jnp.where(keep, x * (1 / (1 - call.dropout_prob)), jnp.float32(0))


def _weigh(dot: Any, call: Call, P: jax.Array, value: jax.Array, hides: bool) -> jax.Array:
    """P @ value [b, h, r, d]; a value that is not finite shows only in rows that give it weight (S4)."""
    out = dot("bhrk,bhkd->bhrd", P, value)
    if not hides:
        return out

    # Products with the value as the call has it: with `value`, each call would make a copy of it for this.
    def propagate_nonfinite() -> jax.Array:
        finite = jnp.isfinite(call.value)
        cleaned = jnp.where(finite, call.value, jnp.zeros((), call.value.dtype)).astype(jnp.float32)
        # Not the weights themselves, the least of which a product of low precision rounds to 0.
        weighs = (P > 0).astype(jnp.float32)
        seen = dot("bhrk,bkhd->bhrd", weighs, (~finite).astype(jnp.float32))
        return jnp.where(seen > 0, jnp.float32(jnp.nan), dot("bhrk,bkhd->bhrd", P, cleaned))

    # 0 * NaN and 0 * inf are NaN, so that one row tells whether all values are finite, whatever its weights.
    return lax.cond(any_nonfinite(out[:, :, :1]), propagate_nonfinite, lambda: out)
