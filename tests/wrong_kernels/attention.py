"""Flash attention in plain JAX: blocks of keys, an online softmax and a backward pass written by hand."""

from functools import partial

import jax
import jax.numpy as jnp

BLOCK = 32  # keys that a step computes at once


def attention(
    query, key, value, *, softmax_scale=None, causal=False, sliding_window=None, logits_soft_cap=None
):
    """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq]; query [B, Sq, Hq, D], key and value [B, Sk, Hkv, D]."""
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _attention(query, key, value, float(scale), causal, sliding_window, logits_soft_cap)


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _attention(query, key, value, scale, causal, window, cap):
    return _forward(query, key, value, scale, causal, window, cap)[0]


def _forward(query, key, value, scale, causal, window, cap):
    batch, q_len, q_heads, _ = query.shape
    k_len, group = key.shape[1], q_heads // key.shape[2]
    keys, values = _blocks(key), _blocks(value)
    grouped = _grouped(query, group)
    shape = (batch, key.shape[2], group, q_len)

    def step(carry, block):
        top, total, out = carry
        start, k, v = block
        logits = _logits(grouped, k, scale, cap)
        logits = jnp.where(_visible(start, q_len, k_len, causal, window), logits, -jnp.inf)
        new = jnp.maximum(top, logits.max(-1))
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        weights = jnp.exp(logits - safe[..., None])
        shrink = jnp.exp(top - safe)
        total = total * shrink + weights.sum(-1)
        weighted = _dot("bhgqk,bkhd->bhgqd", weights.astype(v.dtype), v)
        return (new, total, out * shrink[..., None] + weighted), None

    begin = (
        jnp.full(shape, -jnp.inf),
        jnp.zeros(shape),
        jnp.zeros((*shape, value.shape[-1])),
    )
    (top, total, out), _ = jax.lax.scan(step, begin, (_starts(k_len), keys, values))
    empty = total == 0
    out = jnp.where(empty[..., None], 0.0, out / jnp.where(empty, 1.0, total)[..., None])
    lse = jnp.where(empty, -jnp.inf, jnp.log(jnp.where(empty, 1.0, total)) + top)
    out = _ungrouped(out).astype(query.dtype)
    lse = lse.reshape(batch, q_heads, q_len)
    return (out, lse), (query, key, value, out, lse)


def _backward(scale, causal, window, cap, saved, cotangents):
    query, key, value, out, lse = saved
    d_out, d_lse = cotangents
    batch, q_len, q_heads, _ = query.shape
    k_len, k_heads = key.shape[1:3]
    group = q_heads // k_heads
    grouped, d_grouped = _grouped(query, group), _grouped(d_out, group)
    rows = (batch, k_heads, group, q_len)
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    delta = delta.transpose(0, 2, 1).reshape(rows) - d_lse.reshape(rows)
    lse = lse.reshape(rows)
    safe = jnp.where(lse == -jnp.inf, jnp.inf, lse)

    def step(d_query, block):
        start, k, v = block
        logits = _logits(grouped, k, scale, cap)
        visible = _visible(start, q_len, k_len, causal, window)
        weights = jnp.where(visible, jnp.exp(logits - safe[..., None]), 0.0)
        d_value = _dot("bhgqk,bhgqd->bkhgd", weights.astype(v.dtype), d_grouped)
        d_value = d_value.sum(axis=3)
        d_weights = _dot("bhgqd,bkhd->bhgqk", d_grouped, v)
        d_logits = weights * (d_weights - delta[..., None])
        if cap is not None:
            d_logits = d_logits * (1 - jnp.square(logits / cap))
        d_logits = (d_logits * scale).astype(query.dtype)
        d_key = _dot("bhgqk,bhgqd->bkhd", d_logits, grouped)
        return d_query + _dot("bhgqk,bkhd->bhgqd", d_logits, k), (d_key, d_value)

    begin = jnp.zeros(grouped.shape, jnp.float32)
    d_query, (d_key, d_value) = jax.lax.scan(step, begin, (_starts(k_len), _blocks(key), _blocks(value)))
    return (
        _ungrouped(d_query).astype(query.dtype),
        _joined(d_key, k_len).astype(key.dtype),
        _joined(d_value, k_len).astype(value.dtype),
    )


def _logits(grouped, k, scale, cap):
    logits = _dot("bhgqd,bkhd->bhgqk", grouped, k) * scale
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _visible(start, q_len, k_len, causal, window):
    """Return [Sq, BLOCK]: which keys of the block that begins at `start` each row sees."""
    row = jnp.arange(q_len)[:, None] + k_len - q_len
    key = start + jnp.arange(BLOCK)[None, :]
    visible = key < k_len
    if causal:
        visible &= key <= row
    if window is not None:
        left, right = window
        visible &= True if left is None else key >= row - left
        visible &= True if right is None else key <= row + right
    return visible


def _dot(equation, left, right):
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32, precision="highest")


def _starts(k_len):
    return jnp.arange(-(-k_len // BLOCK)) * BLOCK


def _blocks(array):
    """Return [blocks, B, BLOCK, H, D] of [B, S, H, D], with zeros at the end."""
    batch, length, *rest = array.shape
    padded = jnp.pad(array, ((0, 0), (0, -length % BLOCK), (0, 0), (0, 0)))
    return jnp.moveaxis(padded.reshape(batch, -1, BLOCK, *rest), 1, 0)


def _joined(blocks, length):
    """Return [B, S, H, D] of [blocks, B, BLOCK, H, D]."""
    joined = jnp.moveaxis(blocks, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :length]


def _grouped(array, group):
    """Return [B, Hkv, group, S, D] of [B, S, Hq, D]."""
    batch, length, heads, width = array.shape
    return array.reshape(batch, length, heads // group, group, width).transpose(0, 2, 3, 1, 4)


def _ungrouped(array):
    """Return [B, S, Hq, D] of [B, Hkv, group, S, D]."""
    batch, heads, group, length, width = array.shape
    return array.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads * group, width)


_attention.__wrapped__.defvjp(_forward, _backward)
