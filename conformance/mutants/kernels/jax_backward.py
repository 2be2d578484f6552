"""The backward pass of the kernel in pure JAX: a program for each block of keys, which adds to dQ."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from attest.conformance.mutants.kernels.jax_forward import forward
from attest.conformance.mutants.kernels.jax_tiles import (
    Arrays,
    Call,
    cast,
    dropped,
    exp,
    factor,
    key_tile,
    logits_of,
    pad,
    row_tile,
    weigh,
)


@dataclass(frozen=True)
class Terms:
    """What the programs read of each row, [B, H, S, ...]: dS = P * (weight * dP - delta)."""

    d_out: Any
    lse: Any
    delta: Any
    weight: Any


def backward(call: Call, saved: tuple[Any, Any, Any, Any], d_out: Any, d_lse: Any) -> Arrays:
    """Return the gradients by name, float32, in the layout of the call's arrays but for query, key and value.

    saved: what `forward` returned. d_out [B, Sq, H, Dv] and d_lse [B, H, Sq] are the cotangents.
    """
    out, lse, top, highest = saved
    if call.variant.lse_again:
        other = replace(call.variant, reverse_keys=not call.variant.reverse_keys)
        _, lse, _, _ = forward(replace(call, variant=other))
    d_out = pad(d_out.astype(jnp.float32).transpose(0, 2, 1, 3), 2, call.rows_in, 0)
    d_lse = pad(d_lse.astype(jnp.float32), 2, call.rows_in, 0)
    sees = top != -jnp.inf
    delta = -jnp.where(lse == -jnp.inf, 0, d_lse)
    weight = jnp.ones_like(lse)
    if call.options.normalized:
        delta = delta + jnp.where(sees, _rowsum(call, d_out, out, lse), 0)
    else:
        weight = jnp.where(sees, jnp.exp(lse - jnp.where(sees, highest, 0)), 0)
    terms = Terms(d_out, lse, delta, weight)
    gradients = _walk(call, terms)
    if "softmax_aux" in call.arrays:
        gradients["softmax_aux"] = _sink_gradient(call, lse, delta)
    return gradients


def _rowsum(call: Call, d_out: Any, out: Any, lse: Any) -> Any:
    """Compute delta, rowsum(dO * O), or the same number as the sum of P * dP."""
    if call.variant.delta == "out":
        return (d_out * out.astype(jnp.float32)).sum(axis=3)
    batches, heads, length, _ = call.query.shape
    plain = Terms(d_out, lse, jnp.zeros_like(lse), jnp.ones_like(lse))

    def program(index: Any) -> Any:
        place, i = index // call.row_tiles, index % call.row_tiles
        batch, head = place // heads, place % heads

        def step(j: Any, total: Any) -> Any:
            P, dP, _, visible = _tile(call, plain, batch, head, i, j)
            return total + jnp.where(visible, P * dP, 0).sum(axis=1)

        return lax.fori_loop(0, call.key_tiles, step, jnp.zeros(call.rows_in, jnp.float32))

    programs = jnp.arange(batches * heads * call.row_tiles, dtype=jnp.int32)
    return lax.map(program, programs).reshape(batches, heads, length)


def _tile(call: Call, terms: Terms, batch: Any, head: Any, i: Any, j: Any) -> tuple[Any, Any, Any, Any]:
    """Return P, recomputed from the lse, dP with dropout's factors, the slope of the cap and what is seen."""
    logits, slope, visible = logits_of(call, batch, head, i, j)
    lse = row_tile(call, terms.lse[..., None], batch, head, i)
    P = jnp.where(visible, exp(call.variant, jnp.minimum(logits - lse, 0), 0), 0)
    value = key_tile(call, call.value, batch, head, j)
    dP = row_tile(call, terms.d_out, batch, head, i) @ value.T
    dP = dropped(call, dP, batch, head, i, j) * factor(call.options)
    return P, dP, slope, visible


def _tiles_of(call: Call, batch: Any, j: Any) -> tuple[Any, Any]:
    """Return the first tile of rows that may see a block of keys, and the first behind the last."""
    first = call.rows.first[batch].reshape(call.row_tiles, call.rows_in).min(axis=1)
    last = call.rows.last[batch].reshape(call.row_tiles, call.rows_in).max(axis=1)
    touches = (first < (j + 1) * call.keys_in) & (last >= j * call.keys_in)
    stop = jnp.where(touches.any(), call.row_tiles - jnp.argmax(touches[::-1]), 0)
    return jnp.argmax(touches).astype(jnp.int32), stop.astype(jnp.int32)


