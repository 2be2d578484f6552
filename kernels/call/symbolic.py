"""Symbolic sizes, which `jax.export` leaves open: where calls may have them.

Batch and lengths may be symbolic, in the XLA kernel. JAX compares such a size with another one only where
the answer is the same for all values, so code for them asks for equality alone.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from attest.kernels.call.call import Call
from attest.kernels.call.options import refuse

# How many of the last axes of an argument have a size for each head, channel or sink.
_NUMBERS = {"query": 2, "key": 2, "value": 2, "softmax_aux": 2}


def is_symbolic_size(size: Any) -> bool:
    """Return whether a size of a shape is symbolic."""
    # Not by jax.export, whose import needs absl in some versions of JAX that do not install it.
    return not isinstance(size, int | np.integer)


def has_symbolic_sizes(arrays: Mapping[str, Any]) -> bool:
    """Return whether some array has a symbolic size; what is no array has none."""
    return any(is_symbolic_size(size) for x in arrays.values() for size in getattr(x, "shape", ()))


def is_symbolic(call: Call) -> bool:
    """Return whether the batch or a length of a call is symbolic."""
    return any(is_symbolic_size(size) for size in (*call.query.shape[:2], call.key.shape[1]))


def check_symbolic(arguments: Mapping[str, Any]) -> None:
    """Refuse symbolic numbers of heads, channels and sinks."""
    for name, axes in _NUMBERS.items():
        x = arguments[name]
        if isinstance(x, jax.Array | np.ndarray) and any(map(is_symbolic_size, x.shape[-axes:])):
            refuse(
                name,
                f"shape {x.shape}",
                f"integers as its last {axes} sizes",
                "Batch and lengths alone may be symbolic: export a program for each other shape.",
            )
