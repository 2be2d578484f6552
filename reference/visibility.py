"""The keys that each query row sees (S5 to S9, S23, S24, S28).

Causal and window compare two positions, and ALiBi (S25) weighs their distance: each key has the one it holds
in its sequence, and each query row has the one it would hold on the keys' axis, unless the call gives others.
Both are plain vectors, so that any block of the matrix of pairs can be made without the rest.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.reference.problem import Problem
from attest.reference.semantics import Semantics

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
PADDING = -1


@dataclass(frozen=True)
class Tokens:
    """The positions of the tokens of one batch row: int64 [Sq] or [Sk] each.

    sequence: the number of the token's sequence, PADDING past its length. Without lengths each batch row is
        one sequence.
    index: the index within the sequence.
    """

    sequence: Ints
    index: Ints


def tokens(cum: NDArray[np.int32] | None, batch_size: int, batch: int, length: int) -> Tokens:
    """Place `length` tokens of batch row `batch` by the cumulative lengths `cum`, if given (S9)."""
    index = np.arange(length, dtype=np.int64)
    if cum is None:
        return Tokens(np.full(length, batch, np.int64), index)
    if batch_size > 1:
        inside = index < cum[batch + 1] - cum[batch]
        return Tokens(np.where(inside, batch, PADDING), index)
    sequence = np.searchsorted(cum, index, side="right") - 1
    inside = index < cum[-1]
    start = cum[np.minimum(sequence, len(cum) - 2)].astype(np.int64)
    return Tokens(np.where(inside, sequence, PADDING), index - start)


def padding_rows(problem: Problem, semantics: Semantics, batch: int) -> Bools:
    """Return query rows that are padding: past a length, or of a negative segment. bool [Sq].

    A padding row has lse -inf and no gradients even where sinks are given; an empty row that is a
    token's has the logsumexp of the sinks (S9, S11).
    """
    padding = tokens(problem.cum_seqlens_q, problem.batch, batch, problem.q_len).sequence == PADDING
    if problem.q_segment_ids is not None and semantics.segments == "non_negative":
        padding |= problem.q_segment_ids[batch] < 0
    return padding


def allowed(problem: Problem, semantics: Semantics, batch: int, head: int, rows: Ints) -> Bools:
    """Return the keys that all but the bias let `rows` of a head see: bool [rows, Sk].

    A bias of -inf hides a key too; `attest.reference.rows` adds it, since it acts on the logits.
    """
    seen = _by_position(problem, semantics, batch, rows)
    if problem.q_segment_ids is not None and problem.kv_segment_ids is not None:
        q_ids, kv_ids = problem.q_segment_ids[batch][rows][:, None], problem.kv_segment_ids[batch]
        seen &= q_ids == kv_ids
        if semantics.segments == "non_negative":
            seen &= kv_ids >= 0
    key = np.arange(problem.kv_len, dtype=np.int64)
    if problem.kv_start is not None:
        seen &= _of_entry(problem.kv_start, batch)[rows][:, None] <= key
    if problem.kv_end is not None:
        seen &= key < _of_entry(problem.kv_end, batch)[rows][:, None]
    if problem.attention_mask is not None and not _mask_ignored(problem, semantics):
        seen &= pick(problem.attention_mask, batch, head, rows)
    return seen


def pick(array: NDArray[Any], batch: int, head: int, rows: Ints) -> NDArray[Any]:
    """Return rows of one head of an array that broadcasts over [B, Hq, Sq, Sk]: [rows, Sk or 1]."""
    plane = array[batch if array.shape[0] > 1 else 0, head if array.shape[1] > 1 else 0]
    return plane[rows] if plane.shape[0] > 1 else plane[np.zeros(len(rows), np.int64)]


def _mask_ignored(problem: Problem, semantics: Semantics) -> bool:
    return (semantics.precedence == "bias_over_mask" and problem.bias is not None) or (
        semantics.precedence == "causal_over_mask" and problem.causal
    )


def _by_position(problem: Problem, semantics: Semantics, batch: int, rows: Ints) -> Bools:
    q = tokens(problem.cum_seqlens_q, problem.batch, batch, problem.q_len)
    k = tokens(problem.cum_seqlens_k, problem.batch, batch, problem.kv_len)
    row_sequence = q.sequence[rows]
    seen = (row_sequence[:, None] == k.sequence) & (row_sequence[:, None] != PADDING)

    k_position = key_positions(problem, batch)
    if problem.causal:
        row_position = row_positions(problem, semantics.causal, batch)[rows]
        seen &= k_position <= row_position[:, None]
    if problem.sliding_window is not None:
        row_position = row_positions(problem, semantics.window, batch)[rows]
        distance = k_position - row_position[:, None]
        for side, outward in zip(problem.sliding_window, (-distance, distance), strict=True):
            if side is None or (side == 0 and semantics.window_zero == "unbounded"):
                continue
            seen &= outward <= side if semantics.window_edges == "inclusive" else outward < side
    if problem.chunk_size is not None:
        row_position = row_positions(problem, semantics.window, batch)[rows]
        seen &= k_position // problem.chunk_size == (row_position // problem.chunk_size)[:, None]
    return seen


def distances(problem: Problem, semantics: Semantics, batch: int, rows: Ints) -> Ints:
    """Return how many positions lie between `rows` and each key: int64 [rows, Sk] (S25)."""
    row_position = row_positions(problem, semantics.window, batch)[rows]
    return np.abs(row_position[:, None] - key_positions(problem, batch))


def key_positions(problem: Problem, batch: int) -> Ints:
    """Return the position of each key of a batch row: int64 [Sk] (S23)."""
    if problem.kv_positions is not None:
        return _of_entry(problem.kv_positions, batch)
    return tokens(problem.cum_seqlens_k, problem.batch, batch, problem.kv_len).index


def row_positions(problem: Problem, alignment: str, batch: int) -> Ints:
    """Return the position of each query row of a batch row: int64 [Sq] (S23).

    alignment: "bottom_right" or "top_left", where neither an offset nor positions are given.
    """
    if problem.q_positions is not None:
        return _of_entry(problem.q_positions, batch)
    q = tokens(problem.cum_seqlens_q, problem.batch, batch, problem.q_len)
    sequence = np.maximum(q.sequence, 0)
    if problem.q_offset is not None:
        offset = np.asarray(problem.q_offset, np.int64)
        return q.index + (offset[sequence] if offset.ndim else offset)
    return q.index + (_bottom_right_offset(problem)[sequence] if alignment == "bottom_right" else 0)


def _of_entry(numbers: NDArray[Any], batch: int) -> Ints:
    return numbers[batch if len(numbers) > 1 else 0].astype(np.int64)


def _bottom_right_offset(problem: Problem) -> Ints:
    """Return keys minus queries of each sequence: int64 [n]."""
    if problem.cum_seqlens_q is None or problem.cum_seqlens_k is None:
        return np.full(problem.batch, problem.kv_len - problem.q_len, np.int64)
    return (np.diff(problem.cum_seqlens_k) - np.diff(problem.cum_seqlens_q)).astype(np.int64)
