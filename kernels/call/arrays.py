"""Checks of arrays: their kind, dtype and shape, and integers that int32 must hold (clause S20)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.call.options import FLOAT_DTYPES, refuse

_INT32 = np.iinfo(np.int32)


def check_pair(name_a: str, a: Any, name_b: str, b: Any) -> bool:
    """Return whether two arguments are given; both must be, or neither."""
    if (a is None) != (b is None):
        missing, given = (name_a, name_b) if a is None else (name_b, name_a)
        refuse(missing, None, f"an array, because {given} is given", "Give both or neither.")
    return a is not None


def check_is_array(name: str, x: Any) -> None:
    """Refuse a value that is not a JAX or NumPy array of this machine's byte order."""
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
    """Refuse an array whose dtype is not one of clause S16."""
    if x.dtype.name not in FLOAT_DTYPES:
        refuse(
            name,
            f"dtype {x.dtype}",
            f"one of {', '.join(FLOAT_DTYPES)}",
            "Cast it, as in x.astype('float32'); in JAX's x64 mode give new arrays a dtype.",
        )


def check_pairs(name: str, x: Any, whole: tuple[int, int, int, int]) -> Any:
    """Return a mask or bias with four axes; each has the size in `whole`, or 1.

    One of 2 or 3 axes lacks the first ones, as in NumPy's broadcasting.
    """
    axes = (1,) * (4 - x.ndim) + x.shape
    batch, _, _, k_length = whole
    if x.ndim not in (2, 3, 4) or any(size not in (1, full) for size, full in zip(axes, whole, strict=True)):
        expected = ", ".join("1" if full == 1 else f"{full} or 1" for full in whole)
        advice = "The axes are batch, heads, queries and keys; the first ones may be left out."
        if x.ndim == 3 and x.shape[0] == batch:
            advice = f"One for each batch entry is {name}[:, None]."
        if x.shape == (batch, k_length):
            advice = (
                f"One of keys for each batch entry is {name}[:, None, None, :], [{batch}, 1, 1, {k_length}]."
            )
        refuse(name, f"shape {x.shape}", f"[{expected}]", advice)
    return x.reshape(axes)


def is_integer(dtype: Any) -> bool:
    """Return whether a dtype is one of integers. NumPy counts durations, timedelta64, among them."""
    return jnp.issubdtype(dtype, jnp.integer) and not np.issubdtype(dtype, np.timedelta64)


def as_int32(name: str, what: str, x: Any, advice: str) -> jax.Array:
    """Return integers as int32: known ones that it does not hold are refused, traced ones are `saturated`.

    The values are checked as they were given: `jnp.asarray` alone narrows them silently.
    """
    if isinstance(x, Tracer):
        return saturated(x)
    return known_numbers(fitted(name, what, np.asarray(x), advice))


def saturated(x: Any) -> jax.Array:
    """Return integers as int32; those beyond its range become its limits, so that none wraps around."""
    if np.can_cast(x.dtype, np.int32):
        return jnp.asarray(x, jnp.int32)
    return between(x, _INT32.min, _INT32.max)


def between(x: Any, low: int, high: Any) -> jax.Array:
    """Return integers as int32, limited to low and high, which int32 holds, before they are narrowed.

    high: an int, or a symbolic size, which is compared with nothing here.
    """
    info = jnp.iinfo(x.dtype)
    low, high = max(low, int(info.min)), min(high, int(info.max)) if isinstance(high, int) else high
    if isinstance(x, np.ndarray) and isinstance(high, int):
        return jnp.asarray(x.clip(low, high).astype(np.int32))
    return jnp.clip(x, low, high).astype(jnp.int32)


def broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    """Return an array of this shape, of NumPy where it is one, whose integers JAX would narrow."""
    return np.broadcast_to(x, shape) if isinstance(x, np.ndarray) else jnp.broadcast_to(x, shape)


def exactly_narrowed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with NumPy's 64-bit masks and ranges as JAX can hold them.

    JAX narrows such an array to 32 bits where it enters a program, so that 2**32 in a mask would be 0. Other
    integers are refused where int32 does not hold them.
    """
    changed: dict[str, Any] = {}
    for name in ("attention_mask", "kv_start", "kv_end"):
        x = arguments.get(name)
        if isinstance(x, np.ndarray) and x.dtype in (np.int64, np.uint64):
            if name == "attention_mask":
                changed[name] = x != 0
            elif x.dtype == np.int64:
                changed[name] = x.clip(_INT32.min, _INT32.max).astype(np.int32)
    seed = arguments.get("dropout_seed")
    if isinstance(seed, np.ndarray) and seed.ndim == 0 and is_integer(seed.dtype):
        changed["dropout_seed"] = int(seed)
    return {**arguments, **changed}


def fitted(name: str, what: str, x: np.ndarray, advice: str) -> np.ndarray:
    """Return integers as int32; refuse those that it does not hold."""
    low, high = (int(x.min()), int(x.max())) if x.size else (0, 0)
    if low < _INT32.min or high > _INT32.max:
        refuse(name, f"{what} from {low} to {high}", f"{what} that fit in int32", advice)
    return x.astype(np.int32)


def known_numbers(x: np.ndarray) -> jax.Array:
    """Return concrete numbers as an array of JAX.

    `jax.transfer_guard("disallow")` treats jnp.asarray as an implicit transfer.
    """
    return jax.device_put(x)
