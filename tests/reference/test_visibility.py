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


# A name, the rows of the matrix, and the call that it is of; a list is an array.
CLAUSES: list[tuple[str, str, Semantics, dict[str, Any]]] = [
    ("S5 nothing hides", "xxx xxx", STANDARD, {}),
    ("S6 square", "x.. xx. xxx", STANDARD, {"causal": True}),
    ("S6 more keys", "xx. xxx", STANDARD, {"causal": True}),
    ("S6 more queries", ".. x. xx", STANDARD, {"causal": True}),
    ("S6 top left, more keys", "x.. xx.", TOP_LEFT, {"causal": True}),
    ("S6 top left, more queries", "x. xx xx", TOP_LEFT, {"causal": True}),
    ("S7 both sides", "xx.. xxx. .xxx ..xx", STANDARD, {"sliding_window": 1}),
    ("S7 left only", "xxxx .xxx ..xx", STANDARD, {"sliding_window": (1, None)}),
    ("S7 right only", "xxx. xxxx xxxx", STANDARD, {"sliding_window": (None, 1)}),
    ("S7 unequal sides", "xxx. xxxx .xxx", STANDARD, {"sliding_window": (2, 1)}),
    ("S7 the diagonal", ".x.. ..x. ...x", STANDARD, {"sliding_window": (0, 0)}),
    ("S7 unbounded", "xx xx", STANDARD, {"sliding_window": (None, None)}),
    ("S7 more queries: rows before the keys", ".. .. x. xx", STANDARD, {"sliding_window": (1, 0)}),
    ("S7 and S6", "x... xx.. .xx. ..xx", STANDARD, {"sliding_window": 1, "causal": True}),
    ("S7 top left", "x.. xx.", TOP_LEFT, {"sliding_window": (1, 0)}),
    ("S7 wider than int64", "xx xx", STANDARD, {"sliding_window": 2**70}),
    (
        "S7 zero is unbounded",
        "xxx. xxxx",
        Semantics(window_zero="unbounded", window="top_left"),
        {"sliding_window": (0, 2)},
    ),
    ("S7 edges outside", ".x.. ..x. ...x", Semantics(window_edges="exclusive"), {"sliding_window": 1}),
    (
        "S7 edges outside, side of 0: nothing",
        "... ...",
        Semantics(window_edges="exclusive"),
        {"sliding_window": (0, 0)},
    ),
    (
        "S8 equal ids",
        "xx... ..xx. ..xx. .....",
        STANDARD,
        {"q_segment_ids": [0, 7, 7, 3], "kv_segment_ids": [0, 0, 7, 7, 1]},
    ),
    (
        "S8 negative ids are padding",
        "... x.. ...",
        STANDARD,
        {"q_segment_ids": [-1, 0, -2], "kv_segment_ids": [0, -1, -2]},
    ),
    (
        "S8 equality only",
        ".x. x.. ..x",
        EQUALITY,
        {"q_segment_ids": [-1, 0, -2], "kv_segment_ids": [0, -1, -2]},
    ),
    (
        "S9 packed",
        "xx... xx... ..x.. .....",
        STANDARD,
        {"cum_seqlens_q": [0, 2, 3], "cum_seqlens_k": [0, 2, 3]},
    ),
    (
        "S9 packed, causal by sequence",
        "x.... xx... ..xx. ..xxx",
        STANDARD,
        {"cum_seqlens_q": [0, 2, 4], "cum_seqlens_k": [0, 2, 5], "causal": True},
    ),
    (
        "S9 packed, causal by sequence from the top left",
        "x.... xx... ..x.. ..xx.",
        TOP_LEFT,
        {"cum_seqlens_q": [0, 2, 4], "cum_seqlens_k": [0, 2, 5], "causal": True},
    ),
    (
        "S9 packed, window by sequence",
        ".x... ..x.. ...x. ....x",
        STANDARD,
        {"cum_seqlens_q": [0, 2, 4], "cum_seqlens_k": [0, 3, 5], "sliding_window": 0},
    ),
    (
        "S9 packed, sequences of no queries and of no keys",
        "..... ..xxx",
        STANDARD,
        {"cum_seqlens_q": [0, 0, 1, 1, 2], "cum_seqlens_k": [0, 2, 2, 2, 5]},
    ),
    (
        "S9 one sequence, shorter than its room",
        "xx. xx. ...",
        STANDARD,
        {"cum_seqlens_q": [0, 2], "cum_seqlens_k": [0, 2]},
    ),
    ("S9 no tokens at all", ".. ..", STANDARD, {"cum_seqlens_q": [0, 0], "cum_seqlens_k": [0, 0]}),
    ("S23 an offset", "xx... xxx.. xxxx.", STANDARD, {"causal": True, "q_offset": 1}),
    ("S23 an offset before the keys", "... x..", STANDARD, {"causal": True, "q_offset": -1}),
    ("S23 an offset under top left", "xx. xxx", TOP_LEFT, {"causal": True, "q_offset": 1}),
    (
        "S23 an offset centres the window",
        ".x... ..x..",
        STANDARD,
        {"sliding_window": 0, "q_offset": np.array([1])},
    ),
    ("S23 positions of the rows", "x.. ... xxx", STANDARD, {"causal": True, "q_positions": [0, -1, 9]}),
    ("S23 positions of the keys", "..x. x.xx x.xx", STANDARD, {"causal": True, "kv_positions": [2, 9, 1, 2]}),
    (
        "S23 positions of both under top left",
        "x.x x.. .x.",
        TOP_LEFT,
        {"sliding_window": (2, 1), "q_positions": [7, 4, 20], "kv_positions": [5, 18, 7]},
    ),
    ("S23 positions without causal or window", "xx", STANDARD, {"q_positions": [-5]}),
    (
        "S23 an offset for each packed sequence",
        "x.... xx... ..xxx ..xxx",
        STANDARD,
        {"cum_seqlens_q": [0, 2, 4], "cum_seqlens_k": [0, 2, 5], "causal": True, "q_offset": [0, 3]},
    ),
    (
        "S23 one offset for all packed sequences",
        "x.... xx... ..x.. ..xx.",
        STANDARD,
        {"cum_seqlens_q": [0, 2, 4], "cum_seqlens_k": [0, 2, 5], "causal": True, "q_offset": 0},
    ),
    (
        "S23 positions of packed rows; the sequences stay apart",
        "xx... .x... ..xxx ....x",
        STANDARD,
        {
            "cum_seqlens_q": [0, 2, 4],
            "cum_seqlens_k": [0, 2, 5],
            "causal": True,
            "q_positions": [8, 3, 8, 2],
            "kv_positions": [5, 3, 3, 4, 1],
        },
    ),
    ("S24 chunks", "xxx... ...xxx ...xxx", STANDARD, {"chunk_size": 3, "q_offset": 2}),
    ("S24 chunks, aligned with the last key", "..xx. ....x", STANDARD, {"chunk_size": 2}),
    ("S24 chunks from the top left", "xx... xx...", TOP_LEFT, {"chunk_size": 2}),
    (
        "S24 chunks of positions below 0 and in any order, causal",
        ".xx. ...x x..x",
        STANDARD,
        {"chunk_size": 3, "causal": True, "q_positions": [-1, 1, 2], "kv_positions": [2, -3, -1, 0]},
    ),
    (
        "S24 chunks of packed sequences",
        "xx... ..xx. ....x",
        STANDARD,
        {"cum_seqlens_q": [0, 1, 3], "cum_seqlens_k": [0, 2, 5], "chunk_size": 2, "q_positions": [1, 0, 3]},
    ),
    ("S28 ranges", ".xx.. ..... xxxxx .....", STANDARD, {"kv_start": [1, 2, -3, 7], "kv_end": [3, 2, 9, 9]}),
    ("S28 a start alone, causal", "x.. .x. ..x", STANDARD, {"causal": True, "kv_start": [0, 1, 2]}),
    ("S28 an end alone", "xx. ...", STANDARD, {"kv_end": [2, 0]}),
    (
        "S28 ranges count the keys of the array, of packed sequences, too, whatever their positions",
        ".x... ..x.. .....",
        STANDARD,
        {
            "cum_seqlens_q": [0, 1, 3],
            "cum_seqlens_k": [0, 2, 5],
            "kv_start": [1, 1, 0],
            "kv_end": [4, 3, 2],
            "kv_positions": [9, 8, 7, 6, 5],
        },
    ),
    (
        "S5 all at once",
        "x... .x.. ....",
        STANDARD,
        {
            "causal": True,
            "sliding_window": (1, 5),
            "q_segment_ids": [0, 0, 1],
            "kv_segment_ids": [0, 0, 0, 1],
            "attention_mask": np.array([[[[1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]]]),
        },
    ),
]


def arrays(options: dict[str, Any]) -> dict[str, Any]:
    """Options whose lists are arrays: of sequences [n], else of tokens [1, n]."""
    found: dict[str, Any] = {}
    for name, x in options.items():
        of_sequences = name.startswith("cum_") or name == "q_offset"
        found[name] = (ids(x)[0] if of_sequences else ids(x)) if isinstance(x, list) else x
    return found


@pytest.mark.parametrize(
    ("picture", "semantics", "options"), [case[1:] for case in CLAUSES], ids=[case[0] for case in CLAUSES]
)
def test_clauses(picture: str, semantics: Semantics, options: dict[str, Any]) -> None:
    want = picture.split()
    assert seen(len(want), len(want[0]), semantics, **arrays(options)) == want


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
