"""Attention for the tests of the bridge, in JAX: right, or with a wrong gradient of the values."""

from typing import Any

import jax
import jax.numpy as jnp


def attention(
    query: Any, key: Any, value: Any, *, softmax_scale: Any = None, causal: bool = False, bias: Any = None
) -> Any:
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * scale
    if bias is not None:
        logits = logits + bias
    if causal:
        lengths = query.shape[1], key.shape[1]
        logits = jnp.where(jnp.tril(jnp.ones(lengths, bool), lengths[1] - lengths[0]), logits, -jnp.inf)
    weights = jax.nn.softmax(logits).astype(value.dtype)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, value, preferred_element_type=jnp.float32)
    return out.astype(query.dtype), jax.nn.logsumexp(logits, axis=-1)


def out_alone(query: Any, key: Any, value: Any, *, wrong: bool = False, **options: Any) -> Any:
    if wrong:
        value = 2 * value - jax.lax.stop_gradient(value)
    return attention(query, key, value, **options)[0]


@jax.custom_vjp
def wide(query: Any, key: Any, value: Any) -> Any:
    """Returns value, with a float32 gradient of a third."""
    return value


def _wide_backward(kept: Any, cotangent: Any) -> Any:
    query, key = kept
    return query * 0, key * 0, jnp.full_like(cotangent, 1 / 3, dtype=jnp.float32)


wide.defvjp(lambda query, key, value: (value, (query, key)), _wide_backward)


@jax.custom_vjp
def negative_if_differentiated(query: Any, key: Any, value: Any) -> Any:
    """Returns value, and its negative where it is differentiated."""
    return value


negative_if_differentiated.defvjp(
    lambda query, key, value: (-value, (query, key)),
    lambda kept, cotangent: (0 * kept[0], 0 * kept[1], -cotangent),
)
