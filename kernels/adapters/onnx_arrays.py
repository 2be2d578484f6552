"""Queries, keys and values of ONNX's `Attention` in the layout of ours."""

from typing import Any

import jax
import jax.numpy as jnp

from attest.kernels.adapters.shared import as_floats
from attest.kernels.call.arrays import check_is_array, check_pair
from attest.kernels.call.options import check_size, refuse


def as_four_axes(name: str, x: Any, heads_name: str, heads: int | None) -> jax.Array:
    """Return an array [B, length, heads, head_dim] from either form of the operator.

    Raises: ValueError naming the argument.
    """
    array = as_floats(name, x)
    if array.ndim not in (3, 4):
        expected = "4 axes [batch, heads, length, head_dim], or 3 [batch, length, heads * head_dim]"
        refuse(name, f"shape {array.shape}", expected, "Reshape it.")
    if array.ndim == 4:
        if heads is not None and check_size(heads_name, heads) != array.shape[1]:
            refuse(heads_name, heads, f"{array.shape[1]}, the heads of {name}", "Leave it out.")
        return array.swapaxes(1, 2)
    if heads is None:
        refuse(heads_name, None, f"an integer, because {name} has 3 axes", "Give the number of heads.")
    number = check_size(heads_name, heads)
    if array.shape[2] % number:
        expected = f"a divisor of {array.shape[2]}, the last axis of {name}"
        refuse(heads_name, number, expected, "Give the number of heads.")
    return array.reshape(*array.shape[:2], number, array.shape[2] // number)


def with_past(
    key: jax.Array, value: jax.Array, past_key: Any, past_value: Any
) -> tuple[jax.Array, jax.Array]:
    """Return keys and values [B, P + Sk, Hkv, D] with the P past ones, [B, Hkv, P, D], before them.

    Raises: ValueError naming the argument.
    """
    if not check_pair("past_key", past_key, "past_value", past_value):
        return key, value
    return _after("past_key", past_key, key), _after("past_value", past_value, value)


def _after(name: str, past: Any, new: jax.Array) -> jax.Array:
    check_is_array(name, past)
    batch, _, heads, depth = new.shape
    fits = past.ndim == 4 and (*past.shape[:2], past.shape[3]) == (batch, heads, depth)
    if not fits or past.dtype != new.dtype:
        expected = f"{new.dtype} of shape ({batch}, {heads}, past length, {depth})"
        refuse(name, f"{past.dtype} of shape {past.shape}", expected, "Give it the sizes of the new ones.")
    return jnp.concatenate([jnp.asarray(past).swapaxes(1, 2), new], axis=1)
