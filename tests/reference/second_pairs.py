"""The pairs that are visible and those that dropout keeps, one at a time, from the clauses."""

from itertools import pairwise

import numpy as np
from mpmath import mp, mpf

from attest.reference.problem import Problem
from attest.reference.semantics import Semantics


def visible(problem: Problem, semantics: Semantics, b: int, h: int, i: int, j: int) -> bool:
    """S5 to S9 and the bias of -inf, for one pair."""
    return permitted(problem, semantics, b, h, i, j) and bias_at(problem, b, h, i, j) != float("-inf")


def permitted(problem: Problem, semantics: Semantics, b: int, h: int, i: int, j: int) -> bool:
    """Whether all but the bias lets row i of head h see key j."""
    q_len, k_len = problem.query.shape[1], problem.key.shape[1]
    q_place = _place(problem.cum_seqlens_q, problem.query.shape[0], b, i, q_len)
    k_place = _place(problem.cum_seqlens_k, problem.query.shape[0], b, j, k_len)
    if q_place is None or k_place is None or q_place[0] != k_place[0]:
        return False
    column = k_place[1]
    if problem.kv_positions is not None:
        column = int(problem.kv_positions[b % len(problem.kv_positions), j])

    mask = problem.attention_mask
    obeyed = not (semantics.precedence == "bias_over_mask" and problem.bias is not None)
    obeyed = obeyed and not (semantics.precedence == "causal_over_mask" and problem.causal)
    if mask is not None and obeyed and not mask[broadcast_index(mask, b, h, i, j)]:
        return False
    if problem.causal and column > row_position(problem, semantics.causal, b, i):
        return False
    if problem.sliding_window is not None:
        centre = row_position(problem, semantics.window, b, i)
        inside = 0 if semantics.window_edges == "inclusive" else -1
        left, right = problem.sliding_window
        if semantics.window_zero == "unbounded":
            left, right = left or None, right or None
        if left is not None and column < centre - left - inside:
            return False
        if right is not None and column > centre + right + inside:
            return False
    if problem.q_segment_ids is not None and problem.kv_segment_ids is not None:
        q_id, k_id = int(problem.q_segment_ids[b, i]), int(problem.kv_segment_ids[b, j])
        if q_id != k_id or (semantics.segments == "non_negative" and q_id < 0):
            return False
    if problem.chunk_size is not None:
        row = row_position(problem, semantics.window, b, i)
        if mp.floor(mpf(row) / problem.chunk_size) != mp.floor(mpf(column) / problem.chunk_size):
            return False
    start, end = problem.kv_start, problem.kv_end
    if start is not None and j < int(start[b % len(start), i]):
        return False
    return end is None or j < int(end[b % len(end), i])


def row_position(problem: Problem, alignment: str, b: int, i: int) -> int:
    """S23: where query row i, a token, stands among the keys."""
    if problem.q_positions is not None:
        return int(problem.q_positions[b % len(problem.q_positions), i])
    batch, q_len = problem.query.shape[:2]
    place = _place(problem.cum_seqlens_q, batch, b, i, q_len)
    assert place is not None, "padding stands nowhere"
    number, index, length = place
    if problem.q_offset is not None:
        offset = problem.q_offset
        return index + (offset if isinstance(offset, int) else int(offset[number]))
    if alignment == "top_left":
        return index
    if problem.cum_seqlens_k is None:
        return index + problem.key.shape[1] - length
    return index + int(problem.cum_seqlens_k[number + 1] - problem.cum_seqlens_k[number]) - length


def alibi_at(problem: Problem, semantics: Semantics, b: int, h: int, i: int, j: int) -> mpf:
    """S25: what ALiBi adds to the logit of a pair that is seen."""
    slopes = problem.alibi_slopes
    column = j
    if problem.kv_positions is not None:
        column = int(problem.kv_positions[b % len(problem.kv_positions), j])
    else:
        place = _place(problem.cum_seqlens_k, problem.query.shape[0], b, j, problem.key.shape[1])
        column = 0 if place is None else place[1]
    distance = abs(row_position(problem, semantics.window, b, i) - column)
    return -mpf(float(slopes[b % len(slopes), h])) * distance


def is_padding(problem: Problem, semantics: Semantics, b: int, i: int) -> bool:
    """Whether a query row is no token at all (S8, S9)."""
    if _place(problem.cum_seqlens_q, problem.query.shape[0], b, i, problem.query.shape[1]) is None:
        return True
    ids = problem.q_segment_ids
    return ids is not None and semantics.segments == "non_negative" and int(ids[b, i]) < 0


def kept(problem: Problem, semantics: Semantics, b: int, h: int, i: int, j: int) -> bool:
    """S12 and its dialects, one pair at a time; S29."""
    seed = int(problem.dropout_seed)
    _, q_len, heads, _ = problem.query.shape
    k_len = problem.key.shape[1]
    low, high = seed % 2**32, seed // 2**32
    b, h, i, j = (here + first for here, first in zip((b, h, i, j), problem.origin, strict=True))
    shared = problem.dropout_shared or ""
    b, h = (0 if letter in shared else here for letter, here in (("b", b), ("h", h)))
    if semantics.dropout == "linear_offset":
        offset = j + k_len * (i + q_len * (h + heads * b))
        word = philox((offset % 2**32, offset // 2**32, 0, 0), (low, high))[0]
    elif semantics.dropout == "chunk_keys":
        chunk, column = divmod(j, semantics.dropout_chunk)
        word = philox((column // 4, i, h, b), (low, (high + chunk) % 2**32))[column % 4]
    else:
        head = 0 if semantics.dropout == "shared_heads" else h
        word = philox((j // 4, i, head, b), (low, high))[j % 4]
    return word >= int(mp.floor(mpf(problem.dropout_prob) * 2**32))


def _words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


# Random123's published answers: counter, key, output.
KNOWN_ANSWERS = [
    tuple(map(_words, answer))
    for answer in (
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    )
]


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in Python integers."""
    a, b, c, d = counter
    for r in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        k0, k1 = (key[0] + r * 0x9E3779B9) % 2**32, (key[1] + r * 0xBB67AE85) % 2**32
        a, b, c, d = (second >> 32) ^ b ^ k0, second % 2**32, (first >> 32) ^ d ^ k1, first % 2**32
    return a, b, c, d


def bias_at(problem: Problem, b: int, h: int, i: int, j: int) -> float:
    if problem.bias is None:
        return 0.0
    return float(problem.bias[broadcast_index(problem.bias, b, h, i, j)])


def broadcast_index(array: np.ndarray, *index: int) -> tuple[int, ...]:
    return tuple(0 if size == 1 else at for at, size in zip(index, array.shape, strict=True))


def _place(
    cum: np.ndarray | None, batch_size: int, b: int, token: int, length: int
) -> tuple[int, int, int] | None:
    """The sequence of a token, its index there and the length of it; None for padding (S9)."""
    if cum is None:
        return b, token, length
    bounds = [int(x) for x in cum]
    if batch_size > 1:
        size = bounds[b + 1] - bounds[b]
        return (b, token, size) if token < size else None
    for number, (start, stop) in enumerate(pairwise(bounds)):
        if start <= token < stop:
            return number, token - start, stop - start
    return None