def _walk(call: Call, terms: Terms) -> Arrays:
    """Return the gradients of query, key, value and bias."""
    options, kv_heads = call.options, call.key.shape[1]
    scale = jnp.float32(options.scale)

    def program(carry: Any, index: Any) -> Any:
        place, j = index // call.key_tiles, index % call.key_tiles
        batch, kv_head = place // kv_heads, place % kv_heads
        start, stop = _tiles_of(call, batch, j)
        count = stop - start

        def step(n: Any, inner: Any) -> Any:
            d_query, d_bias, d_key, d_value = inner
            head = kv_head * call.group + n // count
            i = stop - 1 - n % count if call.variant.reverse_rows else start + n % count
            query, key = row_tile(call, call.query, batch, head, i), key_tile(call, call.key, batch, head, j)
            P, dP, slope, visible = _tile(call, terms, batch, head, i, j)
            row = [row_tile(call, x[..., None], batch, head, i) for x in (terms.weight, terms.delta)]
            dS = jnp.where(visible, P * (row[0] * dP - row[1]), 0)
            if slope is not None:
                dS = jnp.where(visible, dS * slope, 0)
            kept = dropped(call, P * row[0], batch, head, i, j) * factor(options)
            d_out = row_tile(call, terms.d_out, batch, head, i)
            d_value = d_value + weigh(cast(call, jnp.where(visible, kept, 0)).T, d_out)
            rounded = cast(call, dS)
            d_key = d_key + weigh(rounded.T, query) * scale
            d_query = _add_at(d_query, (batch, head, i * call.rows_in, 0), weigh(rounded, key) * scale)
            if d_bias is not None:
                d_bias = _add_at(d_bias, (batch, head, i * call.rows_in, j * call.keys_in), dS)
            return d_query, d_bias, d_key, d_value

        none = [jnp.zeros((call.keys_in, x.shape[3]), jnp.float32) for x in (call.key, call.value)]
        *carry, d_key, d_value = lax.fori_loop(0, call.group * count, step, (*carry, *none))
        return tuple(carry), (d_key, d_value)

    bias = call.arrays.get("bias")
    start = (jnp.zeros_like(call.query), None if bias is None else jnp.zeros(bias.shape, jnp.float32))
    programs = jnp.arange(call.key.shape[0] * kv_heads * call.key_tiles, dtype=jnp.int32)
    (d_query, d_bias), (d_key, d_value) = lax.scan(program, start, programs)
    gradients = {
        "query": d_query,
        "key": d_key.reshape(call.key.shape),
        "value": d_value.reshape(call.value.shape),
    }
    return gradients if d_bias is None else gradients | {"bias": d_bias}


def _add_at(array: Any, places: tuple[Any, ...], tile: Any) -> Any:
    """Add a tile at (batch, head, row, column), summed over the axes that the array does not have."""
    if array.shape[2] == 1:
        tile = tile.sum(axis=0, keepdims=True)
    starts = [
        jnp.int32(0) if length == 1 else jnp.asarray(place, jnp.int32)
        for place, length in zip(places, array.shape, strict=True)
    ]
    old = lax.dynamic_slice(array, starts, (1, 1, *tile.shape))
    return lax.dynamic_update_slice(array, old + tile[None, None], starts)


def _sink_gradient(call: Call, lse: Any, delta: Any) -> Any:
    """Sum P_sink * (0 - Delta) over batch, rows and sharing heads: a sink has no value."""
    aux = call.arrays["softmax_aux"]
    sinks = jnp.atleast_2d(aux).astype(jnp.float32)
    padding = (lse == -jnp.inf)[..., None]
    P = jnp.exp(sinks[None, :, None, :] - jnp.where(padding, 0, lse[..., None]))
    per_head = -jnp.where(padding, 0, P * delta[..., None]).sum(axis=(0, 2))
    if sinks.shape[0] == 1:
        per_head = per_head.sum(axis=0, keepdims=True)
    return per_head.reshape(aux.shape)
