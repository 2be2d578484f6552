"""Checks of the range of keys that each row may see, and of the size of chunks (clauses S20, S24, S28)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.call.arrays import between, check_is_array
from attest.kernels.call.options import check_integer, refuse, shown

_INT32 = 2**31 - 1


def check_ranges(
    kv_start: Any, kv_end: Any, batch: int, q_length: int, k_length: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the ends of ranges as int32 [B or 1, Sq] within [0, Sk], each None where it is not given (S28).

    Raises: ValueError naming the argument.
    """
    start = _check_end("kv_start", kv_start, batch, q_length, k_length)
    return start, _check_end("kv_end", kv_end, batch, q_length, k_length)


def _check_end(name: str, ends: Any, batch: int, q_length: int, k_length: int) -> jax.Array | None:
    if ends is None:
        return None
    advice = "Give one index of a key for each row."
    check_is_array(name, ends)
    if ends.dtype not in (np.int32, np.int64):
        refuse(name, f"dtype {ends.dtype}", "int32 or int64", "Cast it with .astype('int32').")
    if ends.shape not in ((batch, q_length), (1, q_length)):
        refuse(name, f"shape {ends.shape}", f"[{batch} or 1, {q_length}]", advice)
    # In its own dtype: an index beyond the keys is as good as their end, and may be more than int32 holds.
    return between(ends, 0, k_length)


def hide_rows(end: jax.Array | None, visible: jax.Array, q_length: int, k_length: int) -> jax.Array:
    """Return the end of the keys of each row, 0 where a mask [B or 1, Sq or 1] hides the whole row.

    Such a row is empty (S10) in either form, and an end lets kernels skip it.
    """
    ends = jnp.where(visible, jnp.int32(k_length) if end is None else end, jnp.int32(0))
    return jnp.broadcast_to(ends, (ends.shape[0], q_length))


def check_chunk_size(chunk_size: Any) -> int | None:
    """Return the number of positions in a chunk, which int32 holds (S24)."""
    if chunk_size is None:
        return None
    size = check_integer("chunk_size", chunk_size)
    if not 1 <= size <= _INT32:
        refuse("chunk_size", shown(size), f"an integer from 1 to {_INT32}", "Leave it out for no chunks.")
    return size
