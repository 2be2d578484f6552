"""Values that no argument of an adapter means."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


class Hostile:
    """It raises however its value is asked for."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def _raise(self, *_: Any) -> Any:
        raise RuntimeError("no")

    __index__ = __float__ = __len__ = __iter__ = __array__ = __bool__ = __eq__ = _raise
    __hash__ = None  # unhashable


def like(x: Any, dtype: Any) -> Any:
    """Zeros of a dtype, in the shape of the argument that they replace."""
    return np.zeros(getattr(x, "shape", (2,)), dtype)


# What no argument means, made from the argument that it replaces.
HOSTILE: dict[str, Callable[[Any], Any]] = {
    "text": lambda x: "text",
    "bytes": lambda x: b"bytes",
    "an object": lambda x: Hostile(),
    "an object array": lambda x: like(x, object),
    "an array of text": lambda x: like(x, "U2"),
    "an array of durations": lambda x: like(x, "timedelta64[s]"),
    "an array of dates": lambda x: like(x, "datetime64[s]"),
    "a duration": lambda x: np.timedelta64(3, "s"),
    "records": lambda x: like(x, [("a", "i4")]),
    "complex numbers": lambda x: like(x, complex),
    "another byte order": lambda x: like(x, ">f4"),
    "a masked array": lambda x: np.ma.masked_array(like(x, "f")),
    "many axes": lambda x: np.zeros((1,) * 7, "f"),
    "a list of lists": lambda x: [[1, 2], [3]],
    "a dictionary": lambda x: {"a": 1},
    "random keys": lambda x: jax.random.split(jax.random.key(0), 3),
}
