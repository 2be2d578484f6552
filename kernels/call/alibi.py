"""ALiBi (clause S25): the slopes of a call, which are constants, and what they add to the logits."""

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.call.arrays import check_is_array
from attest.kernels.call.options import refuse
from attest.kernels.guards import guard

# The product of a slope and a difference of positions is far from what float32 overflows at.
LARGEST_SLOPE = 2.0**64
# Beyond all such products.
_BEYOND = 2.0**100


def check_slopes(slopes: Any, batch: int, heads: int) -> jax.Array | None:
    """Return the slopes of the query heads as float32 [B or 1, Hq], whose derivative raises.

    slopes: [Hq] or [B or 1, Hq], or None.

    Raises: ValueError naming the argument. NotImplementedError, where a derivative by them is computed.
    """
    if slopes is None:
        return None
    check_is_array("alibi_slopes", slopes)
    if slopes.dtype != np.float32:
        refuse("alibi_slopes", f"dtype {slopes.dtype}", "float32", "Cast it with .astype('float32').")
    if slopes.shape not in ((heads,), (1, heads), (batch, heads)):
        expected = f"[{heads}], or [{batch} or 1, {heads}]"
        refuse("alibi_slopes", f"shape {slopes.shape}", expected, "Give one slope for each query head.")
    if not isinstance(slopes, Tracer) and getattr(slopes, "is_fully_addressable", True):
        _check_values(np.asarray(slopes))
    return _constant.bind(jnp.asarray(slopes).reshape(-1, heads))


def _check_values(slopes: np.ndarray) -> None:
    # NaN is not in the range either.
    outside = ~(np.abs(slopes) <= LARGEST_SLOPE)
    if outside.any():
        expected = f"finite numbers of at most {LARGEST_SLOPE:.3g} in size"
        refuse("alibi_slopes", float(slopes[outside][0]), expected, "A head without ALiBi has slope 0.")


def alibi_term(slopes: jax.Array, rows: jax.Array, keys: jax.Array) -> jax.Array:
    """Return -slope * |row - key| as float32, from slopes and int32 positions that broadcast.

    The limits, which nothing reaches, keep a compiler from fusing the product with the sum that it is for:
    where it did so once and not the other time, a logit would be another number than the row maximum.
    """
    return jnp.clip(-slopes * jnp.abs((rows - keys).astype(jnp.float32)), -_BEYOND, _BEYOND)


def _refuse_derivative(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "alibi_slopes: got a derivative with respect to them; expected constants. Pass "
        "jax.lax.stop_gradient(alibi_slopes), or pass slopes that are learned as a bias."
    )


_constant = guard("alibi_slopes", jvp=_refuse_derivative)
