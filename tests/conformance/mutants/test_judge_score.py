"""Defects of what judges: the project's own tests notice each, and say which test did."""

from dataclasses import replace

import pytest

from attest.conformance.mutants import judge_score
from attest.conformance.mutants.catalogue import Edit, Mutant, load
from attest.conformance.mutants.not_here import NotHereError
from tests.meta.processes import ROOT

DEFECTS = load("judges")
TESTS = "tests/reference/test_visibility.py"


@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_a_defect_names_tests_that_exist(name: str) -> None:
    assert (ROOT / DEFECTS[name].test).is_file()


@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_the_projects_tests_notice_a_defect_of_what_judges(name: str) -> None:
    score = judge_score.scored(DEFECTS[name])
    assert score.how == "wrong", score.message
    assert score.check.startswith(f"{DEFECTS[name].test}::")


def edited(planted: str) -> Mutant:
    edit = Edit("reference/visibility.py", "seen &= outward <= side if", planted)
    return Mutant(name="edited", group="judges", change="x", test=TESTS, edits=(edit,))


def test_an_edit_that_changes_nothing_survives() -> None:
    assert not judge_score.scored(edited("seen &= side >= outward if")).killed


def test_tests_that_cannot_be_collected_are_a_crash() -> None:
    score = judge_score.scored(edited("seen &= &= if"))
    assert (score.how, score.check) == ("crash", TESTS)
    assert "SyntaxError" in score.message


def test_tests_that_do_not_pass_by_themselves_are_refused() -> None:
    missing = replace(edited(""), test="tests/reference/test_nothing.py")
    with pytest.raises(ValueError, match=r"^edited: tests/reference/test_nothing.py does not pass without"):
        judge_score.scored(missing)


def test_a_wheel_has_no_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_score, "_NEEDED", ("no such folder",))
    judge_score._passes.cache_clear()
    with pytest.raises(NotHereError, match="needs the project's tests, which no wheel has"):
        judge_score.scored(edited(""))
