"""Attention of one piece of a call: all its logits at once, the batch as an axis, no loop.

A small problem is one piece, everywhere. On accelerators every call is made of pieces as large as memory is
meant for: see `attest.kernels.xla.pieces`. The arithmetic is that of the tiles on a CPU; where products have
operands of 16 bits, P and dS are rounded to them. The backward pass of a small problem keeps the weights, as
memory for them is at hand.

Axes of logits and of what is like them: b batch, H query heads, q queries, k keys.
"""

import tomllib
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from attest.kernels.call.call import Call
from attest.kernels.call.symbolic import is_symbolic
from attest.kernels.contract import Backward, Forward, Settings
from attest.kernels.numerics.row_terms import RowTerms
from attest.kernels.visibility.intervals import Rows, array_module, describe_rows, visible_tile
from attest.kernels.xla.all_pairs import whole_alibi, whole_keep_mask
from attest.kernels.xla.products import Products
from attest.kernels.xla.tiles import Weighed, any_nonfinite, restricted_logits, split_scale

# The sizes up to which a problem is small.
LIMITS = tomllib.loads((Path(__file__).parent / "whole.toml").read_text())
# What float16 keeps dS below, by a power of two for each batch entry: half of what the format ends at.
D_LOGITS_BELOW = 2.0**15
_LARGEST = float(jnp.finfo(jnp.float32).max)


def takes(call: Call) -> bool:
    """Return whether a call is small enough, by the logits of a head and those of the whole call."""
    batch, q_length, heads, _ = call.query.shape
    pairs = q_length * call.key.shape[1]
    return (
        not is_symbolic(call)
        and 0 < pairs <= LIMITS["pairs"]
        and batch * heads * pairs <= LIMITS["all_pairs"]
    )


def rows_of(call: Call) -> Rows:
    """Return what decides which keys each row sees."""
    rows = describe_rows(call, xp=array_module(call))
    # A single query is the last token, unless it has a position of its own: nothing comes after it.
    placed = rows.padding is not None or call.positions.given or call.kv_end is not None
    return replace(rows, last=None) if call.query.shape[1] == 1 and not placed else rows


def forward(
    settings: Settings,
    call: Call,
    products: Products,
    rows: Rows,
    *,
    keeps: bool = False,
    propagates: bool | None = None,
) -> Forward:
    """Return the results of the pass on a piece.

    keeps: whether to return `Weighed` with them. propagates: whether a value that is not finite makes the
    rows NaN that give it weight; False leaves it out. None: the values are searched first.
    """
    visible = _visible(call, rows)
    query, key = products.rows(call.query), products.keys(call.key)
    value = products.keys(call.value if propagates is None else _finite(call.value))
    S, slope = _logits(settings, call, rows, visible, products, query, key)

    row_max = S.max(axis=-1)
    m = row_max
    sinks = None if call.softmax_aux is None else call.softmax_aux.astype(jnp.float32)[None, :, None]
    if sinks is not None:
        m = jnp.maximum(m, sinks.max(axis=-1))
    shift = m if visible is None else jnp.where(m == -jnp.inf, jnp.float32(0), m)
    P = jnp.exp(S - shift[..., None])
    norm = _sum_keys(P) if products.by_head else P.sum(axis=-1)
    if sinks is not None:
        norm = norm + jnp.exp(sinks - shift[..., None]).sum(axis=-1)
    lse = shift + jnp.log(norm)
    # The largest weight is 1, so the norm is less than that only where a row sees nothing.
    divisor = norm if visible is None else jnp.maximum(norm, jnp.float32(1))
    keep = _keep(call)
    # One kernel then is all from the logits to the rounded weights, if nothing else reads m and the norm. In
    # float16 small weights need the range up to 1.
    early = settings.normalize_output and not settings.followed and products.operands == jnp.bfloat16
    weights = _dropped(call, keep, P / divisor[..., None] if early else P)
    out = products.of_rows(weights, value)
    if propagates is None and (visible is not None or keep is not None):
        # 0 * NaN and 0 * inf are NaN, so that one row tells whether all values are finite, whatever its
        # weights.
        out = lax.cond(
            any_nonfinite(products.by_token(out)[:, :1]),
            lambda: _propagate(call, products, weights),
            lambda: out,
        )
    elif propagates:
        out = _propagate(call, products, weights)
    if settings.normalize_output and not early:
        out = out / products.per_row(divisor)
    out = products.by_token(out).astype(settings.result_dtype(call.query.dtype))
    return Forward(out, lse, row_max, Weighed(norm, P, slope, keep) if keeps else None)


