"""Symbolic sizes, which `jax.export` leaves open: where calls may have them.

Batch and lengths may be symbolic, in the XLA kernel. JAX compares such a size with another one only where
the answer is the same for all values, so code for them compares sizes only for equality.
"""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from attest.kernels.call.call import Call
from attest.kernels.call.options import refuse


def is_symbolic_size(size: Any) -> bool:
    """Return whether a size of a shape is symbolic."""
    # Not by jax.export, whose import needs absl in some versions of JAX that do not install it.
    return not isinstance(size, int | np.integer)


def has_symbolic_sizes(arrays: Iterable[Any]) -> bool:
    """Return whether some array has a symbolic size; other values have none."""
    return any(is_symbolic_size(size) for x in arrays for size in getattr(x, "shape", ()))


def is_symbolic(call: Call) -> bool:
    """Return whether the batch or a length of a call is symbolic."""
    return any(is_symbolic_size(size) for size in (*call.query.shape[:2], call.key.shape[1]))


def check_symbolic(query: Any, key: Any, value: Any, softmax_aux: Any) -> None:
    """Refuse symbolic numbers of heads, channels and sinks: the last two sizes of each array.

    Raises: ValueError naming the argument.
    """
    for name, x in (("query", query), ("key", key), ("value", value), ("softmax_aux", softmax_aux)):
        if isinstance(x, jax.Array | np.ndarray) and any(map(is_symbolic_size, x.shape[-2:])):
            refuse(
                name,
                f"shape {x.shape}",
                "integers as its last 2 sizes",
                "Batch and lengths alone may be symbolic: export a program for each other shape.",
            )
