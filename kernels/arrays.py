"""Checks of arrays: their kind, dtype and shape (clause S20)."""

from typing import Any

import jax
import numpy as np

from attest.kernels.options import FLOAT_DTYPES, refuse


def check_pair(name_a: str, a: Any, name_b: str, b: Any) -> bool:
    """Return whether two arguments are given; both must be, or neither."""
    if (a is None) != (b is None):
        missing, given = (name_a, name_b) if a is None else (name_b, name_a)
        refuse(missing, None, f"an array, because {given} is given", "Give both or neither.")
    return a is not None


def check_is_array(name: str, x: Any) -> None:
    """Refuse what is no JAX or NumPy array of this machine's byte order."""
    if not isinstance(x, jax.Array | np.ndarray) or isinstance(x, np.ma.MaskedArray):
        refuse(name, f"a {type(x).__name__}", "a JAX or NumPy array", "Convert it with jnp.asarray.")
    if isinstance(x, np.ndarray) and not x.dtype.isnative:
        refuse(
            name,
            f"dtype {x.dtype.str}, of another byte order",
            "the byte order of this machine",
            "Convert it with x.astype(x.dtype.newbyteorder('=')).",
        )


def check_float(name: str, x: Any) -> None:
    """Refuse an array of a dtype that is none of clause S16."""
    if x.dtype.name not in FLOAT_DTYPES:
        refuse(
            name,
            f"dtype {x.dtype}",
            f"one of {', '.join(FLOAT_DTYPES)}",
            "Cast it, as in x.astype('float32'); in JAX's x64 mode give new arrays a dtype.",
        )


def check_broadcast(name: str, x: Any, allowed: tuple[tuple[int, ...], ...]) -> None:
    """Refuse an array whose four axes have other sizes than those that are allowed."""
    if x.ndim != 4 or any(size not in sizes for size, sizes in zip(x.shape, allowed, strict=True)):
        axes = ", ".join(" or ".join(str(size) for size in dict.fromkeys(sizes)) for sizes in allowed)
        refuse(name, f"shape {x.shape}", f"[{axes}]", "The axes are batch, heads, queries and keys.")


def fitted(name: str, what: str, x: np.ndarray, advice: str) -> np.ndarray:
    """Return integers as int32; refuse those that it does not hold."""
    low, high = (int(x.min()), int(x.max())) if x.size else (0, 0)
    if low < -(2**31) or high >= 2**31:
        refuse(name, f"{what} from {low} to {high}", f"{what} that fit in int32", advice)
    return x.astype(np.int32)
