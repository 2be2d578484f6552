"""The package that the README tests: somebody's attention, without a word about attest."""

KERNEL = '''
"""Somebody's attention: correct, plain, and without a word about attest."""

from functools import partial

import jax
import jax.numpy as jnp


def attention(query, key, value, *, causal, scale):
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (key, value))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    rows, columns = query.shape[1], key.shape[1]
    offset = columns - rows
    sees = (jnp.arange(rows) + offset >= 0)[None, :, None, None] if causal else True
    wide = jnp.where(sees, query.astype(jnp.float32), jnp.float32(0))
    dot = partial(jnp.einsum, precision="highest")
    logits = dot("bqhd,bkhd->bhqk", wide, key) * jnp.float32(scale)
    seen = jnp.arange(columns)[None, :] <= jnp.arange(rows)[:, None] + offset if causal else True
    logits = jnp.where(seen, logits, -jnp.inf)
    top = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, jnp.float32(0)))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, jnp.float32(1), total)
    out = dot("bhqk,bkhd->bqhd", weights, value)
    return jnp.where(sees, out, jnp.float32(0)).astype(query.dtype)
'''
