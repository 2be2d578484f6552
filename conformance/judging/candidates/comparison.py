"""The comparison of all outputs of a large call with those of the XLA kernel in float32, on the device.

The outputs have hundreds of megabytes, and a tuner has dozens of candidates: the program of the XLA kernel is
compiled once for all candidates of a call, and only the largest errors leave the device.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from attest.conformance.judging.candidates.inputs import Drawn

# What each of both results may be rounded by, in halves of a unit in the last place: see `furthest_off`.
_ROUNDINGS = 4.0


def in_float32(xla: Callable[..., Any], drawn: Drawn, d_out: NDArray[Any] | None) -> dict[str, jax.Array]:
    """Return the results of the XLA kernel in float32: out and, with a cotangent, the gradients.

    xla: the call of its Subject.
    """
    arrays = {name: jnp.asarray(x) for name, x in drawn.arguments.items() if isinstance(x, np.ndarray)}
    floats = {name: arrays.pop(name).astype(jnp.float32) for name in drawn.floats()}
    static = tuple((name, _hashable(x)) for name, x in drawn.arguments.items() if not _is_array(x))
    return _compute(xla, floats, arrays, None if d_out is None else jnp.asarray(d_out, jnp.float32), static)


def same_bits(first: Mapping[str, jax.Array], second: Mapping[str, jax.Array]) -> dict[str, bool]:
    """Return whether each output has the same bits twice."""
    return {name: bool(_equal(x, second[name])) for name, x in first.items()}


def furthest_off(got: jax.Array, want: jax.Array, limit: float, unit: float) -> tuple[float, tuple[int, ...]]:
    """Return the largest error of an array, as a share of the allowed error, and where it is.

    got: of any dtype, with a unit roundoff; want: float32 of the same shape. An element may be off by 2 *
    limit and by the rounding of both. One that is NaN in both is not off; one that is NaN in one is, by
    infinity.
    """
    ratio, index = _largest(got, want, limit, unit)
    return float(ratio), tuple(int(i) for i in np.unravel_index(int(index), got.shape))


@partial(jax.jit, static_argnames=("xla", "static"))
def _compute(
    xla: Callable[..., Any],
    floats: dict[str, Any],
    others: dict[str, Any],
    cotangent: Any,
    static: tuple[tuple[str, Any], ...],
) -> dict[str, Any]:
    def forward(floats: dict[str, Any]) -> Any:
        return xla(precision="highest", **floats, **others, **dict(static))[0]

    if cotangent is None:
        return {"out": forward(floats)}
    out, pull = jax.vjp(forward, floats)
    (gradients,) = pull(cotangent)
    return {"out": out} | {f"d{name}": x for name, x in gradients.items()}


@jax.jit
def _equal(first: jax.Array, second: jax.Array) -> jax.Array:
    as_integers = [jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for x in (first, second)]
    return (as_integers[0] == as_integers[1]).all()


@jax.jit
def _largest(got: jax.Array, want: jax.Array, limit: Any, unit: Any) -> tuple[jax.Array, jax.Array]:
    got = got.astype(jnp.float32)
    half_ulp = jnp.where(want == 0, 0.0, jnp.ldexp(unit, jnp.frexp(want)[1] - 1))
    error = jnp.abs(got - want)
    exact = (got == want) | (jnp.isnan(got) & jnp.isnan(want))
    ratio = jnp.where(exact, 0.0, error / (2 * limit + _ROUNDINGS * half_ulp))
    ratio = jnp.where(jnp.isnan(ratio), jnp.inf, ratio).ravel()
    index = jnp.argmax(ratio)
    return ratio[index], index


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def _hashable(x: Any) -> Any:
    return tuple(map(_hashable, x)) if isinstance(x, list | tuple) else x
