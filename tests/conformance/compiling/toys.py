"""Toys that launch no kernel, to be compiled for any device."""

from typing import Any

import jax.numpy as jnp


def without_kernels(query: Any, key: Any, value: Any, **_options: Any) -> Any:
    return query * 2, jnp.zeros(query.shape[:3], jnp.float32)


def refusing(query: Any, key: Any, value: Any, **_options: Any) -> Any:
    raise NotImplementedError("query: got a toy, expected a tensor")
