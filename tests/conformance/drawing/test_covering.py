"""Covering arrays hold every allowed set of facts, in few rows, the same for the same seed."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.conformance.drawing.covering import Facts, Model, covering_rows, reduced, wanted_sets
from attest.conformance.drawing.recipes import model

SWITCHES = tuple("abcdefg")
CHOICES = {"x": ("x1", "x2", "x3"), "y": ("y1", "y2")}


@st.composite
def models(draw: st.DrawFn) -> Model:
    switches = SWITCHES[: draw(st.integers(2, len(SWITCHES)))]
    # Of each choice one value is never excluded, so that a row can be completed.
    facts = (*switches, *CHOICES["x"][1:], *CHOICES["y"][1:])
    pairs = [frozenset(pair) for pair in combinations(facts, 2) if set(pair) & set(switches)]
    excludes = draw(st.lists(st.sampled_from(pairs), max_size=4))
    needs = {switches[0]: switches[1:3]} if draw(st.booleans()) else {}
    return Model(switches, CHOICES, needs, tuple(excludes), most=draw(st.integers(2, 4)))


@given(models(), st.sampled_from((1, 2)), st.integers(0, 99))
def test_every_allowed_set_is_in_some_row_and_no_row_holds_what_excludes_itself(
    made_of: Model, strength: int, seed: int
) -> None:
    rows = list(covering_rows(made_of, strength, seed))
    assert rows == list(covering_rows(made_of, strength, seed))
    for chosen in wanted_sets(made_of, strength):
        assert any(chosen <= made_of.whole(row) for row in rows)
    for row in rows:
        assert made_of.allows(row)
        assert made_of.completed(row) == row
        for values in CHOICES.values():
            assert len(row & set(values)) == 1


def test_required_facts_are_in_every_row() -> None:
    rows = list(covering_rows(model(), 2, 0, frozenset({"window", "integer_mask"})))
    assert all({"window", "integer_mask", "mask"} <= row for row in rows)
    with_others = {other for row in rows for other in row}
    assert with_others >= {*model().switches}


@pytest.mark.parametrize("seed", range(5))
def test_features_take_few_rows(seed: int) -> None:
    assert len(list(covering_rows(model(), 2, seed))) <= 24
    assert len(list(covering_rows(model(), 1, seed))) <= 7


@given(st.lists(st.frozensets(st.sampled_from(SWITCHES), max_size=5), max_size=4), st.data())
def test_reduced_rows_keep_every_pair_that_is_left(rows: list[Facts], data: st.DataObject) -> None:
    lacking = data.draw(st.frozensets(st.sampled_from(SWITCHES), max_size=2))
    excludes = data.draw(
        st.lists(st.frozensets(st.sampled_from(SWITCHES), min_size=2, max_size=3), max_size=3)
    )
    left = list(reduced(rows, lacking, tuple(excludes), {}))
    assert not any(row & lacking or any(excluded <= row for excluded in excludes) for row in left)
    for row in rows:
        for pair in combinations(sorted(row - lacking), 2):
            if not any(excluded <= set(pair) for excluded in excludes):
                assert any(set(pair) <= kept for kept in left)


def test_each_switch_is_in_a_row_without_each_other_one() -> None:
    rows = list(covering_rows(Model(SWITCHES, needs={"a": ("b", "c")}), 2, 0))
    for switch in SWITCHES:
        for other in SWITCHES:
            if switch != other and (switch, other) != ("a", "b"):
                assert any(switch in row and other not in row for row in rows)


def test_what_a_row_lost_takes_with_it_what_needs_it() -> None:
    needs = {"a": ("b", "c")}
    assert list(reduced([frozenset("abd")], frozenset("b"), (), needs)) == [frozenset("d")]
    assert list(reduced([frozenset("abcd")], frozenset("b"), (), needs)) == [frozenset("acd")]
