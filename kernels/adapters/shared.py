"""Parts that adapters share: arrays, masks and random keys in a library's form, and its names in errors."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.call.arrays import between, check_is_array, is_integer
from attest.kernels.call.options import refuse, shown


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


def as_floats(name: str, x: Any) -> Any:
    """Return an array as JAX holds it where it has floats; what has others is left to the checks of the call.

    Raises: ValueError for what is no array.
    """
    check_is_array(name, x)
    return jnp.asarray(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def as_pairs(name: str, x: Any, axes: int) -> Any:
    """Return a mask or bias with all its axes; it lacks the first ones, as in NumPy's broadcasting.

    A bias is returned as JAX holds its floats.

    Raises: ValueError if it is no array or has more axes.
    """
    return None if x is None else as_floats(name, _with_axes(name, x, axes))


def _with_axes(name: str, x: Any, axes: int) -> Any:
    check_is_array(name, x)
    if x.ndim > axes:
        expected = f"at most {axes} axes: those before the length of query, heads, queries and keys"
        refuse(name, f"shape {x.shape}", expected, "Remove an axis, or give query more batch dimensions.")
    return x.reshape((1,) * (axes - x.ndim) + x.shape)


def as_mask(name: str, mask: Any, axes: int) -> jax.Array | None:
    """Return a mask of bools, integers, or floats that are 0 and 1, as bool with all its axes.

    Numbers are read in the dtype that they have: JAX would narrow 2**32 to 0.

    Raises: ValueError for other dtypes, and for other floats, where they are not traced.
    """
    if mask is None:
        return None
    mask = _with_axes(name, mask, axes)
    if mask.dtype == np.bool_:
        return jnp.asarray(mask)
    if jnp.issubdtype(mask.dtype, jnp.floating):
        _check_zeros_and_ones(name, mask)
    elif not is_integer(mask.dtype):
        advice = "Pass mask != 0."
        refuse(name, f"dtype {mask.dtype}", "bool, integers, or floats that are 0 and 1", advice)
    return jnp.asarray(mask != mask.dtype.type(0))


def _check_zeros_and_ones(name: str, mask: Any) -> None:
    if isinstance(mask, Tracer):
        return
    values = np.asarray(mask)
    others = values[(values != 0) & (values != 1)]
    if others.size:
        advice = "Values to add to the logits are a bias."
        refuse(name, f"a float mask with {others[0]}", "bool, or floats that are 0 and 1", advice)


def as_seed(name: str, key: Any) -> jax.Array:
    """Return a random key, new or old style, as a typed key, which is a seed of dropout (S27).

    Raises: ValueError for what is no key.
    """
    got = None if key is None else f"a {type(key).__name__}"
    if isinstance(key, jax.Array | np.ndarray):
        got = f"an array of dtype {key.dtype} and shape {key.shape}"
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
            return jnp.asarray(key)
        if key.dtype == np.uint32 and key.ndim == 1:
            # How many words a key has depends on its kind.
            with suppress(TypeError, ValueError):
                return jax.random.wrap_key_data(jnp.asarray(key))
    return refuse(name, got, "a JAX random key where weights are dropped", "Pass jax.random.key(seed).")


def counts(name: str, x: Any, size: int, most: Any, unit: str) -> jax.Array:
    """Return numbers of tokens, one for each of `size` batch entries or sequences, as int32 [size].

    x: integers of any dtype, checked as they were given: from 0 to `most`, an int or a symbolic size. Traced
    ones end there. unit: what has a number, in words.

    Raises: ValueError naming the argument.
    """
    check_is_array(name, x)
    if x.shape != (size,) or not is_integer(x.dtype):
        expected = f"integers of shape ({size},)"
        refuse(name, f"{x.dtype} of shape {x.shape}", expected, f"Give one number for each {unit}.")
    if not isinstance(x, Tracer):
        known = np.asarray(x)
        outside = (known < 0) | (known > most)
        if outside.any():
            refuse(name, int(known[outside][0]), f"numbers from 0 to {most}", "Clip them to the array.")
    return between(x, 0, most)


def check_word(name: str, value: Any, known: tuple[str | None, ...], advice: str) -> Any:
    """Return a word or None, one of those that are known.

    Raises: ValueError naming the argument.
    """
    if not (value is None or isinstance(value, str)) or value not in known:
        refuse(name, shown(value), " or ".join(map(repr, known)), advice)
    return value


def top_left(query: jax.Array, key: jax.Array) -> int | None:
    """Return the `q_offset` that gives the first query the position of the first key (S23).

    None, where the lengths are equal: it is the default.
    """
    return None if query.shape[-3] == key.shape[-3] else 0