def backward(
    settings: Settings,
    call: Call,
    products: Products,
    rows: Rows,
    terms: RowTerms,
    kept: Weighed | None,
) -> Backward:
    """Return the gradients of a piece's float arrays in float32 (S14, S15); kept: None for weights by lse."""
    visible = _visible(call, rows)
    clean = visible is not None or call.dropout_seed is not None
    query = products.rows(terms.query)
    key, value = (products.keys(_finite(x) if clean else x) for x in (call.key, call.value))
    if kept is None:
        kept = _weighed_by_lse(call, terms.lse, *_logits(settings, call, rows, visible, products, query, key))
    hidden = jnp.float32(0)

    def hide(x: jax.Array) -> jax.Array:
        return x if visible is None else jnp.where(visible, x, hidden)

    # P is relative to the row maximum.
    divisor = kept.norm
    if visible is not None:
        # A row that is not a number must not reach the keys that are hidden from it.
        divisor = jnp.where((divisor == 0) | jnp.isnan(divisor), jnp.inf, divisor)
    of_rows = 1 / divisor
    delta, weight, down = terms.delta, terms.weight, None
    P = hide(kept.weights * of_rows[..., None] if products.rounds else kept.weights)
    if products.rounds:
        # What a row is multiplied by stays in float32: its weights are at most 1, whatever d_out is.
        dO = products.rows(terms.d_out)
        P_out = P if weight is None else P * weight[..., None]
        down = _scale_of_cotangents(call, terms) if products.operands == jnp.float16 else None
    else:
        # What P is divided by goes to the rows of dO and Delta, which are fewer.
        of_d_out = of_rows if weight is None else of_rows * weight
        dO, delta, weight = products.rows(terms.d_out) * products.per_row(of_d_out), delta * of_rows, None
        P_out = P
    dV = products.of_keys(_dropped(call, kept.keep, P_out), dO)
    dP = _dropped(call, kept.keep, products.scores(dO, value))
    dP = dP if weight is None else dP * weight[..., None]
    dS = P * (dP - delta[..., None])
    dS = hide(dS if kept.slope is None else dS * kept.slope)
    factor = jnp.float32(call.softmax_scale)
    multiplied = dS
    if down is not None:
        multiplied, factor = dS * down, factor / down
    dQ = products.by_token(products.of_rows(multiplied, key)) * factor
    dK = products.of_keys(multiplied, query) * factor
    d_bias = None
    if call.bias is not None:
        broadcast = tuple(axis for axis, size in enumerate(call.bias.shape) if size == 1)
        d_bias = dS.sum(axis=broadcast, keepdims=True)
    return Backward(dQ, dK, dV, d_bias)


