"""The judge of peers' suites: no list of expected failures hides a wrong kernel."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.peer_suites.judge import Entry, Expectations, Outcome, judge, load_expectations, outcome_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

LISTED = Entry("suite.py::test_listed*", "AssertionError", "no such operation", "It looks for the program.")
EXPECTED = Expectations(1, ("Not equal to tolerance",), ("/numpy/testing/",), (LISTED,))
PASSED = Outcome("suite.py::test_other", "passed")
FAILED = Outcome("suite.py::test_listed0", "failed", "AssertionError", "no such operation: toy")


def ran(adapter: str, *options: str) -> tuple[int, str]:
    """The exit status and the output of the judged toy suite."""
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "suites.ini"), "--rootdir", str(ROOT)]
    command += ["--expected", str(HERE / "toy.toml"), str(HERE / "toy_suite.py"), *options]
    environment = os.environ | {"TOY_ADAPTER": adapter}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_the_adapter_passes_with_its_listed_failure() -> None:
    status, said = ran("as it is")
    assert "1 failed as expected. The test looks for the peer's own function." in said
    assert "0 problems" in said
    assert status == 0


@pytest.mark.parametrize("defect", ["without causal", "scaled"])
def test_wrong_numbers_are_red_in_a_listed_test_too(defect: str) -> None:
    status, said = ran(defect)
    assert status == 1
    for test in ("test_numbers", "test_numbers_and_program"):
        assert f"ToyTest::{test}: wrong numbers, which no entry excuses." in said


def test_another_failure_of_a_listed_test_is_red() -> None:
    status, said = ran("refusing")
    assert status == 1
    assert "ToyTest::test_numbers: fails, and is not listed. NotImplementedError" in said
    assert "ToyTest::test_numbers_and_program: fails in another way than listed" in said


def test_a_listed_failure_that_passes_is_stale() -> None:
    status, said = ran("with the peer's name")
    assert status == 1
    assert "ToyTest::test_numbers_and_program: passes, and is listed as a failure." in said


def test_a_part_of_a_suite_misses_nothing() -> None:
    """Tests that `-k` leaves out are neither stale nor missing; those that run are judged alike."""
    status, said = ran("as it is", "-k", "not program")
    assert "0 problems" in said
    assert status == 0
    assert ran("scaled", "-k", "not program")[0] == 1


def test_an_expected_failure_is_no_problem() -> None:
    found = judge([PASSED, FAILED], EXPECTED)
    assert found.problems == ()
    assert found.excused == {"It looks for the program.": ["suite.py::test_listed0"]}


@pytest.mark.parametrize(
    ("outcomes", "problem"),
    [
        ([PASSED, replace(FAILED, test="suite.py::test_new")], "not listed"),
        ([PASSED, replace(FAILED, exception="ValueError")], "another way than listed"),
        ([PASSED, replace(FAILED, message="out of memory")], "another way than listed"),
        ([PASSED, replace(FAILED, message="no such operation. Not equal to tolerance")], "wrong numbers"),
        ([PASSED, replace(FAILED, files=("/lib/numpy/testing/_private/utils.py",))], "wrong numbers"),
        ([PASSED, FAILED, replace(PASSED, test="suite.py::test_listed1")], "listed as a failure"),
        ([PASSED], "matches no failure"),
        ([PASSED, replace(FAILED, status="skipped")], "matches no failure"),
        ([FAILED], "0 tests passed; expected at least 1"),
    ],
)
def test_problems(outcomes: list[Outcome], problem: str) -> None:
    assert any(problem in each for each in judge(outcomes, EXPECTED).problems)


@pytest.mark.parametrize(
    "compare",
    [
        lambda: np.testing.assert_allclose(1.0, 1.01, rtol=1e-6),
        lambda: np.testing.assert_array_equal([1.0, 2.0], [1.0, 3.0]),
        lambda: np.testing.assert_array_less(2.0, 1.0),
    ],
)
def test_comparisons_of_numpy_are_told_by_where_they_fail(compare: object) -> None:
    """Also where another exception is raised from them, in whose words nothing is left of them."""
    assert callable(compare)
    try:
        try:
            compare()
        except AssertionError:
            raise AssertionError("no such operation") from None
    except AssertionError as error:
        outcome = outcome_of("suite.py::test_listed0", error)
    assert any("wrong numbers" in each for each in judge([PASSED, outcome], EXPECTED).problems)


def test_an_exception_group_is_told_by_its_members() -> None:
    """As where several implementations failed, one of them by its numbers."""
    error = ExceptionGroup("no such operation", [AssertionError("Not equal to tolerance rtol=1e-05")])
    outcome = outcome_of("suite.py::test_listed0", error)
    assert any("wrong numbers" in each for each in judge([PASSED, outcome], EXPECTED).problems)


def test_every_entry_for_tokamax_has_a_reason_and_words() -> None:
    expected = load_expectations(HERE / "expected.toml")
    assert expected.failures
    for entry in expected.failures:
        assert entry.message
        assert entry.reason.endswith(".")
        assert not any(words in entry.message for words in expected.numbers)
