"""Calls of EasyDeL's attention with the arguments of docs/reference/semantics.md.

It runs in EasyDeL's own environment, which has another version of JAX: see attest.conformance.bridge. It
imports nothing of attest.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

_OPTIONS = ("softmax_scale", "causal", "sliding_window", "logits_soft_cap")


@partial(jax.jit, static_argnames=_OPTIONS)
def vanilla(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Return the output of VanillaAttn, computed in the dtype of query."""
    batch, q_len, heads, _ = query.shape
    k_len = key.shape[1]
    given = dict(options)
    if "bias" in given:
        given["bias"] = jnp.broadcast_to(given["bias"], (batch, heads, q_len, k_len))
    if "attention_mask" in given:
        mask = given.pop("attention_mask")
        mask = jnp.broadcast_to(mask, (batch, mask.shape[1], q_len, k_len))
        given["mask_info"] = import_module("ejkernel.types").MaskInfo(_attention_mask=mask)
    if "sliding_window" in given:
        sides = given["sliding_window"]
        given["sliding_window"] = tuple(q_len + k_len if side is None else side for side in sides)
    if "softmax_aux" in given:
        sinks = given["softmax_aux"].reshape(-1)
        # As many sinks as heads could mean one a head. A sink of -inf adds nothing.
        while len(sinks) in (heads, key.shape[2]):
            sinks = jnp.append(sinks, jnp.asarray(-jnp.inf, sinks.dtype))
        given["softmax_aux"] = sinks
    return _operation(query.dtype.name)(query, key, value, **given).attention_outputs


@cache
def _operation(dtype: str) -> Any:
    metadata = import_module("easydel.operations").OperationMetadata(
        runtime_dtype=jnp.dtype(dtype),
        runtime_softmax_dtype=jnp.float32,
        base_config=import_module("easydel.infra.base_config").EasyDeLBaseConfig(),
    )
    return import_module("easydel.operations.kernels.vanilla_attention").VanillaAttn(metadata)
