"""The fourth output of ONNX's `Attention`: the logits of all pairs at one of four steps."""

from typing import Any

import jax
import jax.numpy as jnp

from attest.kernels.call.options import check_integer, refuse
from attest.kernels.operations.functions import attention


def check_mode(mode: Any) -> int:
    """Return `qk_matmul_output_mode`, from 0 to 3."""
    number = check_integer("qk_matmul_output_mode", mode)
    if not 0 <= number <= 3:
        refuse("qk_matmul_output_mode", number, "an integer from 0 to 3", "Leave it out for the products.")
    return number


def scores(mode: int, arguments: dict[str, Any]) -> jax.Array:
    """Return [B, Hq, Sq, Sk] in the dtype of query, for a mode of `qk_matmul_output_mode`.

    arguments: those of the call of ours whose logits they are. Weights of a row that sees no key are 0.
    """
    if mode == 3:
        return attention(**arguments)[1]
    query, key = (arguments[name].astype(jnp.float32) for name in ("query", "key"))
    scale, cap = arguments["softmax_scale"], arguments["logits_soft_cap"]
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1])
    products = jnp.einsum("bqkgd,bskd->bkgqs", grouped, key, precision=jax.lax.Precision.HIGHEST)
    products = products.reshape(query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    logits = products * jnp.float32(query.shape[-1] ** -0.5 if scale is None else scale)
    if mode > 0 and cap is not None:
        logits = jnp.float32(cap) * jnp.tanh(logits / jnp.float32(cap))
    if mode == 2:
        if arguments.get("bias") is not None:
            logits = logits + arguments["bias"].astype(jnp.float32)
        logits = jnp.where(_visible(arguments), logits, -jnp.inf)
    return logits.astype(arguments["query"].dtype)


def _visible(arguments: dict[str, Any]) -> jax.Array:
    """Return which pairs are visible, [B, Hq, Sq, Sk]: those with a weight where all logits are 0."""
    zeros = {name: jnp.zeros(arguments[name].shape, jnp.float32) for name in ("query", "key", "value")}
    bias = arguments.get("bias")
    hidden = None if bias is None else jnp.where(jnp.isneginf(bias), -jnp.inf, jnp.float32(0))
    call: dict[str, Any] = {**arguments, **zeros, "bias": hidden}
    return attention(**call)[1] != 0
