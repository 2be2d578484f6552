"""Arithmetic of indices: in a kernel, or with NumPy's arrays, for which nothing is compiled.

Dividends are not negative, but for `div`, which rounds to zero as the GPU does.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def div(x: Any, y: Any) -> Any:
    """Return x / y, rounded to zero."""
    return lax.div(x, y) if _in_kernel(x) else np.where(x < 0, -(-x // y), x // y)


def rem(x: Any, y: Any) -> Any:
    """Return what is left of x >= 0, divided by y."""
    return lax.rem(x, y) if _in_kernel(x) else x % y


def minimum(x: Any, y: Any) -> Any:
    """Return the smaller of each two."""
    return _module(x, y).minimum(x, y)


def maximum(x: Any, y: Any) -> Any:
    """Return the larger of each two."""
    return _module(x, y).maximum(x, y)


def unknown(*numbers: Any) -> tuple[Any, ...]:
    """Return numbers of a kernel as ones of which the compiler knows nothing, NumPy's arrays as they are."""
    return numbers if any(isinstance(x, np.ndarray) for x in numbers) else lax.optimization_barrier(numbers)


def _module(*numbers: Any) -> Any:
    return jnp if any(map(_in_kernel, numbers)) else np


def _in_kernel(x: Any) -> bool:
    return isinstance(x, jax.Array)
