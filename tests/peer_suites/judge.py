"""The verdict on a run of a peer's test suite: which tests our kernels pass, which end otherwise, and why.

A test counts as passed only if our function ran, and no call of it was refused. Every other ending must be
listed, with its reason. A comparison of numbers that fails is always a problem, listed or not: an entry
cannot hide a wrong result.
"""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Literal

Ending = Literal["passed", "refused", "apart", "failed", "skipped"]

_SAID: dict[str, str] = {
    "passed": "passes by our kernels",
    "refused": "passes, and a call of our function was refused",
    "apart": "passes without running our function",
    "failed": "fails",
}


@dataclass(frozen=True)
class Entry:
    """Tests that end otherwise than passed: patterns of their ids, how they end, and why.

    ending: "failed"; "refused", where the test passes though our function refused a call; "apart", where it
    passes without running it. message: words of the error, none where there is no error. exception: the type
    of the error that a test fails with.
    """

    ending: Ending
    tests: tuple[str, ...]
    reason: str
    message: str = ""
    exception: str = ""


@dataclass(frozen=True)
class Numbers:
    """The signs of a failed comparison of numbers.

    words: parts of its message. files: parts of the paths of files that compare.
    """

    words: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class Expectations:
    """The expected endings of a suite: the least number of tests that pass, and entries for the others."""

    passed: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Outcome:
    """One test, or one failure of it: how it ended, and the words of its errors.

    A failure has the exception it failed with, with those that it was raised from, and the files of their
    tracebacks. A refusal has what our function raised, in each of the calls that it refused.
    """

    test: str
    ending: Ending
    exception: str = ""
    messages: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """The problems of a run, one sentence each, and the tests that ended in each way."""

    problems: tuple[str, ...]
    ended: dict[str, list[str]] = field(default_factory=dict)


def load_numbers(path: Path) -> Numbers:
    """Read a TOML file: `words` and `files`."""
    data = tomllib.loads(path.read_text())
    return Numbers(tuple(data["words"]), tuple(data["files"]))


def load_expectations(path: Path) -> Expectations:
    """Read a TOML file: `passed`, and a table `failed`, `refused` or `apart` for each entry.

    `tests` of an entry is a pattern or a list of them.

    Raises: ValueError for an entry without words, where there is an error to tell.
    """
    data = tomllib.loads(path.read_text())
    passed = data.pop("passed")
    entries = tuple(_entry(ending, **entry) for ending, given in data.items() for entry in given)
    for entry in entries:
        if entry.ending not in ("failed", "refused", "apart"):
            raise ValueError(f"{path}: got a table {entry.ending}, expected failed, refused or apart.")
        if bool(entry.message.strip()) == (entry.ending == "apart"):
            raise ValueError(f"{path}: {entry.reason} It needs a message, unless no error is raised.")
    return Expectations(passed, entries)


def outcome_of(test: str, error: BaseException) -> Outcome:
    """Return the outcome of a test that raised an exception."""
    chain = list(_chain(error))
    message = "\n".join(str(each) for each in chain)
    files = tuple(name for each in chain for name in _files(each.__traceback__))
    return Outcome(test, "failed", type(error).__name__, (message,), files)


def judge(
    outcomes: Sequence[Outcome], expected: Expectations, numbers: Numbers, complete: bool = True
) -> Judgement:
    """Compare the outcomes of a run with what is expected.

    Entries that match nothing and tests that should have passed are problems of a complete run alone.
    """
    problems: list[str] = []
    ended: dict[str, list[str]] = {"passed by our kernels": [], "skipped by the suite": []}
    ended |= {_title(entry): [] for entry in expected.entries}
    for outcome in outcomes:
        listed = [each for each in expected.entries if any(fnmatchcase(outcome.test, x) for x in each.tests)]
        entry = next((each for each in listed if _ends_so(outcome, each)), None)
        said = _SAID.get(outcome.ending, "")
        how = " ".join(" ".join([outcome.exception, *outcome.messages[:1]]).split())[:400]
        if _compares_numbers(outcome, numbers):
            problems.append(f"{outcome.test}: wrong numbers, which no entry excuses. {how}")
        elif outcome.ending == "skipped":
            ended["skipped by the suite"].append(outcome.test)
        elif entry is not None:
            ended[_title(entry)].append(outcome.test)
        elif listed:
            wanted = " or ".join(f"{each.ending} {each.exception} {each.message!r}" for each in listed)
            problems.append(f"{outcome.test}: {said}, and is listed as {wanted}. {how}")
        elif outcome.ending == "passed":
            ended["passed by our kernels"].append(outcome.test)
        else:
            problems.append(f"{outcome.test}: {said}, and is not listed. {how}")
    if complete:
        problems += [
            f"{pattern}: no test is {entry.ending} as listed. Remove the pattern."
            for entry in expected.entries
            for pattern in entry.tests
            if not any(fnmatchcase(test, pattern) for test in ended[_title(entry)])
        ]
        passed = len(ended["passed by our kernels"])
        if passed < expected.passed:
            problems.append(f"{passed} tests passed by our kernels; expected at least {expected.passed}.")
    return Judgement(tuple(problems), ended)


def _entry(ending: Ending, tests: str | list[str], **others: str) -> Entry:
    return Entry(ending, (tests,) if isinstance(tests, str) else tuple(tests), **others)


def _title(entry: Entry) -> str:
    how = {
        "failed": "failed as expected",
        "refused": "passed with a refusal",
        "apart": "passed without our kernels",
    }
    return f"{how[entry.ending]}. {entry.reason}"


def _ends_so(outcome: Outcome, entry: Entry) -> bool:
    said = all(entry.message in message for message in outcome.messages)
    return outcome.ending == entry.ending and outcome.exception == entry.exception and said


def _compares_numbers(outcome: Outcome, numbers: Numbers) -> bool:
    if outcome.ending != "failed":
        return False
    said = any(words in message for words in numbers.words for message in outcome.messages)
    return said or any(part in name for part in numbers.files for name in outcome.files)


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
