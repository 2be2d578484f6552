"""Compares an adapter with its library in float64: results and gradients, in unit roundoffs."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.operations import attention

LIMITS = tomllib.loads((Path(__file__).parent / "roundings.toml").read_text())
UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


def floats(x: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)


def errors(
    ours: Callable[..., Any], library: Callable[..., Any], *arguments: Any, dtype: str = "float32"
) -> dict[str, float]:
    """The largest errors of out and of gradients with respect to the arguments, in units of a dtype.

    ours: takes the arguments as they are. library: takes them in float64. Both return one array.
    """
    got = _results(ours, arguments)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) if floats(x) else x, arguments)
        want = _results(library, wide)
    return {name: _distance(got[name], want[name]) / UNITS[dtype] for name in want}


def check(
    ours: Callable[..., Any], library: Callable[..., Any], *arguments: Any, dtype: str = "float32"
) -> None:
    """Hold out and gradients to the limits."""
    found = errors(ours, library, *arguments, dtype=dtype)
    assert all(found[name] <= LIMITS[dtype][name] for name in found), found


def _results(function: Callable[..., Any], arguments: Any) -> dict[str, Any]:
    def loss(arguments: Any) -> Any:
        out = function(*arguments)
        cotangent = np.random.default_rng(0).normal(size=out.shape)
        return (out * jnp.asarray(cotangent, out.dtype)).sum(), out

    gradients, out = jax.jit(jax.grad(loss, has_aux=True, allow_int=True))(arguments)
    gradients = [x for x in jax.tree.leaves(gradients) if x.dtype != jax.dtypes.float0]
    return {
        name: [np.asarray(x, np.float64) for x in y] for name, y in (("out", [out]), ("gradients", gradients))
    }


def _distance(got: list[Any], want: list[Any]) -> float:
    """The largest difference, relative to the largest element; NaN is an infinite one."""
    scale = max(float(abs(x).max()) for x in want)
    worst = max(float(abs(x - y).max()) for x, y in zip(got, want, strict=True))
    return worst / scale if np.isfinite(worst) else np.inf


def our_bernoulli(key: Any, p: Any, shape: Any) -> jax.Array:
    """The weights [B, H, Sq, Sk] that our kernels keep with a key: in place of jax.random.bernoulli."""
    *batch, heads, q_length, k_length = shape
    query, array = (jnp.zeros((*batch, length, heads, 8), jnp.float32) for length in (q_length, k_length))
    return attention(query, array, array, dropout_prob=1 - p, dropout_rng=key, deterministic=False)[1] != 0
