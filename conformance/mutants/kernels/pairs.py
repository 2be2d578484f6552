"""Which pairs of a query and a key are seen, and which dropout keeps: for NumPy and for JAX alike.

Every function takes the array namespace `xp`, numpy or jax.numpy, as its first argument.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@dataclass(frozen=True)
class Rows:
    """What each query row may see, as [B or 1, Sq]: the keys first to last, none in a row of padding."""

    first: Any
    last: Any
    padding: Any


def describe_rows(
    xp: Any,
    shape: tuple[int, int, int],
    causal: bool,
    window: tuple[int | None, int | None] | None,
    lengths: tuple[Any, Any] | None,
    q_ids: Any,
) -> Rows:
    """Return the interval of keys of every row (S6, S7, S9), and which rows are padding (S8, S9).

    shape: (B, Sq, Sk). lengths: running totals of queries and of keys, or None.
    """
    batch, q_len, kv_len = shape
    row = xp.arange(q_len, dtype=xp.int32)[None, :]
    if lengths is None:
        start, stop = xp.zeros_like(row), xp.full_like(row, kv_len)
        aligned = row + (kv_len - q_len)
        padding = xp.zeros_like(row, dtype=bool)
    else:
        cum_q, cum_k = lengths
        if batch == 1:
            sequence = (row[0][:, None] >= cum_q[None, 1:]).sum(axis=1)[None, :]
            padding = sequence >= cum_q.shape[0] - 1
            own = xp.minimum(sequence, cum_q.shape[0] - 2)
            start, stop = cum_k[own], cum_k[own + 1]
            aligned = row - cum_q[own + 1] + stop
        else:
            q_count, k_count = (cum[1:, None] - cum[:-1, None] for cum in (cum_q, cum_k))
            padding = row >= q_count
            start, stop = xp.zeros_like(k_count), k_count
            aligned = row + k_count - q_count
    first, last = start, stop - 1
    if causal:
        last = xp.minimum(last, aligned)
    left, right = window or (None, None)
    reach = q_len + kv_len  # a side beyond it sees everything, and would overflow int32 at the worst
    if left is not None:
        first = xp.maximum(first, aligned - min(left, reach))
    if right is not None:
        last = xp.minimum(last, aligned + min(right, reach))
    if q_ids is not None:
        padding = padding | (q_ids < 0)
    return Rows(xp.where(padding, kv_len, first), xp.where(padding, -1, last), padding)


def keep(
    xp: Any,
    repeat: Callable[[int, Callable[[Any], Any], Any], Any],
    seed: Any,
    rate: float,
    place: tuple[Any, Any],
    rows: Any,
    first_key: Any,
    keys: int,
) -> Any:
    """Return which weights of a tile dropout keeps (S12): bool [rows, keys].

    repeat: calls a function of a state so many times. seed: [2] uint32, the low word first.
    place: batch entry and head. first_key, keys: multiples of four.
    """
    shape = (rows.shape[0], keys // 4)
    quads = xp.arange(shape[1], dtype=xp.uint32) + xp.asarray(first_key // 4).astype(xp.uint32)
    counter = (
        xp.broadcast_to(quads[None, :], shape),
        xp.broadcast_to(rows.astype(xp.uint32)[:, None], shape),
        xp.broadcast_to(xp.asarray(place[1]).astype(xp.uint32), shape),
        xp.broadcast_to(xp.asarray(place[0]).astype(xp.uint32), shape),
    )

    def one_round(state: Any) -> Any:
        (c0, c1, c2, c3), (k0, k1) = state
        high0, low0 = _product(xp, c0, _MULTIPLIERS[0])
        high1, low1 = _product(xp, c2, _MULTIPLIERS[1])
        key = (k0 + xp.asarray([_WEYL[0]], xp.uint32), k1 + xp.asarray([_WEYL[1]], xp.uint32))
        return (high1 ^ c1 ^ k0[:, None], low1, high0 ^ c3 ^ k1[:, None], low0), key

    words, _ = repeat(_ROUNDS, one_round, (counter, (seed[:1], seed[1:])))
    threshold = xp.asarray(int(rate * 2.0**32), xp.uint32)
    return xp.stack(words, axis=-1).reshape(shape[0], keys) >= threshold


def _product(xp: Any, word: Any, constant: int) -> tuple[Any, Any]:
    """Return the high and the low word of a product of 32 bits by 32 bits."""
    half = xp.asarray(0xFFFF, xp.uint32)
    c_low, c_high = xp.asarray(constant & 0xFFFF, xp.uint32), xp.asarray(constant >> 16, xp.uint32)
    w_low, w_high = word & half, word >> 16
    low, cross_a, cross_b = w_low * c_low, w_low * c_high, w_high * c_low
    middle = (low >> 16) + (cross_a & half) + (cross_b & half)
    high = w_high * c_high + (cross_a >> 16) + (cross_b >> 16) + (middle >> 16)
    return high, word * xp.asarray(constant, xp.uint32)
