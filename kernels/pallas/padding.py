"""Padding of arrays to multiples of the block sizes of a Pallas kernel."""

from typing import Any

import jax.numpy as jnp


def padded(x: Any, axis: int, length: int, fill: float) -> Any:
    """Return the array x, padded to a length along an axis; unchanged if it has that length already."""
    if x.shape[axis] == length:
        return x
    widths = [(0, length - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)
