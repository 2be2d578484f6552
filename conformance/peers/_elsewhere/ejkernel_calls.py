"""Calls of ejKernel's attention functions with the arguments of docs/reference/semantics.md.

It runs in ejKernel's own environment, which has another version of JAX: see attest.conformance.bridge. It
imports nothing of attest.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

_OPTIONS = (
    "softmax_scale",
    "causal",
    "sliding_window",
    "logits_soft_cap",
    "normalize_output",
    "dropout_prob",
    "dropout_seed",
    "q_block",
    "kv_block",
)


@partial(jax.jit, static_argnames=_OPTIONS)
def flash(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Return the output of the XLA flash attention."""
    library = import_module("ejkernel.kernels._xla.flash_attention")
    return library.flash_attention(query, key, value, **_arguments(query, key, options))


@partial(jax.jit, static_argnames=_OPTIONS)
def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Return the output of the attention that stores all weights, computed in the dtype of query."""
    library = import_module("ejkernel.kernels._xla.attention")
    given = _arguments(query, key, options)
    if "dropout_seed" in given:
        given["dropout_rng"] = jax.random.PRNGKey(given.pop("dropout_seed"))
        given["deterministic"] = False
    out, _ = library.attention(query, key, value, dtype=query.dtype, **given)
    return out


@partial(jax.jit, static_argnames=_OPTIONS)
def ring(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Return the output of ring attention on one device."""
    library = import_module("ejkernel.kernels._xla.ring_attention")
    given = _arguments(query, key, options)
    if "q_positions" in given or "kv_positions" in given:
        # It takes both or neither; those in the arrays are the others.
        for side, array in (("q", query), ("kv", key)):
            own = jnp.broadcast_to(jnp.arange(array.shape[1], dtype=jnp.int32), array.shape[:2])
            given[f"{side}_position_ids"] = given.pop(f"{side}_positions", own)
    # Its first step is this cast. Done here, the gradients are cast back, which it omits for query and key.
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    return library.ring_attention(query, key, value.astype(jnp.float32), **given).astype(value.dtype)


def _arguments(query: Any, key: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options under ejKernel's names and in its shapes, which have every axis of the pairs."""
    given = dict(options)
    batch, q_len, heads, _ = query.shape
    k_len = key.shape[1]
    if "bias" in given:
        given["bias"] = jnp.broadcast_to(given["bias"], (batch, heads, q_len, k_len))
    if "attention_mask" in given:
        mask = given["attention_mask"]
        given["attention_mask"] = jnp.broadcast_to(mask, (batch, mask.shape[1], q_len, k_len))
    if "sliding_window" in given:
        given["sliding_window"] = tuple(
            q_len + k_len if side is None else side for side in given["sliding_window"]
        )
    if "softmax_aux" in given:
        sinks = given["softmax_aux"].reshape(-1)
        # As many sinks as heads could mean one a head. A sink of -inf adds nothing.
        while len(sinks) in (heads, key.shape[2]):
            sinks = jnp.append(sinks, jnp.asarray(-jnp.inf, sinks.dtype))
        given["softmax_aux"] = sinks
    if "q_block" in given:
        parameters = import_module("ejkernel.ops").FwdParams
        given["fwd_params"] = parameters(q_blocksize=given.pop("q_block"), kv_blocksize=given.pop("kv_block"))
    return given
