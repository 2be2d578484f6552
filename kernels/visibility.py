"""Visibility: an interval of keys for each query row, segment ids, a mask and a bias.

Causal order, windows and sequence lengths (clauses S6, S7, S9) all reduce to one closed interval of key
indices [first, last] per query row, because the tokens of a sequence are contiguous. An interval is O(S) to
store, gives any tile of the visibility by two comparisons, and tells which key blocks a block of rows can
skip.

Padding rows (past a length, past the last cumulative length, or with a negative segment id) are told apart
from rows that merely see no key: clause S9 gives padding an lse of -inf even where sinks are present, clause
S11 gives an empty row the logsumexp of its sinks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attest.kernels.arguments import Call


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """What decides, per query row, which keys are visible; N is B, or 1 where all batch entries agree.

    A field is None where the call does not constrain that side. A row with last < first sees no key.
    """

    first: jax.Array | None  # [N, Sq] int32, the first visible key
    last: jax.Array | None  # [N, Sq] int32, the last visible key, itself visible
    padding: jax.Array | None  # [N, Sq] bool


def describe_rows(call: Call) -> Rows:
    """The interval of keys and the padding flag of every query row of `call` (clauses S6, S7, S8, S9)."""
    batch, q_length = call.query.shape[:2]
    k_length = call.key.shape[1]
    rows = jnp.arange(q_length, dtype=jnp.int32)[None, :]
    if call.cum_seqlens_q is not None and call.cum_seqlens_k is not None:
        describe = _packed if batch == 1 else _padded
        aligned, first, last, padding = describe(call.cum_seqlens_q, call.cum_seqlens_k, rows, k_length)
    else:
        aligned, first, last, padding = rows + (k_length - q_length), None, None, None

    # An offset past every key of either side changes nothing and must not overflow.
    left, right = (None if side is None else min(side, q_length + k_length) for side in call.sliding_window)
    if call.causal:
        last = _both(jnp.minimum, last, aligned)
    if right is not None:
        last = _both(jnp.minimum, last, aligned + right)
    if left is not None:
        first = _both(jnp.maximum, first, aligned - left)
    if call.q_segment_ids is not None:
        padding = _both(jnp.logical_or, padding, call.q_segment_ids < 0)
    if last is not None:
        last = jnp.minimum(last, k_length - 1)
    if padding is not None:
        last = jnp.where(padding, jnp.int32(-1), jnp.int32(k_length - 1) if last is None else last)
    return Rows(first, last, padding)


def ahead(call: Call) -> AbstractContextManager[None]:
    """Visibility that no array decides is computed once, while tracing, and is a constant of the program."""
    arrays = (call.q_segment_ids, call.cum_seqlens_q)
    return nullcontext() if any(x is not None for x in arrays) else jax.ensure_compile_time_eval()


def visible_tile(
    keys: jax.Array,
    first: jax.Array | None,
    last: jax.Array | None,
    q_ids: jax.Array | None,
    kv_ids: jax.Array | None,
    mask: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array | None:
    """Which pairs of one tile are visible (clauses S4 to S9): only where every given condition says so.

    `keys` is [k] int32 key indices; `first`, `last` [.., q]; `q_ids` [.., q] and `kv_ids` [.., k]; `mask`
    and `bias` [.., q or 1, k]. All of one rank after the last axis is added. Returns [.., q, k] bool,
    broadcast only as far as needed, or None where nothing restricts the tile.
    """
    rank = next((x.ndim + 1 for x in (first, last, q_ids) if x is not None), 2)
    keys = keys.reshape((1,) * (rank - 1) + (-1,))
    visible = None
    if first is not None:
        visible = _both(jnp.logical_and, visible, first[..., :, None] <= keys)
    if last is not None:
        visible = _both(jnp.logical_and, visible, keys <= last[..., :, None])
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
    """The half-open range of key blocks that a block of rows needs: [.., q] intervals give [..] int32 bounds.

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


def _packed(
    cum_q: jax.Array, cum_k: jax.Array, rows: jax.Array, k_length: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows of one batch entry that holds all sequences one after another (clause S9, batch 1).

    Alignment is per sequence, bottom right: the last query of a sequence is aligned with its last key. Key
    indices are those of the packed array, so the aligned position of a row counts from the start of the
    array too.
    """
    del k_length
    sequence = jnp.searchsorted(cum_q, rows[0], side="right").astype(jnp.int32)[None, :] - 1
    sequence = jnp.clip(sequence, 0, cum_q.shape[0] - 2)
    start, stop = cum_k[sequence], cum_k[sequence + 1]
    return rows + (stop - cum_q[sequence + 1]), start, stop - 1, rows >= cum_q[-1]


def _padded(
    cum_q: jax.Array, cum_k: jax.Array, rows: jax.Array, k_length: int
) -> tuple[jax.Array, None, jax.Array, jax.Array]:
    """Rows of a batch whose entry b holds one sequence, left-aligned and then padded (clause S9, batch n)."""
    q_lengths, k_lengths = jnp.diff(cum_q)[:, None], jnp.diff(cum_k)[:, None]
    aligned = rows + (k_lengths - q_lengths)
    last = jnp.broadcast_to(jnp.minimum(k_lengths, k_length) - 1, aligned.shape)
    return aligned, None, last, rows >= q_lengths


def _both(
    combine: Callable[[jax.Array, jax.Array], jax.Array], a: jax.Array | None, b: jax.Array
) -> jax.Array:
    return b if a is None else combine(a, b)
