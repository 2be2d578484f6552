"""S5 to S9: matrices of what is seen, written by hand; rows are queries, columns keys."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attest.reference.problem import make_problem
from attest.reference.semantics import STANDARD, Semantics
from attest.reference.visibility import allowed, padding_rows

TOP_LEFT = Semantics(causal="top_left", window="top_left")
EQUALITY = Semantics(segments="equality")


def seen(
    q_len: int,
    kv_len: int,
    semantics: Semantics = STANDARD,
    batch: int = 1,
    of: tuple[int, int] = (0, 0),
    **options: Any,
) -> list[str]:
    """The matrix as rows of x (seen) and . (hidden), of batch row and head `of`; 2 heads."""
    query, key = np.zeros((batch, q_len, 2, 1), np.float32), np.zeros((batch, kv_len, 1, 1), np.float32)
    problem = make_problem(query, key, key, **options)
    matrix = allowed(problem, semantics, of[0], of[1], np.arange(q_len))
    return ["".join("x" if cell else "." for cell in row) for row in matrix]


def ids(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int32)


CLAUSES: list[tuple[str, list[str], tuple[int, int], Semantics, dict[str, Any]]] = [
    ("S5 nothing hides", ["xxx", "xxx"], (2, 3), STANDARD, {}),
    ("S6 square", ["x..", "xx.", "xxx"], (3, 3), STANDARD, {"causal": True}),
    ("S6 more keys", ["xx.", "xxx"], (2, 3), STANDARD, {"causal": True}),
    ("S6 more queries", ["..", "x.", "xx"], (3, 2), STANDARD, {"causal": True}),
    ("S6 top left, more keys", ["x..", "xx."], (2, 3), TOP_LEFT, {"causal": True}),
    ("S6 top left, more queries", ["x.", "xx", "xx"], (3, 2), TOP_LEFT, {"causal": True}),
    ("S7 both sides", ["xx..", "xxx.", ".xxx", "..xx"], (4, 4), STANDARD, {"sliding_window": 1}),
    ("S7 left only", ["xxxx", ".xxx", "..xx"], (3, 4), STANDARD, {"sliding_window": (1, None)}),
    ("S7 right only", ["xxx.", "xxxx", "xxxx"], (3, 4), STANDARD, {"sliding_window": (None, 1)}),
    ("S7 unequal sides", ["xxx.", "xxxx", ".xxx"], (3, 4), STANDARD, {"sliding_window": (2, 1)}),
    ("S7 the diagonal", [".x..", "..x.", "...x"], (3, 4), STANDARD, {"sliding_window": (0, 0)}),
    ("S7 unbounded", ["xx", "xx"], (2, 2), STANDARD, {"sliding_window": (None, None)}),
    (
        "S7 more queries: rows before the keys",
        ["..", "..", "x.", "xx"],
        (4, 2),
        STANDARD,
        {"sliding_window": (1, 0)},
    ),
    ("S7 and S6", ["x...", "xx..", ".xx.", "..xx"], (4, 4), STANDARD, {"sliding_window": 1, "causal": True}),
    ("S7 top left", ["x..", "xx."], (2, 3), TOP_LEFT, {"sliding_window": (1, 0)}),
    ("S7 wider than int64", ["xx", "xx"], (2, 2), STANDARD, {"sliding_window": 2**70}),
    (
        "S7 zero is unbounded",
        ["xxx.", "xxxx"],
        (2, 4),
        Semantics(window_zero="unbounded", window="top_left"),
        {"sliding_window": (0, 2)},
    ),
    (
        "S7 edges outside",
        [".x..", "..x.", "...x"],
        (3, 4),
        Semantics(window_edges="exclusive"),
        {"sliding_window": 1},
    ),
    (
        "S7 edges outside, side of 0: nothing",
        ["...", "..."],
        (2, 3),
        Semantics(window_edges="exclusive"),
        {"sliding_window": (0, 0)},
    ),
    (
        "S8 equal ids",
        ["xx...", "..xx.", "..xx.", "....."],
        (4, 5),
        STANDARD,
        {"q_segment_ids": ids([0, 7, 7, 3]), "kv_segment_ids": ids([0, 0, 7, 7, 1])},
    ),
    (
        "S8 negative ids are padding",
        ["...", "x..", "..."],
        (3, 3),
        STANDARD,
        {"q_segment_ids": ids([-1, 0, -2]), "kv_segment_ids": ids([0, -1, -2])},
    ),
    (
        "S8 equality only",
        [".x.", "x..", "..x"],
        (3, 3),
        EQUALITY,
        {"q_segment_ids": ids([-1, 0, -2]), "kv_segment_ids": ids([0, -1, -2])},
    ),
    (
        "S9 packed",
        ["xx...", "xx...", "..x..", "....."],
        (4, 5),
        STANDARD,
        {"cum_seqlens_q": ids([0, 2, 3])[0], "cum_seqlens_k": ids([0, 2, 3])[0]},
    ),
    (
        "S9 packed, causal by sequence",
        ["x....", "xx...", "..xx.", "..xxx"],
        (4, 5),
        STANDARD,
        {"cum_seqlens_q": ids([0, 2, 4])[0], "cum_seqlens_k": ids([0, 2, 5])[0], "causal": True},
    ),
    (
        "S9 packed, causal by sequence from the top left",
        ["x....", "xx...", "..x..", "..xx."],
        (4, 5),
        TOP_LEFT,
        {"cum_seqlens_q": ids([0, 2, 4])[0], "cum_seqlens_k": ids([0, 2, 5])[0], "causal": True},
    ),
    (
        "S9 packed, window by sequence",
        [".x...", "..x..", "...x.", "....x"],
        (4, 5),
        STANDARD,
        {"cum_seqlens_q": ids([0, 2, 4])[0], "cum_seqlens_k": ids([0, 3, 5])[0], "sliding_window": 0},
    ),
    (
        "S9 packed, sequences of no queries and of no keys",
        [".....", "..xxx"],
        (2, 5),
        STANDARD,
        {"cum_seqlens_q": ids([0, 0, 1, 1, 2])[0], "cum_seqlens_k": ids([0, 2, 2, 2, 5])[0]},
    ),
    (
        "S9 one sequence, shorter than its room",
        ["xx.", "xx.", "..."],
        (3, 3),
        STANDARD,
        {"cum_seqlens_q": ids([0, 2])[0], "cum_seqlens_k": ids([0, 2])[0]},
    ),
    (
        "S9 no tokens at all",
        ["..", ".."],
        (2, 2),
        STANDARD,
        {"cum_seqlens_q": ids([0, 0])[0], "cum_seqlens_k": ids([0, 0])[0]},
    ),
    ("S23 an offset", ["xx...", "xxx..", "xxxx."], (3, 5), STANDARD, {"causal": True, "q_offset": 1}),
    ("S23 an offset before the keys", ["...", "x.."], (2, 3), STANDARD, {"causal": True, "q_offset": -1}),
    ("S23 an offset under top left", ["xx.", "xxx"], (2, 3), TOP_LEFT, {"causal": True, "q_offset": 1}),
    (
        "S23 an offset centres the window",
        [".x...", "..x.."],
        (2, 5),
        STANDARD,
        {"sliding_window": 0, "q_offset": np.array([1])},
    ),
    (
        "S23 positions of the rows",
        ["x..", "...", "xxx"],
        (3, 3),
        STANDARD,
        {"causal": True, "q_positions": ids([0, -1, 9])},
    ),
    (
        "S23 positions of the keys",
        ["..x.", "x.xx", "x.xx"],
        (3, 4),
        STANDARD,
        {"causal": True, "kv_positions": ids([2, 9, 1, 2])},
    ),
    (
        "S23 positions of both under top left",
        ["x.x", "x..", ".x."],
        (3, 3),
        TOP_LEFT,
        {"sliding_window": (2, 1), "q_positions": ids([7, 4, 20]), "kv_positions": ids([5, 18, 7])},
    ),
    ("S23 positions without causal or window", ["xx"], (1, 2), STANDARD, {"q_positions": ids([-5])}),
    (
        "S23 an offset for each packed sequence",
        ["x....", "xx...", "..xxx", "..xxx"],
        (4, 5),
        STANDARD,
        {
            "cum_seqlens_q": ids([0, 2, 4])[0],
            "cum_seqlens_k": ids([0, 2, 5])[0],
            "causal": True,
            "q_offset": ids([0, 3])[0],
        },
    ),
    (
        "S23 one offset for all packed sequences",
        ["x....", "xx...", "..x..", "..xx."],
        (4, 5),
        STANDARD,
        {
            "cum_seqlens_q": ids([0, 2, 4])[0],
            "cum_seqlens_k": ids([0, 2, 5])[0],
            "causal": True,
            "q_offset": 0,
        },
    ),
    (
        "S23 positions of packed rows; the sequences stay apart",
        ["xx...", ".x...", "..xxx", "....x"],
        (4, 5),
        STANDARD,
        {
            "cum_seqlens_q": ids([0, 2, 4])[0],
            "cum_seqlens_k": ids([0, 2, 5])[0],
            "causal": True,
            "q_positions": ids([8, 3, 8, 2]),
            "kv_positions": ids([5, 3, 3, 4, 1]),
        },
    ),
    ("S24 chunks", ["xxx...", "...xxx", "...xxx"], (3, 6), STANDARD, {"chunk_size": 3, "q_offset": 2}),
    ("S24 chunks, aligned with the last key", ["..xx.", "....x"], (2, 5), STANDARD, {"chunk_size": 2}),
    ("S24 chunks from the top left", ["xx...", "xx..."], (2, 5), TOP_LEFT, {"chunk_size": 2}),
    (
        "S24 chunks of positions below 0 and in any order, causal",
        [".xx.", "...x", "x..x"],
        (3, 4),
        STANDARD,
        {
            "chunk_size": 3,
            "causal": True,
            "q_positions": ids([-1, 1, 2]),
            "kv_positions": ids([2, -3, -1, 0]),
        },
    ),
    (
        "S24 chunks of packed sequences",
        ["xx...", "..xx.", "....x"],
        (3, 5),
        STANDARD,
        {
            "cum_seqlens_q": ids([0, 1, 3])[0],
            "cum_seqlens_k": ids([0, 2, 5])[0],
            "chunk_size": 2,
            "q_positions": ids([1, 0, 3]),
        },
    ),
    (
        "S28 ranges",
        [".xx..", ".....", "xxxxx", "....."],
        (4, 5),
        STANDARD,
        {"kv_start": ids([1, 2, -3, 7]), "kv_end": ids([3, 2, 9, 9])},
    ),
    (
        "S28 a start alone, causal",
        ["x..", ".x.", "..x"],
        (3, 3),
        STANDARD,
        {"causal": True, "kv_start": ids([0, 1, 2])},
    ),
    ("S28 an end alone", ["xx.", "..."], (2, 3), STANDARD, {"kv_end": ids([2, 0])}),
    (
        "S28 ranges count the keys of the array, of packed sequences, too, whatever their positions",
        [".x...", "..x..", "....."],
        (3, 5),
        STANDARD,
        {
            "cum_seqlens_q": ids([0, 1, 3])[0],
            "cum_seqlens_k": ids([0, 2, 5])[0],
            "kv_start": ids([1, 1, 0]),
            "kv_end": ids([4, 3, 2]),
            "kv_positions": ids([9, 8, 7, 6, 5]),
        },
    ),
    (
        "S5 all at once",
        ["x...", ".x..", "...."],
        (3, 4),
        STANDARD,
        {
            "causal": True,
            "sliding_window": (1, 5),
            "q_segment_ids": ids([0, 0, 1]),
            "kv_segment_ids": ids([0, 0, 0, 1]),
            "attention_mask": np.array([[[[1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]]]),
        },
    ),
]


@pytest.mark.parametrize(
    ("want", "sizes", "semantics", "options"),
    [case[1:] for case in CLAUSES],
    ids=[case[0] for case in CLAUSES],
)
def test_clauses(
    want: list[str], sizes: tuple[int, int], semantics: Semantics, options: dict[str, Any]
) -> None:
    assert seen(*sizes, semantics, **options) == want


def test_ranges_are_each_entries_own() -> None:
    ranges = {"kv_start": ids([0, 1], [1, 2]), "kv_end": ids([1, 3])}
    assert seen(2, 3, batch=2, **ranges) == ["x..", ".xx"]
    assert seen(2, 3, batch=2, of=(1, 0), **ranges) == ["...", "..x"]


def test_padded_lengths_are_each_rows_own() -> None:
    """S9: row b of the batch holds its tokens on the left; causal aligns the lengths, not the room."""
    lengths = {"cum_seqlens_q": ids([0, 1, 3])[0], "cum_seqlens_k": ids([0, 3, 5])[0]}
    assert seen(3, 4, batch=2, **lengths) == ["xxx.", "....", "...."]
    assert seen(3, 4, batch=2, of=(1, 0), **lengths) == ["xx..", "xx..", "...."]
    assert seen(3, 4, batch=2, of=(1, 0), causal=True, **lengths) == ["x...", "xx..", "...."]


def test_offsets_and_positions_are_each_entries_own() -> None:
    """S23: one for all batch entries or one each, with padded lengths, too."""
    options: dict[str, Any] = {"batch": 2, "causal": True}
    each = {"q_offset": ids([0, 1])[0]}
    assert seen(2, 3, **options, **each) == ["x..", "xx."]
    assert seen(2, 3, of=(1, 0), **options, **each) == ["xx.", "xxx"]
    lengths = {"cum_seqlens_q": ids([0, 1, 3])[0], "cum_seqlens_k": ids([0, 3, 5])[0]}
    assert seen(2, 3, **options, **each, **lengths) == ["x..", "..."]
    assert seen(2, 3, of=(1, 0), **options, **each, **lengths) == ["xx.", "xx."]
    for positions, first in ((ids([2, 0], [0, 1]), ["xxx", "x.."]), (ids([0, 1]), ["x..", "xx."])):
        assert seen(2, 3, **options, q_positions=positions) == first
        assert seen(2, 3, of=(1, 0), **options, q_positions=positions) == ["x..", "xx."]
    keys = ids([0, 2, 1], [1, 0, 2])
    assert seen(2, 3, **options, kv_positions=keys) == ["x.x", "xxx"]
    assert seen(2, 3, of=(1, 0), **options, kv_positions=keys) == ["xx.", "xxx"]


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_masks_broadcast(shape: tuple[int, int]) -> None:
    mask = np.zeros((*shape, 1, 2), np.int32)
    mask[-1, -1, 0, 1] = 2
    for batch in range(2):
        for head in range(2):
            hit = (shape[0] == 1 or batch == 1) and (shape[1] == 1 or head == 1)
            want = [".x" if hit else ".."]
            assert seen(1, 2, batch=2, of=(batch, head), attention_mask=mask) == want


@pytest.mark.parametrize("precedence", ["conjunction", "bias_over_mask", "causal_over_mask"])
@pytest.mark.parametrize("bias", [None, np.zeros((1, 1, 1, 2), np.float32)])
@pytest.mark.parametrize("causal", [True, False])
def test_precedence(precedence: Any, bias: np.ndarray | None, causal: bool) -> None:
    mask = np.array([[[[False, True], [False, True]]]])
    ignored = (precedence == "bias_over_mask" and bias is not None) or (
        precedence == "causal_over_mask" and causal
    )
    by_causal = ["x.", "xx"] if causal else ["xx", "xx"]
    want = by_causal if ignored else [row.replace("xx", ".x").replace("x.", "..") for row in by_causal]
    semantics = Semantics(precedence=precedence)
    assert seen(2, 2, semantics, attention_mask=mask, bias=bias, causal=causal) == want


def test_padding_rows() -> None:
    """S8, S9: past a length or of a negative segment; under equality a negative id is an id."""
    query = np.zeros((1, 4, 1, 1), np.float32)
    both = make_problem(
        query,
        query,
        query,
        cum_seqlens_q=ids([0, 1, 3])[0],
        cum_seqlens_k=ids([0, 1, 3])[0],
        q_segment_ids=ids([0, -1, 0, 0]),
        kv_segment_ids=ids([0, 0, 0, 0]),
    )
    assert padding_rows(both, STANDARD, 0).tolist() == [False, True, False, True]
    assert padding_rows(both, EQUALITY, 0).tolist() == [False, False, False, True]
    lengths = replace(both, q_segment_ids=None, kv_segment_ids=None)
    assert padding_rows(lengths, STANDARD, 0).tolist() == [False, False, False, True]
    assert not padding_rows(make_problem(query, query, query), STANDARD, 0).any()


def test_some_rows_are_rows_of_the_whole() -> None:
    query, key = np.zeros((1, 6, 1, 1), np.float32), np.zeros((1, 9, 1, 1), np.float32)
    mask = np.random.default_rng(0).random((1, 1, 6, 9)) < 0.5
    problem = make_problem(query, key, key, causal=True, attention_mask=mask)
    rows = np.array([4, 0, 4])
    whole = allowed(problem, STANDARD, 0, 0, np.arange(6))
    np.testing.assert_array_equal(allowed(problem, STANDARD, 0, 0, rows), whole[rows])
