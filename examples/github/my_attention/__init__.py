"""Attention in JAX, of arrays [batch, length, heads, head dim], with causal order and grouped heads."""

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.jit, static_argnames=("causal", "scale"))
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> jax.Array:
    """Return softmax(scale * query @ key.T) @ value, in float32 sums.

    With `causal`, row i sees the keys up to i + (keys - rows). A row that sees no key is 0.
    """
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (key, value))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    rows, columns = query.shape[1], key.shape[1]
    last = jnp.arange(rows) + columns - rows if causal else jnp.full(rows, columns)
    sees_some = (last >= 0)[None, :, None, None]
    dot = partial(jnp.einsum, precision="highest")
    logits = dot("bqhd,bkhd->bhqk", jnp.where(sees_some, query.astype(jnp.float32), 0.0), key) * scale
    logits = jnp.where(jnp.arange(columns)[None, :] <= last[:, None], logits, -jnp.inf)
    top = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    out = dot("bhqk,bkhd->bqhd", weights / jnp.where(total == 0, 1.0, total), value)
    return jnp.where(sees_some, out, 0.0).astype(query.dtype)
