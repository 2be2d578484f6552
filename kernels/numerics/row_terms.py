"""The shared parts of all backward passes: terms of each row, and the gradients of sinks.

Between the two are the sums over pairs, which are the backends' own. The papers' symbols: P = probabilities,
O = output, L = lse, dS and dP the cotangents of the logits and of P, Delta = rowsum(dO * O).
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from attest.kernels.call.call import Call
from attest.kernels.call.positions import Positions
from attest.kernels.call.symbolic import is_symbolic
from attest.kernels.numerics.exponents import lowered
from attest.kernels.varying import vary_together


@dataclass(frozen=True)
class RowTerms:
    """The terms of a query row in sums over pairs: P = exp(S - lse), dS = P * (weight * dP - delta).

    A row that sees no key, or is NaN, must not reach the keys that are hidden from it, and 0 * NaN would: its
    query and d_out are 0 here. Its lse is enough: +inf makes P 0 where it sees nothing, NaN makes P NaN
    at the keys that it sees.

    The lse is `lowered`, and kernels take P = min(exp(S - lse), 1).
    """

    query: jax.Array  # [B, Sq, Hq, D]
    d_out: jax.Array  # [B, Sq, Hq, Dv]
    lse: jax.Array  # [B, Hq, Sq] float32
    delta: jax.Array  # [B, Hq, Sq] float32, less the cotangent of lse
    weight: jax.Array | None  # [B, Hq, Sq] float32, what out was not divided by; None stands for 1


def row_terms(
    call: Call,
    out: jax.Array,
    lse: jax.Array,
    row_max: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
    normalize_output: bool,
    hides: bool,
) -> RowTerms:
    """Return the terms of every row, from the forward pass's results and the cotangents (clauses S14, S15).

    row_max: the maximum over visible keys, -inf where there is none. hides: whether some pair may be hidden;
    if none is, query and d_out are as given, which saves a copy.
    """
    zero = jnp.float32(0)
    sees = row_max != -jnp.inf
    sound = sees & ~jnp.isnan(lse)
    query = call.query
    if hides:
        by_row = sound.transpose(0, 2, 1)[..., None]
        query, d_out = (jnp.where(by_row, x, jnp.zeros((), x.dtype)) for x in (query, d_out))
    delta = -jnp.where(lse == -jnp.inf, zero, d_lse)
    weight = None
    if normalize_output:
        products = d_out.astype(jnp.float32) * out.astype(jnp.float32)
        delta = delta + jnp.where(sees, products.sum(axis=-1).transpose(0, 2, 1), zero)
    else:
        # out = O exp(L - m): the part of Delta that comes through O cancels the one that comes through L.
        m = row_max
        if call.softmax_aux is not None:
            sinks = call.softmax_aux.astype(jnp.float32).max(axis=-1)
            m = jnp.maximum(row_max, sinks[None, :, None])
        # A sum of so many exponentials of what is at most 0, and one of 0; lse and m are rounded apart.
        terms = call.key.shape[1] + (0 if call.softmax_aux is None else call.softmax_aux.shape[1])
        most = jnp.log(jnp.float32(terms)) if is_symbolic(call) else math.log(terms)
        weight = jnp.where(sound, jnp.exp(jnp.clip(lse - jnp.where(sound, m, zero), 0.0, most)), zero)
    return RowTerms(query, d_out, jnp.where(sees, lowered(lse), jnp.inf), delta, weight)


def cotangent_call(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    softmax_aux: jax.Array | None = None,
) -> Call:
    """Return the cotangent of a call: those of its float arrays, rounded to their dtypes, and no others."""
    return replace(
        call,
        query=query.astype(call.query.dtype),
        key=key.astype(call.key.dtype),
        value=value.astype(call.value.dtype),
        bias=None if call.bias is None or bias is None else bias.astype(call.bias.dtype),
        softmax_aux=softmax_aux,
        attention_mask=None,
        q_segment_ids=None,
        kv_segment_ids=None,
        cum_seqlens_q=None,
        cum_seqlens_k=None,
        dropout_seed=None,
        positions=Positions(),
        kv_start=None,
        kv_end=None,
        alibi_slopes=None,
    )


def sink_cotangent(call: Call, lse: jax.Array, delta: jax.Array) -> jax.Array | None:
    """Return the sum over batch, rows and shared heads of p_sink * (0 - delta): a sink has no value (S14).

    lse, delta: [B, Hq, Sq] float32; an lse of -inf is that of padding, which has no sinks either.
    """
    if call.softmax_aux is None:
        return None
    sinks = call.softmax_aux.astype(jnp.float32)
    padding = (lse == -jnp.inf)[..., None]
    p = jnp.exp(sinks[None, :, None, :] - jnp.where(padding, jnp.float32(0), lse[..., None]))
    per_head = -jnp.where(padding, jnp.float32(0), p * delta[..., None]).sum(axis=(0, 2))
    if sinks.shape[0] == 1:
        per_head = per_head.sum(axis=0, keepdims=True)
    # A sum over no rows says nothing of the devices over which it varies.
    return vary_together((call, per_head.astype(call.softmax_aux.dtype)))[1]
