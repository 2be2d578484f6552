"""Which defects a case is sensitive enough to show: the neighbours of its problem."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attest.conformance.cases.build import build
from attest.conformance.cases.case import Case
from attest.conformance.cases.features import FEATURES
from attest.conformance.drawing.corpus import load_corpus
from attest.conformance.judging.contrast import has_empty_rows, neighbours
from attest.conformance.judging.trial import Trial
from attest.conformance.running.choice import is_sensitive
from attest.conformance.subject import Subject
from attest.reference.semantics import STANDARD

PLAIN = Case(q_len=6, kv_len=9, head_dim=8, seed=1)
EVERYTHING = Subject("everything", lambda *_: None, frozenset(FEATURES), returns_lse=True)


def blind_spots(**fields: Any) -> tuple[str, ...]:
    return Trial(EVERYTHING, replace(PLAIN, **fields)).blind_spots


@pytest.mark.parametrize(
    ("fields", "blind"),
    [
        ({}, ()),
        ({"window": (2, 1)}, ()),
        ({"window": (2, 99)}, ()),
        ({"window": (99, 99)}, ("window",)),
        ({"causal": True, "window": (3, 0)}, ("causal",)),
        ({"causal": True, "q_len": 1}, ("causal",)),
        ({"q_heads": 2, "kv_heads": 2}, ()),
        ({"q_heads": 4, "kv_heads": 2}, ()),
        ({"batch": 6}, ()),
        ({"batch": 2, "lengths": ((6, 9), (6, 9))}, ("lengths",)),
        ({"batch": 2, "lengths": ((6, 8), (3, 0))}, ()),
        ({"batch": 2, "lengths": ((0, 0), (0, 0)), "q_heads": 2, "kv_heads": 2}, ()),
        ({"batch": 2, "window": (0, None), "head_dim": 1, "family": "integers", "seed": 4}, ()),
        ({"dropout": 0.5, "dropout_seed": 2**63}, ()),
        ({"dropout": 0.5, "dropout_shared": "b", "batch": 2}, ()),
        ({"dropout": 0.5, "dropout_shared": "b", "origin": (1, 0, 0, 0)}, ("origin",)),
        ({"dropout": 0.5, "dropout_shared": "h", "q_heads": 2}, ()),
        ({"dropout": 0.5, "dropout_shared": "h", "batch": 2}, ("shared_dropout",)),
        ({"dropout": 0.5, "dropout_shared": "bh", "batch": 2, "q_heads": 2}, ()),
        ({"dropout": 0.5, "dropout_shared": "bh", "q_heads": 2}, ()),
        ({"dropout": 0.5, "dropout_shared": "bh"}, ("shared_dropout",)),
        ({"scale": 8**-0.5}, ("scale",)),
        ({"sinks": 2, "sink_pattern": "extreme"}, ()),
        ({"kv_len": 1, "bias": "111"}, ()),  # by lse alone
    ],
    ids=str,
)
def test_a_case_shows_what_its_neighbours_change(fields: dict[str, Any], blind: tuple[str, ...]) -> None:
    assert blind_spots(**fields) == blind


def test_what_shows_in_lse_alone_shows_nothing_where_lse_is_not_returned() -> None:
    case = replace(PLAIN, kv_len=1, bias="111")
    assert Trial(replace(EVERYTHING, returns_lse=False), case).blind_spots == ("bias",)


def test_heads_and_batch_rows_have_neighbours_that_read_others_keys() -> None:
    problem = build(replace(PLAIN, batch=3, q_heads=4, kv_heads=2)).problem
    found = dict(neighbours(problem, STANDARD))
    assert np.array_equal(found["a key head for each group"].key[:, :, 1], problem.key[:, :, 0])
    assert np.array_equal(found["keys for each batch row"].key[2], problem.key[0])
    assert np.array_equal(found["gqa"].key, problem.key[:, :, [0, 1, 0, 1]])


def test_a_window_has_a_neighbour_for_each_side_that_hides_something() -> None:
    problem = build(replace(PLAIN, window=(2, 99))).problem
    windows = [other.sliding_window for name, other in neighbours(problem, STANDARD) if name == "window"]
    assert windows == [None, (3, 99)]


@pytest.mark.found_outside
@pytest.mark.parametrize(
    ("sizes", "others"),
    [
        ({"batch": 2, "q_heads": 2}, [None, "h", "b"]),
        ({"batch": 2}, [None, "h"]),
        ({"q_heads": 2}, [None, "b"]),
        ({"origin": (3, 0, 0, 0), "q_heads": 2}, [None, "h", "b"]),
        ({"origin": (0, 3, 0, 0)}, [None, "b"]),
        ({}, [None]),
    ],
    ids=str,
)
def test_dropout_that_both_share_has_a_neighbour_for_each(sizes: dict[str, Any], others: list[Any]) -> None:
    problem = build(replace(PLAIN, dropout=0.5, dropout_shared="bh", **sizes)).problem
    found = [x.dropout_shared for name, x in neighbours(problem, STANDARD) if name == "shared_dropout"]
    assert found == others


def test_weights_of_a_generator_that_is_not_known_have_others_as_neighbours() -> None:
    problem = build(replace(PLAIN, dropout=0.5)).problem
    shape = (problem.batch, problem.q_heads, problem.q_len, problem.kv_len)
    keep = np.arange(np.prod(shape)).reshape(shape) % 3 > 0
    given = replace(problem, dropout_keep=keep)
    found = [x.dropout_keep for name, x in neighbours(given, STANDARD) if name == "dropout"]
    np.testing.assert_array_equal(found, [np.roll(keep, 1, axis=3)])


@pytest.mark.parametrize("entry", load_corpus(), ids=lambda entry: entry.name)
def test_known_bugs_can_be_told(entry: Any) -> None:
    assert is_sensitive(entry.case)


@pytest.mark.parametrize(
    ("fields", "empty"),
    [
        ({}, False),
        ({"causal": True}, False),
        ({"causal": True, "kv_len": 3}, True),
        ({"mask": "11", "mask_pattern": "rows"}, True),
        ({"bias": "11q", "bias_pattern": "rows"}, True),
        ({"bias": "11q", "bias_pattern": "lowest"}, False),
        ({"lengths": ((3, 9), (2, 0))}, True),
    ],
    ids=str,
)
def test_rows_that_see_nothing_are_found(fields: dict[str, Any], empty: bool) -> None:
    assert has_empty_rows(build(replace(PLAIN, **fields)).problem, STANDARD) == empty
