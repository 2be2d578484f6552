"""Positions of rows and keys, and where a call stands in a larger array (clause S23): their checks.

Causal order and windows compare positions. By default key j stands at j and row i at i + (Sk - Sq), so that
the last row stands where the last key does, per sequence under lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.arrays import check_is_array, fitted, known_numbers
from attest.kernels.options import check_integer, refuse

# A word of the counter of dropout's generator, and the keys that one call of it serves.
_WORDS = 2**32
KEY_GROUP = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Positions:
    """Where rows and keys stand; a field is None where the default holds. All int32 but the origin.

    q_offset and q exclude each other. The origin is a batch entry, a query head, a row and a key.
    """

    q_offset: jax.Array | None = None  # [1], or one for each sequence
    q: jax.Array | None = None  # [B or 1, Sq]
    kv: jax.Array | None = None  # [B or 1, Sk]
    origin: jax.Array | None = None  # [4] uint32: where the call begins in the whole

    @property
    def given(self) -> bool:
        """Whether visibility depends on an array of positions."""
        return any(x is not None for x in (self.q_offset, self.q, self.kv))


def check_positions(
    q_offset: Any,
    q_positions: Any,
    kv_positions: Any,
    origin: Any,
    *,
    sequences: int,
    batch: int,
    q_length: int,
    k_length: int,
) -> Positions:
    """Return the arguments of clause S23 as int32 arrays; sequences: how many offsets there may be.

    Raises: ValueError naming the argument.
    """
    if q_offset is not None and q_positions is not None:
        refuse("q_offset", "both q_offset and q_positions", "one of them", "q_positions says all of it.")
    return Positions(
        q_offset=None if q_offset is None else _check_offset(q_offset, sequences),
        q=_check_tokens("q_positions", q_positions, batch, q_length),
        kv=_check_tokens("kv_positions", kv_positions, batch, k_length),
        origin=None if origin is None else _check_origin(origin),
    )


def moved_origin(origin: Any, first: Sequence[Any]) -> jax.Array:
    """Return the origin of a part of a call, uint32 [4], from that of the call, None for the whole.

    first: where the part begins in the call: batch entry, query head, row and key.
    """
    begin = jnp.stack([jnp.asarray(x, jnp.uint32) for x in first])
    return begin if origin is None else jnp.asarray(origin, jnp.uint32) + begin


def _check_offset(offset: Any, sequences: int) -> jax.Array:
    advice = f"Pass an int, or an integer array of shape ({sequences},), one for each sequence."
    if not isinstance(offset, jax.Array | np.ndarray):
        offset = np.array([check_integer("q_offset", offset, advice)], dtype=object)
        return _as_int32("q_offset", offset)
    check_is_array("q_offset", offset)
    if not jnp.issubdtype(offset.dtype, jnp.integer):
        refuse("q_offset", f"dtype {offset.dtype}", "an integer dtype", advice)
    if offset.shape not in ((), (sequences,)):
        refuse("q_offset", f"shape {offset.shape}", f"() or ({sequences},)", advice)
    return _as_int32("q_offset", offset.reshape(-1))


def _check_tokens(name: str, positions: Any, batch: int, length: int) -> jax.Array | None:
    if positions is None:
        return None
    advice = "Give one integer per token."
    check_is_array(name, positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        refuse(name, f"dtype {positions.dtype}", "an integer dtype", advice)
    if positions.shape not in ((batch, length), (1, length)):
        refuse(name, f"shape {positions.shape}", f"[{batch} or 1, {length}]", advice)
    return _as_int32(name, positions)


def _check_origin(origin: Any) -> jax.Array:
    expected = "4 integers: batch entry, query head, row and key"
    advice = "They are the coordinates in the whole array of the first entry of this call."
    if isinstance(origin, tuple | list):
        if len(origin) != 4:
            refuse("origin", f"{len(origin)} of them", expected, advice)
        if any(isinstance(x, jax.Array) for x in origin):
            origin = jnp.stack([jnp.asarray(x) for x in origin])
        else:
            origin = np.array([check_integer("origin", x, advice) for x in origin], dtype=object)
    if not isinstance(origin, jax.Array | np.ndarray):
        refuse("origin", f"a {type(origin).__name__}", expected, advice)
    if origin.shape != (4,) or not (origin.dtype == object or jnp.issubdtype(origin.dtype, jnp.integer)):
        refuse("origin", f"shape {origin.shape} and dtype {origin.dtype}", expected, advice)
    if isinstance(origin, Tracer):
        return origin.astype(jnp.uint32)
    known = [int(x) for x in origin]
    if not all(0 <= x < _WORDS for x in known):
        refuse("origin", str(known), "coordinates from 0 to below 2**32", advice)
    if known[3] % KEY_GROUP:
        refuse("origin", f"key {known[3]}", f"a multiple of {KEY_GROUP}", "Split keys at multiples of it.")
    return known_numbers(np.array(known, np.uint32))


def _as_int32(name: str, x: Any) -> jax.Array:
    if not isinstance(x, Tracer):
        return known_numbers(fitted(name, "values", np.asarray(x), "Count from a nearer start."))
    return jnp.asarray(x, jnp.int32)
