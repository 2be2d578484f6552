"""Failures that base does not have: their causes, other ways to fail, and cases that replace others."""

from dataclasses import replace

import pytest

from attest.conformance.record import Verdict
from attest.reports.compare import compare_records
from attest.reports.pairing import Fate
from tests.reports.records import GOOD, SMALL, case, measurement, one, result, run

PASS, FAIL, ERROR = Verdict.PASS, Verdict.FAIL, Verdict.ERROR


@pytest.mark.found_outside
def test_another_list_of_tiles_draws_other_cases_and_only_their_failures_count() -> None:
    """A failure among the cases that replaced others is found, and the note says why cases are gone."""
    old = [result(PASS, measurement(), asked=case(seed, tiling=1)) for seed in range(4)]
    new = [replace(each, case=replace(each.case, tiling=2)) for each in old]
    comparison = compare_records(run(*GOOD.results, *old), run(*GOOD.results, *new))
    assert not comparison.regressed
    assert any(note.startswith("our.kernel has other cases in head") for note in comparison.notes)
    assert len(comparison.of_fate(Fate.GONE)) == len(comparison.of_fate(Fate.NEW)) == 4
    worse = compare_records(
        run(*GOOD.results, *old), run(*GOOD.results, *new[1:], replace(new[0], verdict=FAIL))
    )
    assert [str(regression) for regression in worse.regressions] == [
        "our.kernel forward bfloat16: 1 case FAIL and new"
    ]


def test_a_case_that_only_a_search_found_does_not_stand_for_one_that_is_gone() -> None:
    head = run(*GOOD.results[1:], result(FAIL, asked=case(50), minimal=True, shrunk_from="other"))
    assert "1 case PASS before and gone" in compare_records(GOOD, head).headline


@pytest.mark.parametrize(
    ("before", "after", "noted"),
    [
        ({"message": "shape (1, 2) at 0x1f"}, {"message": "shape (1, 3) at 0x2e"}, False),
        ({"message": "raised ValueError: a"}, {"message": "raised TypeError: b"}, True),
        ({"message": "a"}, {"message": "a", "verdict": ERROR}, True),
        ({"message": "a"}, {"message": "a", "measurements": (SMALL,)}, True),
        ({"measurements": (SMALL,), "message": "a"}, {"measurements": (SMALL,), "message": "b"}, False),
        ({"message": "a"}, {"verdict": Verdict.TIMEOUT, "message": "b"}, False),
    ],
)
def test_a_case_that_fails_in_another_way_is_noted_with_its_cause(before, after, noted) -> None:
    comparison = compare_records(one(FAIL, **before), one(after.pop("verdict", FAIL), **after))
    note = "1 case failed in base, and in head in another way: no regression"
    assert (note in comparison.notes) == noted
    assert [len(found.pairs) for found in comparison.new_causes] == [1] * noted
    assert not comparison.regressed


def test_a_cause_says_how_many_of_its_failures_are_new_and_shows_one_before_and_after() -> None:
    wrong = measurement(worst_ratio=40.0, broken=("bound", "semantics"))
    passing = [result(PASS, measurement(), asked=case(seed, causal=True)) for seed in range(9)]
    failing = [replace(each, verdict=FAIL, measurements=(wrong,)) for each in passing]
    rest = [result(PASS, measurement(), asked=case(seed)) for seed in range(9)]
    base = run(*failing[:2], *passing[2:], *rest)
    (found,) = compare_records(base, run(*failing, *rest)).new_causes
    assert found.counts == "7 of 9 failures are new"
    assert found.card.parts.headline == "out is wrong with causal"
    (row,) = found.numbers
    assert (row.output, row.worst_ratio, row.wrong) == ("out", (0.4, 40.0), True)
    cut = replace(failing[0], case=case(99, causal=True), minimal=True, shrunk_from="other", cut=True)
    (found,) = compare_records(base, run(*failing, *rest, cut)).new_causes
    assert found.counts == "8 of 10 failures are new"
    (fresh,) = compare_records(run(*rest), run(*failing[:1], *rest)).new_causes
    assert (fresh.counts, fresh.example.base) == ("1 of 1 failure is new", None)
    assert fresh.numbers[0].worst_ratio == (None, 40.0)
