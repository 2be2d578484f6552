"""Visibility: an interval of keys for each query row, segment ids, a mask and a bias.

Causal order, windows, sequence lengths, chunks and ranges (clauses S6, S7, S9, S24, S28) all reduce to one
closed interval of key indices [first, last] per query row, as the tokens of a sequence are contiguous.
Positions of rows only move the interval; positions of keys (S23) are compared key by key. An interval is O(S)
to store, gives any tile of the visibility by two comparisons, and tells which key blocks a block of rows can
skip.

Padding rows (past a length, past the last cumulative length, or with a negative segment id) are told apart
from rows that merely see no key: clause S9 gives padding an lse of -inf even where sinks are present, clause
S11 gives an empty row the logsumexp of its sinks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.call.call import Call
from attest.kernels.call.symbolic import is_symbolic

_INT32 = np.iinfo(np.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The visible keys of each query row; N is B, or 1 where all batch entries agree.

    A field is None where the call does not constrain that side. A row with last < first sees no key. The
    arrays are NumPy's where `describe_rows` was called with xp=numpy.
    """

    first: jax.Array | None  # [N, Sq] int32, the first visible key
    last: jax.Array | None  # [N, Sq] int32, the last visible key, itself visible
    padding: jax.Array | None  # [N, Sq] bool
    # The same in positions, where keys have positions of their own (S23); None elsewhere.
    lowest: jax.Array | None = None  # [N, Sq] int32
    highest: jax.Array | None = None  # [N, Sq] int32
    # Where rows stand, for ALiBi (S25): among the keys of the array, or, where keys have positions of their
    # own, among those. None without ALiBi.
    position: jax.Array | None = None  # [N, Sq] int32


@dataclass(frozen=True)
class Whole:
    """The whole call, where each device has some of its rows.

    rows: [Sq] int32, the index of each row in the whole; past its end are rows of padding. q_length,
    k_length: of the whole.
    """

    rows: jax.Array
    q_length: int
    k_length: int


@dataclass(frozen=True)
class _Sequences:
    """The sequence that each row belongs to; all [N, Sq] int32 or scalars, padding bool."""

    local: jax.Array  # the row's index within its sequence
    key_start: jax.Array | int  # the first key of the sequence
    shift: jax.Array | int  # by how much the sequence has more keys than queries
    offset: jax.Array | int | None  # q_offset
    first: jax.Array | None  # the first key of the sequence, None if the sequence has every key
    last: jax.Array | None  # the last one, likewise
    padding: jax.Array | None


def describe_rows(call: Call, whole: Whole | None = None, xp: Any = jnp) -> Rows:
    """Return the interval of keys and the padding flag of each query row of `call` (S6 to S9, S23, S24, S28).

    whole: the call that the rows are a part of; keys are then counted in the whole, too. xp: the module of
    the arrays, jax.numpy, or the result of `array_module`.
    """
    q_length, k_length = _lengths(call, whole)
    sequences = _sequences(call, whole, xp)
    first, last, padding = sequences.first, sequences.last, sequences.padding
    position = _row_positions(call, sequences, xp)
    low, high = _position_limits(call, position, q_length + k_length, xp)
    lowest = highest = None
    if call.positions.kv is None:
        # Key j of a sequence is at position j.
        if low is not None:
            first = _both(xp.maximum, first, _plus(low, sequences.key_start, xp))
        if high is not None:
            last = _both(xp.minimum, last, _plus(high, sequences.key_start, xp))
    else:
        lowest, highest = low, high
    if call.alibi_slopes is None:
        stand = None
    else:
        stand = position if call.positions.kv is not None else _plus(position, sequences.key_start, xp)
    if call.kv_start is not None:
        first = _both(xp.maximum, first, call.kv_start)
    if call.kv_end is not None:
        last = _both(xp.minimum, last, call.kv_end - 1)
    if call.q_segment_ids is not None:
        padding = _both(xp.logical_or, padding, call.q_segment_ids < 0)
    if last is not None:
        last = xp.minimum(last, k_length - 1)
    if padding is not None:
        # The number of keys may be symbolic, so NumPy cannot convert it.
        last = xp.where(padding, np.int32(-1), k_length - 1 if last is None else last)
    return Rows(first, last, padding, lowest, highest, stand)


