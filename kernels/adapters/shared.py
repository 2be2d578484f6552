"""What several adapters need: masks and random keys in a library's form, and its names in errors."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.options import refuse


@contextmanager
def renamed(names: Mapping[str, str]) -> Generator[None]:
    """Raise the refusals of the kernels under the names of the library.

    names: the library's name of an argument, by the name that begins the message of a kernel.
    """
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        name, colon, rest = str(error).partition(":")
        if name not in names:
            raise
        raise type(error)(f"{names[name]}{colon}{rest}") from None


def missing(adapter: str, package: str, error: ModuleNotFoundError) -> ImportError:
    """Return the error to raise where an import failed: one sentence if the package is not installed."""
    if error.name != package:
        return error
    return ImportError(f"{adapter}: needs {package}, which is not installed; run pip install {package}.")


def as_pairs(name: str, x: Any, axes: int) -> jax.Array | None:
    """Return a mask or bias with all its axes; it lacks the first ones, as in NumPy's broadcasting.

    Raises: ValueError if it has more axes.
    """
    if x is None:
        return None
    x = jnp.asarray(x)
    if x.ndim > axes:
        expected = f"at most {axes} axes: those before the length of query, heads, queries and keys"
        refuse(name, f"shape {x.shape}", expected, "Remove an axis, or give query more batch dimensions.")
    return x.reshape((1,) * (axes - x.ndim) + x.shape)


def as_mask(name: str, mask: Any, axes: int) -> jax.Array | None:
    """Return a mask of bools, integers, or floats that are 0 and 1, as bool with all its axes.

    Raises: ValueError for other floats, where they are not traced.
    """
    mask = as_pairs(name, mask, axes)
    if mask is None or mask.dtype == np.bool_:
        return mask
    if jnp.issubdtype(mask.dtype, jnp.floating) and not isinstance(mask, Tracer):
        values = np.asarray(mask)
        others = values[(values != 0) & (values != 1)]
        if others.size:
            advice = "Values to add to the logits are a bias."
            refuse(name, f"a float mask with {others[0]}", "bool, or floats that are 0 and 1", advice)
    return mask != jnp.zeros((), mask.dtype)


def as_seed(name: str, key: Any) -> jax.Array:
    """Return a random key, new or old style, as a typed key, which is a seed of dropout (S27).

    Raises: ValueError for what is no key.
    """
    got = None if key is None else f"a {type(key).__name__}"
    if isinstance(key, jax.Array | np.ndarray):
        got = f"an array of dtype {key.dtype} and shape {key.shape}"
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            return jnp.asarray(key)
        if key.dtype == np.uint32 and key.ndim == 1:
            return jax.random.wrap_key_data(jnp.asarray(key))
    return refuse(name, got, "a JAX random key where weights are dropped", "Pass jax.random.key(seed).")


def top_left(query: jax.Array, key: jax.Array) -> int | None:
    """Return the `q_offset` by which the first query stands at the first key (S23).

    None, where the lengths are equal: it is the default.
    """
    return None if query.shape[-3] == key.shape[-3] else 0
