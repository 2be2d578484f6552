"""A correct kernel in ten lines, and ways to break it: subjects for the tests of the harness itself."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attest.conformance.subject import Subject
from attest.reference.numerics import Numerics

FEATURES = frozenset({"causal", "scale", "gqa"})


def toy_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Any:
    """Materialised attention in float32, bottom-right causal, zero for empty rows."""
    if key.shape[:1] + key.shape[3:] != query.shape[:1] + query.shape[3:]:
        raise ValueError(f"key: got shape {key.shape}, expected batch and head dim of query {query.shape}")
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scale = query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    rows, columns = logits.shape[2:]
    seen = jnp.ones((rows, columns), bool)
    if causal:
        seen = jnp.arange(columns)[None, :] <= jnp.arange(rows)[:, None] + (columns - rows)
    logits = jnp.where(seen, logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.where(seen, jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights / jnp.where(total == 0, 1.0, total), v)
    return out.astype(query.dtype)


def toy(call: Callable[..., Any] = toy_attention, **declared: Any) -> Subject:
    """A subject of the toy or of a broken version of it."""
    declarations: dict[str, Any] = {
        "name": "toy",
        "features": FEATURES,
        "numerics": lambda dtype, tiling: Numerics(output_dtype=dtype, materialised=True),
    }
    return Subject(call=call, **(declarations | declared))


_leaked: list[Any] = []


def leaks_tracers(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Keeps the result of its first call, a tracer, and returns it ever after."""
    _leaked.append(toy_attention(query, key, value, **options))
    return _leaked[0]


def modifies_its_input(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Writes into the query's buffer, as a kernel with a wrong pointer does."""

    def scribble(query: Any) -> Any:
        import ctypes

        ctypes.memset(query.unsafe_buffer_pointer(), 0, query.nbytes)

    out = jax.block_until_ready(toy_attention(query, key, value, **options))
    if not isinstance(query, jax.core.Tracer):
        scribble(query)
    return out