def row_positions(call: Call, whole: Whole | None = None) -> jax.Array:
    """Return the position of each row, [N, Sq] int32 (S23); whole: as in `describe_rows`."""
    return _row_positions(call, _sequences(call, whole, jnp), jnp)


def _row_positions(call: Call, sequences: _Sequences, xp: Any) -> jax.Array:
    """Return the position of each row, [N, Sq] int32 (S23)."""
    if call.positions.q is not None:
        return call.positions.q
    if sequences.offset is not None:
        return _plus(sequences.local, sequences.offset, xp)
    return sequences.local + sequences.shift


def _position_limits(
    call: Call, position: jax.Array, most: int, xp: Any
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the lowest and highest position that each row sees by order, windows, chunks (S6, S7, S23, S24).

    most: rows and keys of the whole.
    """
    left, right = call.sliding_window
    if call.positions.given or is_symbolic(call):
        # Two positions are less than 2**32 apart.
        left, right = (None if side is None or side >= 2**32 else side for side in (left, right))
    else:
        # An offset past every key of either side changes nothing and must not overflow.
        left, right = (None if side is None else min(side, most) for side in (left, right))
    low = high = None
    if left is not None:
        low = _plus_static(position, -left, xp)
    if right is not None:
        high = _plus_static(position, right, xp)
    if call.causal:
        high = position
    if call.chunk_size is not None:
        # How far the row stands behind the first position of its chunk, below 0, too.
        behind = position % call.chunk_size
        low = _both(xp.maximum, low, _plus(position, -behind, xp))
        high = _both(xp.minimum, high, _plus(position, np.int32(call.chunk_size - 1) - behind, xp))
    return low, high


def _plus(x: jax.Array, y: jax.Array | np.int32 | int, xp: Any) -> jax.Array:
    """Return x + y, limited to the range of int32."""
    if isinstance(y, int) and y == 0:
        return x
    total = x + y
    over = (x > 0) & (y > 0) & (total < 0)
    under = (x < 0) & (y < 0) & (total >= 0)
    return xp.where(over, _INT32.max, xp.where(under, _INT32.min, total))


def _plus_static(x: jax.Array, n: int, xp: Any) -> jax.Array:
    """Return the same for a Python int below 2**32 in size, which int32 may not hold."""
    step = max(min(n, _INT32.max), -_INT32.max)
    x = _plus(x, np.int32(step), xp) if step else x
    return x if step == n else _plus_static(x, n - step, xp)


def hides_pairs(call: Call) -> bool:
    """Return whether some pair within the lengths may be hidden."""
    arrays = (call.cum_seqlens_q, call.q_segment_ids, call.attention_mask, call.bias)
    arrays += (call.kv_start, call.kv_end)
    return call.causal or windowed(call) or any(x is not None for x in arrays)


def windowed(call: Call) -> bool:
    """Return whether rows see a window around their position, or a chunk."""
    return call.sliding_window != (None, None) or call.chunk_size is not None


def array_module(call: Call) -> Any:
    """Return NumPy where no array decides visibility, and jax.numpy elsewhere.

    Results of NumPy are constants of the traced program. JAX would compile a separate program for each of the
    operations.
    """
    arrays = (call.q_segment_ids, call.cum_seqlens_q, call.kv_start, call.kv_end)
    fixed = all(x is None for x in arrays) and not call.positions.given and not is_symbolic(call)
    return np if fixed else jnp


def visible_tile(
    keys: jax.Array,
    first: jax.Array | None,
    last: jax.Array | None,
    q_ids: jax.Array | None,
    kv_ids: jax.Array | None,
    mask: jax.Array | None,
    bias: jax.Array | None,
    lowest: jax.Array | None = None,
    highest: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> jax.Array | None:
    """Return which pairs of a tile are visible (clauses S4 to S9, S23): those that meet all given conditions.

    `keys` is [k] int32 key indices; `first`, `last`, `lowest`, `highest` [.., q]; `q_ids` [.., q]; `kv_ids`
    and `positions` [.., k]; `mask` and `bias` [.., q or 1, k or 1]. All of one rank after the last axis
    is added. Returns [.., q, k] bool, broadcast only as far as needed, or None where nothing restricts the
    tile.
    """
    rank = next((x.ndim + 1 for x in (first, last, q_ids, lowest, highest) if x is not None), 2)
    keys = keys.reshape((1,) * (rank - 1) + (-1,))
    visible = None
    if first is not None:
        visible = _both(jnp.logical_and, visible, first[..., :, None] <= keys)
    if last is not None:
        visible = _both(jnp.logical_and, visible, keys <= last[..., :, None])
    if positions is not None:
        if lowest is not None:
            visible = _both(jnp.logical_and, visible, lowest[..., :, None] <= positions[..., None, :])
        if highest is not None:
            visible = _both(jnp.logical_and, visible, positions[..., None, :] <= highest[..., :, None])
    if q_ids is not None and kv_ids is not None:
        visible = _both(jnp.logical_and, visible, q_ids[..., :, None] == kv_ids[..., None, :])
    if mask is not None:
        visible = _both(jnp.logical_and, visible, mask)
    if bias is not None:
        visible = _both(jnp.logical_and, visible, bias != -jnp.inf)
    return visible


def key_block_range(
    first: jax.Array | None, last: jax.Array | None, block: int, blocks: int
) -> tuple[jax.Array, jax.Array]:
    """Return the half-open range of key blocks that a block of rows needs: [.., q] intervals to [..] int32.

    Blocks outside the range are hidden from every row, so skipping them changes nothing (clause S18).
    """
    if first is None and last is None:
        return jnp.int32(0), jnp.int32(blocks)
    like = first if first is not None else last
    assert like is not None
    low = jnp.zeros_like(like) if first is None else first
    high = jnp.full_like(like, blocks * block - 1) if last is None else last
    sees = low <= high
    start = jnp.where(sees, low, jnp.int32(blocks * block)).min(axis=-1) // block
    stop = jnp.where(sees, high, jnp.int32(-1)).max(axis=-1) // block + 1
    return jnp.maximum(start, 0), jnp.minimum(stop, blocks)


def _lengths(call: Call, whole: Whole | None) -> tuple[int, int]:
    if whole is None:
        return call.query.shape[1], call.key.shape[1]
    return whole.q_length, whole.k_length


def _sequences(call: Call, whole: Whole | None, xp: Any) -> _Sequences:
    q_length, k_length = _lengths(call, whole)
    rows = xp.arange(q_length, dtype=np.int32)[None, :] if whole is None else whole.rows[None, :]
    offset = call.positions.q_offset
    by_entry = None if offset is None else offset[:, None]
    if call.cum_seqlens_q is None or call.cum_seqlens_k is None:
        padding = None if whole is None else rows >= q_length
        return _Sequences(rows, 0, k_length - q_length, by_entry, None, None, padding)
    if call.query.shape[0] == 1:
        return _packed(call.cum_seqlens_q, call.cum_seqlens_k, rows, offset)
    return _padded(call.cum_seqlens_q, call.cum_seqlens_k, rows, by_entry, k_length)


def _packed(cum_q: jax.Array, cum_k: jax.Array, rows: jax.Array, offset: jax.Array | None) -> _Sequences:
    """Return rows of one batch entry that holds all sequences one after another (clause S9, batch 1)."""
    sequence = jnp.searchsorted(cum_q, rows[0], side="right").astype(jnp.int32)[None, :] - 1
    sequence = jnp.clip(sequence, 0, cum_q.shape[0] - 2)
    q_start, q_stop, k_start, k_stop = (cum[sequence + n] for cum in (cum_q, cum_k) for n in (0, 1))
    shift = (k_stop - k_start) - (q_stop - q_start)
    if offset is not None:
        offset = offset[:, None] if offset.shape[0] == 1 else offset[sequence]
    return _Sequences(rows - q_start, k_start, shift, offset, k_start, k_stop - 1, rows >= cum_q[-1])


def _padded(
    cum_q: jax.Array, cum_k: jax.Array, rows: jax.Array, offset: jax.Array | None, k_length: int
) -> _Sequences:
    """Return rows of a batch whose entry b has one sequence, left-aligned, then padding (S9, batch n)."""
    q_lengths, k_lengths = jnp.diff(cum_q)[:, None], jnp.diff(cum_k)[:, None]
    last = jnp.broadcast_to(jnp.minimum(k_lengths, k_length) - 1, (q_lengths.shape[0], rows.shape[1]))
    return _Sequences(rows, 0, k_lengths - q_lengths, offset, None, last, rows >= q_lengths)


def _both(
    combine: Callable[[jax.Array, jax.Array], jax.Array], a: jax.Array | None, b: jax.Array
) -> jax.Array:
    return b if a is None else combine(a, b)
