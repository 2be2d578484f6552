"""A library like a peer's: attention by a kernel that can be replaced, and by its own where that refuses."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def by_numpy(query: Any, key: Any, value: Any, is_causal: bool = False) -> Any:
    """Compute attention in float64: [batch, length, heads, head_dim]."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    logits = np.where(np.tri(q.shape[1], dtype=bool) | (not is_causal), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return jnp.asarray(np.einsum("bhqk,bkhd->bqhd", weights, v), jnp.float32)


kernel = by_numpy


def attention(*arrays: Any, **options: Any) -> Any:
    """Compute attention by the kernel, and by the library itself where the kernel says that it cannot."""
    try:
        return kernel(*arrays, **options)
    except ValueError:
        return by_numpy(*arrays, **options)
