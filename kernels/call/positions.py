"""Checks of the positions of rows and keys, and of the origin of a call in larger arrays (clause S23).

Causal order and windows compare positions. By default key j is at position j and row i at i + (Sk - Sq), so
that the last row has the position of the last key, in each sequence if there are lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.call.arrays import as_int32, check_is_array, is_integer, known_numbers
from attest.kernels.call.options import check_integer, refuse

# A word of the counter of dropout's generator, and the keys that one call of it serves.
_WORDS = 2**32
KEY_GROUP = 4
_NEARER = "Count from a nearer start."
_ORIGIN = "They are the coordinates in the whole array of the first entry of this call."


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Positions:
    """The positions of rows and keys; a field is None where the default holds. All int32 but the origin.

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
        return as_int32("q_offset", "values", offset, _NEARER)
    check_is_array("q_offset", offset)
    if not is_integer(offset.dtype):
        refuse("q_offset", f"dtype {offset.dtype}", "an integer dtype", advice)
    if offset.shape not in ((), (sequences,)):
        refuse("q_offset", f"shape {offset.shape}", f"() or ({sequences},)", advice)
    return as_int32("q_offset", "values", offset.reshape(-1), _NEARER)


def _check_tokens(name: str, positions: Any, batch: int, length: int) -> jax.Array | None:
    if positions is None:
        return None
    advice = "Give one integer per token."
    check_is_array(name, positions)
    if not is_integer(positions.dtype):
        refuse(name, f"dtype {positions.dtype}", "an integer dtype", advice)
    if positions.shape not in ((batch, length), (1, length)):
        refuse(name, f"shape {positions.shape}", f"[{batch} or 1, {length}]", advice)
    return as_int32(name, "values", positions, _NEARER)


def _check_origin(origin: Any) -> jax.Array:
    expected = "4 integers: batch entry, query head, row and key"
    if isinstance(origin, jax.Array | np.ndarray):
        if origin.shape != (4,) or not is_integer(origin.dtype):
            refuse("origin", f"shape {origin.shape} and dtype {origin.dtype}", expected, _ORIGIN)
        if isinstance(origin, Tracer):
            return _words(origin)
    elif not isinstance(origin, tuple | list):
        refuse("origin", f"a {type(origin).__name__}", expected, _ORIGIN)
    elif len(origin) != 4:
        refuse("origin", f"{len(origin)} of them", expected, _ORIGIN)
    entries = [x if _is_traced(x) else check_integer("origin", x, _ORIGIN) for x in origin]
    known = [x for x in entries if isinstance(x, int)]
    if not all(0 <= x < _WORDS for x in known):
        refuse("origin", str(known), "coordinates from 0 to below 2**32", _ORIGIN)
    key = entries[3]
    if isinstance(key, int) and key % KEY_GROUP:
        refuse("origin", f"key {key}", f"a multiple of {KEY_GROUP}", "Split keys at multiples of it.")
    if len(known) == len(entries):
        return known_numbers(np.array(known, np.uint32))
    return jnp.stack([np.uint32(x) if isinstance(x, int) else _words(x) for x in entries])


def _is_traced(x: Any) -> bool:
    """Return whether the argument is one traced integer."""
    return isinstance(x, Tracer) and x.shape == () and is_integer(x.dtype)


def _words(x: jax.Array) -> jax.Array:
    """Return traced integers as uint32, those beyond its range at its ends."""
    info = jnp.iinfo(x.dtype)
    low, high = max(0, int(info.min)), min(_WORDS - 1, int(info.max))
    return jnp.clip(x, jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype)).astype(jnp.uint32)
