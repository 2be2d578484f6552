"""The verdict on a run of a peer's test suite: which failures are expected, and which are real.

A failure is expected only if it is listed, and fails as its entry says: with this exception and these words.
A comparison of numbers that fails is always real, listed or not: an entry cannot hide a wrong result.
"""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Literal


@dataclass(frozen=True)
class Entry:
    """A kind of failure that is expected: tests by a pattern of their ids, how they fail, and why."""

    tests: str
    exception: str
    message: str
    reason: str


@dataclass(frozen=True)
class Expectations:
    """What a suite is expected to do, and how a comparison of numbers is told.

    passed: how many tests pass, at least. numbers: words in the messages of comparisons. comparisons: parts
    of the paths of files that compare.
    """

    passed: int
    numbers: tuple[str, ...]
    comparisons: tuple[str, ...]
    failures: tuple[Entry, ...]


@dataclass(frozen=True)
class Outcome:
    """One test: how it ended, and the exception it failed with, with those that it was raised from."""

    test: str
    status: Literal["passed", "failed", "skipped"]
    exception: str = ""
    message: str = ""
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """What is wrong with a run, one sentence each, and the tests that failed as each entry says."""

    problems: tuple[str, ...]
    excused: dict[str, list[str]] = field(default_factory=dict)


def load_expectations(path: Path) -> Expectations:
    """Read a TOML file: passed, numbers, comparisons, and a table `failure` for each entry."""
    data = tomllib.loads(path.read_text())
    entries = tuple(Entry(**entry) for entry in data.get("failure", ()))
    return Expectations(data["passed"], tuple(data["numbers"]), tuple(data["comparisons"]), entries)


def outcome_of(test: str, error: BaseException) -> Outcome:
    """Return the outcome of a test that raised an exception."""
    chain = list(_chain(error))
    message = "\n".join(str(each) for each in chain)
    files = tuple(name for each in chain for name in _files(each.__traceback__))
    return Outcome(test, "failed", type(error).__name__, message, files)


def judge(outcomes: Sequence[Outcome], expected: Expectations, complete: bool = True) -> Judgement:
    """Hold the outcomes of a run to what is expected.

    Entries that match nothing and tests that should have passed are problems of a complete run alone.
    """
    problems: list[str] = []
    excused: dict[str, list[str]] = {entry.reason: [] for entry in expected.failures}
    for outcome in outcomes:
        entry = next((each for each in expected.failures if fnmatchcase(outcome.test, each.tests)), None)
        if outcome.status == "passed" and entry is not None:
            problems.append(
                f"{outcome.test}: passes, and is listed as a failure. Remove it from {entry.tests}."
            )
        if outcome.status != "failed":
            continue
        how = f"{outcome.exception}: {outcome.message.strip()[:400]}"
        if _compares_numbers(outcome, expected):
            problems.append(f"{outcome.test}: wrong numbers, which no entry excuses. {how}")
        elif entry is None:
            problems.append(f"{outcome.test}: fails, and is not listed. {how}")
        elif outcome.exception != entry.exception or entry.message not in outcome.message:
            wanted = f"{entry.exception} with {entry.message!r}"
            problems.append(f"{outcome.test}: fails in another way than listed, which is {wanted}. {how}")
        else:
            excused[entry.reason].append(outcome.test)
    if not complete:
        return Judgement(tuple(problems), excused)
    failed = [outcome.test for outcome in outcomes if outcome.status == "failed"]
    problems += [
        f"{entry.tests}: matches no failure. Remove the entry."
        for entry in expected.failures
        if not any(fnmatchcase(test, entry.tests) for test in failed)
    ]
    passed = sum(outcome.status == "passed" for outcome in outcomes)
    if passed < expected.passed:
        problems.append(f"{passed} tests passed; expected at least {expected.passed}.")
    return Judgement(tuple(problems), excused)


def _compares_numbers(outcome: Outcome, expected: Expectations) -> bool:
    said = any(words in outcome.message for words in expected.numbers)
    return said or any(part in name for part in expected.comparisons for name in outcome.files)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        inner: Iterable[BaseException] = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        waiting += [*inner, each.__cause__, each.__context__]


def _files(traceback: TracebackType | None) -> Iterator[str]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename.replace("\\", "/")
        traceback = traceback.tb_next