def _logits(
    settings: Settings,
    call: Call,
    rows: Rows,
    visible: jax.Array | None,
    products: Products,
    query: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the logits [b, H, q, k] of two operands, and the derivative of the cap."""
    of_query, of_products = split_scale(call.softmax_scale)
    if products.rounds:
        scaled = products.scores(query, key) * jnp.float32(call.softmax_scale)
        # Nothing reaches the limits, but no compiler fuses a multiplication through them with a subtraction,
        # which in one place would round once and in another twice.
        scaled = jnp.clip(scaled, -_LARGEST, _LARGEST)
    else:
        scaled = products.scores(query * of_query, key)
        scaled = scaled if of_products == 1 else scaled * of_products
    alibi = whole_alibi(call, rows)
    return restricted_logits(call, scaled, call.bias, alibi, visible, settings.logits_dtype)


def _weighed_by_lse(call: Call, lse: jax.Array, S: jax.Array, slope: jax.Array | None) -> Weighed:
    """Return what the forward pass would keep, from the lse of `RowTerms`, which normalises the weights."""
    # No weight is above 1: see `RowTerms`.
    P = jnp.exp(jnp.minimum(S - lse[..., None], jnp.float32(0)))
    return Weighed(jnp.ones_like(lse), P, slope, _keep(call))


def _keep(call: Call) -> jax.Array | None:
    """Return the pairs that dropout keeps, [b, H, q, k]; None without dropout."""
    return None if call.dropout_seed is None else whole_keep_mask(call, call.dropout_seed)


def _visible(call: Call, rows: Rows) -> jax.Array | None:
    """Return which pairs are visible, broadcast only as far as needed; None where all are."""

    def spread(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x[:, None]

    # Compilers that put a selection by an argument into the kernel of the product store the mask of all pairs
    # first. What is behind a barrier is selected in the kernel of the softmax, which reads the mask as it is.
    mask = None if call.attention_mask is None else lax.optimization_barrier(call.attention_mask)
    return visible_tile(
        jnp.arange(call.key.shape[1], dtype=jnp.int32),
        spread(rows.first),
        spread(rows.last),
        spread(call.q_segment_ids),
        spread(call.kv_segment_ids),
        mask,
        call.bias,
        spread(rows.lowest),
        spread(rows.highest),
        spread(call.positions.kv),
    )


def _sum_keys(P: jax.Array) -> jax.Array:
    """Sum over keys, of many in two steps: compilers add one after the other."""
    length, step = P.shape[-1], LIMITS["summed_keys"]
    whole = length - length % step
    if length <= step:
        return P.sum(axis=-1)
    total = P[..., :whole].reshape(*P.shape[:-1], -1, step).sum(axis=-1).sum(axis=-1)
    return total + P[..., whole:].sum(axis=-1)


def _dropped(call: Call, keep: jax.Array | None, x: jax.Array) -> jax.Array:
    """Return x with dropped pairs at 0 and the kept ones scaled by 1 / (1 - r) (S12)."""
    return x if keep is None else jnp.where(keep, x * (1 / (1 - call.dropout_prob)), jnp.float32(0))


def _propagate(call: Call, products: Products, weights: jax.Array) -> jax.Array:
    """Return weights @ value; a value that is not finite shows only in rows that give it weight (S4)."""
    # Products with the value as the call has it: by head, each call would make a copy of it for this.
    finite = jnp.isfinite(call.value)
    # Not the weights themselves, the least of which a product of low precision rounds to 0.
    weighs = (weights > 0).astype(jnp.float32)
    seen = products.of_rows_in_place(weighs, (~finite).astype(jnp.float32))
    out = products.of_rows_in_place(weights, _finite(call.value))
    return jnp.where(seen > 0, jnp.float32(jnp.nan), out)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def _scale_of_cotangents(call: Call, terms: RowTerms) -> jax.Array:
    """Return a power of two for each batch entry, [b, 1, 1, 1], so that no dS overflows float16; mostly 1."""

    def longest(x: jax.Array) -> jax.Array:
        x = _finite(x.astype(jnp.float32))
        return jnp.sqrt((x * x).sum(axis=-1).max(axis=(1, 2)))

    most = longest(terms.d_out) * longest(call.value) / (1 - call.dropout_prob)
    if terms.weight is not None:
        most = most * _finite(terms.weight).max(axis=(1, 2))
    most = most + jnp.abs(_finite(terms.delta)).max(axis=(1, 2))
    _, exponent = jnp.frexp(most / D_LOGITS_BELOW)
    return jnp.ldexp(jnp.float32(1), -jnp.maximum(exponent, 0))[:, None, None, None]
