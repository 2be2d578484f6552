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


def check_pairs(name: str, x: Any, whole: tuple[int, int, int, int]) -> Any:
    """Return a mask or bias with four axes; each has the size in `whole`, or 1. One of 2 or 3 axes lacks the
    first ones, as in NumPy's broadcasting.
    """
    axes = (1,) * (4 - x.ndim) + x.shape
    if x.ndim not in (2, 3, 4) or any(size not in (1, full) for size, full in zip(axes, whole, strict=True)):
        expected = ", ".join("1" if full == 1 else f"{full} or 1" for full in whole)
        advice = "The axes are batch, heads, queries and keys; the first ones may be left out."
        if x.ndim == 3 and x.shape[0] == whole[0]:
            advice = f"One for each batch entry is {name}[:, None]."
        refuse(name, f"shape {x.shape}", f"[{expected}]", advice)
    return x.reshape(axes)


def fitted(name: str, what: str, x: np.ndarray, advice: str) -> np.ndarray:
    """Return integers as int32; refuse those that it does not hold."""
    low, high = (int(x.min()), int(x.max())) if x.size else (0, 0)
    if low < -(2**31) or high >= 2**31:
        refuse(name, f"{what} from {low} to {high}", f"{what} that fit in int32", advice)
    return x.astype(np.int32)


def known_numbers(x: np.ndarray) -> jax.Array:
    """Return numbers that Python knows as an array of JAX.

    `jax.transfer_guard("disallow")` takes jnp.asarray for a transfer that nobody asked for.
    """
    return jax.device_put(x)
