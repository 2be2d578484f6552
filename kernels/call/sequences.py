"""Checks of segment ids and of cumulative lengths (clauses S8, S9, S20)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.call.arrays import check_is_array, check_pair, fitted, is_integer, saturated
from attest.kernels.call.options import refuse


def check_segments(
    q_ids: Any, kv_ids: Any, batch: int, q_length: int, k_length: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return segment ids as int32 arrays [B, Sq] and [B, Sk], or None twice (clause S8)."""
    if not check_pair("q_segment_ids", q_ids, "kv_segment_ids", kv_ids):
        return None, None
    checked: list[Any] = []
    for name, ids, length in (("q_segment_ids", q_ids, q_length), ("kv_segment_ids", kv_ids, k_length)):
        check_is_array(name, ids)
        if not is_integer(ids.dtype):
            refuse(name, f"dtype {ids.dtype}", "an integer dtype", "Cast the ids to int32.")
        if ids.shape != (batch, length):
            refuse(name, f"shape {ids.shape}", f"{(batch, length)}", "Give one id per token.")
        if not isinstance(ids, Tracer):
            ids = fitted(name, "ids", np.asarray(ids), "Renumber the segments.")
        checked.append(ids)
    if all(_fits(ids) for ids in checked):
        return jnp.asarray(checked[0], jnp.int32), jnp.asarray(checked[1], jnp.int32)
    return _renumbered(*(jnp.asarray(ids) for ids in checked))


def _fits(ids: Any) -> bool:
    """Return whether int32 holds every value of a dtype."""
    return np.can_cast(ids.dtype, np.int32)


def _renumbered(q_ids: jax.Array, kv_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Renumber ids of dtypes that int32 does not hold, in their order: equal ids stay equal, padding is -1.

    Only for traced ids, whose values cannot be checked.
    """
    wide = jnp.uint64 if 8 in (q_ids.dtype.itemsize, kv_ids.dtype.itemsize) else jnp.uint32
    known = jnp.sort(kv_ids.reshape(-1).astype(wide))

    def rank(ids: jax.Array) -> jax.Array:
        place = jnp.searchsorted(known, ids.astype(wide)).astype(jnp.int32)
        if not known.size:
            return jnp.where(ids < 0, jnp.int32(-1), place)
        found = known[jnp.minimum(place, known.size - 1)] == ids.astype(wide)
        return jnp.where(ids < 0, jnp.int32(-1), jnp.where(found, place, jnp.int32(known.size)))

    return rank(q_ids), rank(kv_ids)


def check_lengths(
    cum_q: Any, cum_k: Any, batch: int, q_length: int, k_length: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return cumulative lengths as int32 arrays [n + 1], or None twice (clause S9)."""
    if not check_pair("cum_seqlens_q", cum_q, "cum_seqlens_k", cum_k):
        return None, None
    for name, cum, length in (("cum_seqlens_q", cum_q, q_length), ("cum_seqlens_k", cum_k, k_length)):
        check_is_array(name, cum)
        if cum.dtype not in (np.int32, np.int64):
            refuse(name, f"dtype {cum.dtype}", "int32 or int64", "Cast it with .astype('int32').")
        if cum.ndim != 1 or not (cum.shape[0] == batch + 1 or (batch == 1 and cum.shape[0] >= 2)):
            expected = (
                "[n + 1] with n >= 1, the packed sequences" if batch == 1 else f"[{batch + 1}], batch + 1"
            )
            refuse(name, f"shape {cum.shape}", expected, "Start it at 0 and end it with the total length.")
        if not isinstance(cum, Tracer):
            _check_cum_values(name, np.asarray(cum), batch, length)
    if cum_q.shape != cum_k.shape:
        refuse(
            "cum_seqlens_k",
            f"shape {cum_k.shape}",
            f"{cum_q.shape}, that of cum_seqlens_q",
            "Pair the sequences.",
        )
    return _int32(cum_q), _int32(cum_k)


def _int32(cum: Any) -> jax.Array:
    """Return cumulative lengths as int32: known ones, already checked, fit; traced ones are limited to it."""
    return saturated(cum) if isinstance(cum, Tracer) else jnp.asarray(cum, jnp.int32)


def _check_cum_values(name: str, cum: np.ndarray, batch: int, length: int) -> None:
    lengths = np.diff(fitted(name, "entries", cum, "Sum the lengths from 0.").astype(np.int64))
    if cum[0] != 0:
        refuse(name, f"first entry {cum[0]}", "0", "Prepend 0 to the running sum of the lengths.")
    if (lengths < 0).any():
        at = int(np.argmax(lengths < 0))
        refuse(
            name,
            f"{cum[at + 1]} after {cum[at]} at entry {at + 1}",
            "non-decreasing entries",
            "Sum the lengths.",
        )
    longest = int(cum[-1]) if batch == 1 else int(lengths.max(initial=0))
    if longest > length:
        refuse(
            name,
            f"{longest} tokens",
            f"at most {length}, the length of the array",
            "Pad the array or cut it.",
        )
