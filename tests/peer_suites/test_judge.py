"""The judge of peers' suites: no list hides a wrong kernel, or one that was not called."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.peer_suites.judge import (
    Entry,
    Expectations,
    Outcome,
    judge,
    load_expectations,
    load_numbers,
    outcome_of,
)
from tests.peer_suites.table import HERE, load_suites

ROOT = HERE.parents[1]

LISTED = Entry(
    "failed", ("suite.py::test_listed*",), "It looks for the program.", "no such operation", "AssertionError"
)
REFUSED = Entry("refused", ("suite.py::test_refused",), "It has no cap.", "softcap: got 1")
APART = Entry("apart", ("suite.py::test_apart",), "It computes nothing.")
EXPECTED = Expectations(1, (LISTED, REFUSED, APART))
NUMBERS = load_numbers(HERE / "numbers.toml")

PASSED = Outcome("suite.py::test_other", "passed")
FAILED = Outcome("suite.py::test_listed0", "failed", "AssertionError", ("no such operation: toy",))
WITH_REFUSAL = Outcome("suite.py::test_refused", "refused", messages=("ValueError: softcap: got 1",))
WITHOUT_CALL = Outcome("suite.py::test_apart", "apart")
AS_LISTED = (PASSED, FAILED, WITH_REFUSAL, WITHOUT_CALL)


def ran(adapter: str, *options: str) -> tuple[int, str]:
    """The exit status and the output of the judged toy suite."""
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "suites.ini"), "--rootdir", str(ROOT)]
    command += ["-p", "tests.peer_suites.toy.in_place", "--expected", str(HERE / "toy" / "expected.toml")]
    environment = os.environ | {"TOY_ADAPTER": adapter}
    command += [str(HERE / "toy" / "suite.py"), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_the_adapter_passes_with_its_listed_failure() -> None:
    status, said = ran("as it is")
    assert "1 passed by our kernels" in said
    assert "2 failed as expected. The test looks for the peer's own function." in said
    assert "1 passed with a refusal. The adapter takes only flags" in said
    assert "1 passed without our kernels. The test computes no attention." in said
    assert "0 problems" in said
    assert status == 0


@pytest.mark.parametrize("defect", ["without causal", "scaled"])
def test_wrong_numbers_are_red_in_a_listed_test_too(defect: str) -> None:
    """Also where they are in a subtest, and the test then fails in the listed way."""
    status, said = ran(defect)
    assert status == 1
    for test in ("test_numbers", "test_numbers_and_program", "test_program_and_numbers"):
        assert f"ToyTest::{test}: wrong numbers, which no entry excuses." in said


def test_another_failure_of_a_listed_test_is_red() -> None:
    status, said = ran("failing")
    assert status == 1
    assert "ToyTest::test_numbers: fails, and is not listed. NotImplementedError" in said
    assert "ToyTest::test_numbers_and_program: fails, and is listed as failed AssertionError" in said


def test_a_library_that_computes_by_itself_does_not_pass_for_us() -> None:
    status, said = ran("refusing")
    assert status == 1
    assert "ToyTest::test_numbers: passes, and a call of our function was refused, and is not listed." in said
    assert "0 tests passed by our kernels; expected at least 1." in said


def test_a_suite_that_never_calls_us_does_not_pass() -> None:
    status, said = ran("not in place")
    assert status == 1
    assert "ToyTest::test_numbers: passes without running our function, and is not listed." in said


def test_a_listed_failure_that_passes_is_stale() -> None:
    status, said = ran("with the peer's name")
    assert status == 1
    assert "ToyTest::test_numbers_and_program: passes by our kernels, and is listed as failed" in said


def test_a_part_of_a_suite_misses_nothing() -> None:
    """Tests that `-k` leaves out are neither stale nor missing; those that run are judged alike."""
    status, said = ran("as it is", "-k", "not program")
    assert "0 problems" in said
    assert status == 0
    assert ran("scaled", "-k", "not program")[0] == 1


def test_a_suite_may_be_some_tests_of_a_file() -> None:
    """Unlike those that `-k` leaves out, the other tests are not missed: the entries for them are stale."""
    status, said = ran("as it is", "--select", "*::test_numbers", "--select", "*::test_dtype")
    assert "1 passed by our kernels" in said
    assert "test_*program*: no test is failed as listed. Remove the pattern." in said
    assert status == 1


def test_what_ends_as_listed_is_no_problem() -> None:
    found = judge(AS_LISTED, EXPECTED, NUMBERS)
    assert found.problems == ()
    assert found.ended == {
        "passed by our kernels": ["suite.py::test_other"],
        "skipped by the suite": [],
        "failed as expected. It looks for the program.": ["suite.py::test_listed0"],
        "passed with a refusal. It has no cap.": ["suite.py::test_refused"],
        "passed without our kernels. It computes nothing.": ["suite.py::test_apart"],
    }


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (replace(FAILED, test="suite.py::test_new"), "fails, and is not listed"),
        (replace(FAILED, exception="ValueError"), "fails, and is listed as failed AssertionError"),
        (replace(FAILED, messages=("out of memory",)), "fails, and is listed as failed AssertionError"),
        (replace(FAILED, messages=("no such operation. Not equal to tolerance",)), "wrong numbers"),
        (replace(FAILED, files=("/lib/numpy/testing/_private/utils.py",)), "wrong numbers"),
        (replace(PASSED, test="suite.py::test_listed1"), "passes by our kernels, and is listed as failed"),
        (replace(WITH_REFUSAL, test="suite.py::test_new"), "a call of our function was refused, and is not"),
        (
            replace(WITH_REFUSAL, messages=(*WITH_REFUSAL.messages, "ValueError: bias: got")),
            "a call of our function was refused, and is listed as refused",
        ),
        (replace(WITH_REFUSAL, test="suite.py::test_listed1"), "was refused, and is listed as failed"),
        (
            replace(WITHOUT_CALL, test="suite.py::test_new"),
            "passes without running our function, and is not",
        ),
        (
            replace(WITHOUT_CALL, test="suite.py::test_refused"),
            "without running our function, and is listed",
        ),
        (replace(PASSED, test="suite.py::test_apart"), "passes by our kernels, and is listed as apart"),
    ],
)
def test_an_outcome_that_is_a_problem(outcome: Outcome, problem: str) -> None:
    assert any(problem in each for each in judge([*AS_LISTED, outcome], EXPECTED, NUMBERS).problems)


@pytest.mark.parametrize(
    ("left_out", "problem"),
    [
        (FAILED, "test_listed*: no test is failed as listed"),
        (WITH_REFUSAL, "test_refused: no test is refused as listed"),
        (WITHOUT_CALL, "test_apart: no test is apart as listed"),
        (PASSED, "0 tests passed by our kernels; expected at least 1"),
    ],
)
def test_what_is_missing_is_a_problem_of_a_complete_run(left_out: Outcome, problem: str) -> None:
    outcomes = [replace(each, ending="skipped") if each is left_out else each for each in AS_LISTED]
    assert any(problem in each for each in judge(outcomes, EXPECTED, NUMBERS).problems)
    assert judge(outcomes, EXPECTED, NUMBERS, complete=False).problems == ()


def test_two_failures_of_a_test_are_judged_each() -> None:
    numbers = replace(FAILED, messages=("Not equal to tolerance",))
    found = judge([*AS_LISTED, numbers], EXPECTED, NUMBERS)
    assert [each.partition(".py::")[2][:26] for each in found.problems] == ["test_listed0: wrong number"]


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
    assert any("wrong numbers" in each for each in judge([PASSED, outcome], EXPECTED, NUMBERS).problems)


@pytest.mark.parametrize(
    "said",
    [
        "assert False\n +  where False = allclose(1.0, 1.1)",
        "False is not true : no such operation",
        "1.0 != 1.1 : no such operation",
        "1.0 not almost equal",
        "assert 1.0 == 1.1",
    ],
)
def test_assertions_about_values_are_told_by_their_words(said: str) -> None:
    """In a listed test with a message of the listed words, too."""
    outcome = replace(FAILED, messages=(f"{said} no such operation",))
    assert any("wrong numbers" in each for each in judge([PASSED, outcome], EXPECTED, NUMBERS).problems)


def test_an_exception_group_is_told_by_its_members() -> None:
    """As where several implementations failed, one of them by its numbers."""
    error = ExceptionGroup("no such operation", [AssertionError("Not equal to tolerance rtol=1e-05")])
    outcome = outcome_of("suite.py::test_listed0", error)
    assert any("wrong numbers" in each for each in judge([PASSED, outcome], EXPECTED, NUMBERS).problems)


@pytest.mark.parametrize(
    "table",
    [
        '[[failed]]\ntests = "*"\nexception = "AssertionError"\nmessage = " "\nreason = "So."',
        '[[refused]]\ntests = "*"\nreason = "So."',
        '[[apart]]\ntests = "*"\nmessage = "words"\nreason = "So."',
        '[[skipped]]\ntests = "*"\nmessage = "words"\nreason = "So."',
    ],
)
def test_an_entry_that_excuses_any_error_is_refused(table: str, tmp_path: Path) -> None:
    file = tmp_path / "expected.toml"
    file.write_text(f"passed = 1\n{table}\n")
    with pytest.raises(ValueError, match=r"expected\.toml"):
        load_expectations(file)


@pytest.mark.parametrize("suite", load_suites())
def test_the_page_shows_how_many_tests_pass(suite: str) -> None:
    page = (ROOT / "docs" / "reference" / "peer-suites.md").read_text()
    rows = [line for line in page.splitlines() if line.lower().startswith(f"| {suite} ")]
    version = load_suites()[suite].requirements[0].partition("==")[2]
    passed = load_expectations(HERE / suite / "expected.toml").passed
    assert [version in row and row.split(" | ")[1] == str(passed) for row in rows] == [True]


@pytest.mark.parametrize("suite", load_suites())
def test_every_entry_has_a_reason_and_excuses_no_words_of_numbers(suite: str) -> None:
    expected = load_expectations(HERE / suite / "expected.toml")
    assert expected.passed
    for entry in expected.entries:
        assert entry.reason.endswith(".")
        assert not any(words in entry.message for words in NUMBERS.words)
