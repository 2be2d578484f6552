"""The items of the marker `attest`: one for each check and each row of the covering array, judged one by one.

This module plans and judges; `pytest_plugin` gives the items to pytest. Planning runs no kernel.
"""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from attest.conformance.cases.case import Case
from attest.conformance.causes.card import strip
from attest.conformance.causes.group import causes
from attest.conformance.checks import all_checks
from attest.conformance.judging.failure import explain
from attest.conformance.judging.trial import Trial
from attest.conformance.process.limits import limits
from attest.conformance.process.signals import Interrupted, interruptible
from attest.conformance.record import ACCURACY, Result, Verdict, to_shrink
from attest.conformance.running.choice import Draw, chosen, first_try
from attest.conformance.running.expectations import Expectation, expect, load_expectations
from attest.conformance.running.gate import why_not_here
from attest.conformance.running.judge import judge_trial
from attest.conformance.running.plan import Profile, load_profile, tasks
from attest.conformance.running.results import new_minimal
from attest.conformance.running.shrink import Failure, shrink
from attest.conformance.subject import Subject, find
from attest.conformance.testing import python_replay
from attest.conformance.text import describe, exception_text, sentence

# A longer failure loses lines in its middle: the first ones say what is wrong, the last ones replay it.
_LINES = 40
_LAST_LINES = 2
# The draws of a row are judged one check after the other; a row of the profiles has fewer than these.
_TRIALS = 16


@dataclass(frozen=True)
class Options:
    """The options of pytest's command line. None: the marker's value, or else the usual one."""

    profile: str | None = None
    seed: int | None = None
    expectations: tuple[Path, ...] = ()
    shrink_evaluations: int = 0


@dataclass(frozen=True, eq=False)
class MarkedSubject:
    """The subject of a marked test function, and how it is judged.

    name: what the marker names it, by which a replay line finds it; empty if the marker has the Subject.
    shrunk: the checks of which a failing case was shrunk already.
    """

    subject: Subject
    name: str
    profile: Profile
    seed: int
    expectations: Sequence[Expectation]
    shrink_evaluations: int
    shrunk: set[str] = field(default_factory=set[str])


@dataclass(frozen=True, eq=False)
class AttestCase:
    """One item: a check of a subject on the cases of one row. The fixture `attest_case` gives it.

    row: its number in the plan; the items of a row share what is compiled. dtype, features: of its cases.
    """

    check: str
    row: int
    dtype: str
    features: frozenset[str]
    marked: MarkedSubject
    draws: tuple[Draw, ...]

    @property
    def subject(self) -> Subject:
        """The subject that is judged."""
        return self.marked.subject

    @property
    def id(self) -> str:
        """The name of the item, without its row: check, dtype and features."""
        return "-".join((self.check, self.dtype, *(sorted(self.features) or ("plain",))))


@dataclass(frozen=True)
class Judged:
    """The outcome of an item, and the text that explains it."""

    outcome: Literal["passed", "failed", "skipped", "xfailed"]
    text: str = ""


def marked_subject(
    arguments: Sequence[Any], keywords: dict[str, Any], folder: Path, options: Options
) -> MarkedSubject:
    """Return the subject of a marker. Raises ValueError, TypeError or LookupError with one sentence.

    folder: that of the test file, below which relative files of the marker are.
    """
    bound = _bound(arguments, keywords)
    given = bound["subject"]
    if not isinstance(given, (Subject, str)):
        raise TypeError(f"subject: got {type(given).__name__}, expected an attest.Subject or its name")
    seed = _first(options.seed, bound["seed"], 0)
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed: got {seed!r}, expected an integer from 0 on")
    profile = _first(options.profile, bound["profile"], "quick")
    files = bound["expectations"]
    files = (files,) if isinstance(files, (str, os.PathLike)) else files
    if not isinstance(files, (list, tuple)) or not all(isinstance(x, (str, os.PathLike)) for x in files):
        raise TypeError(f"expectations: got {files!r}, expected a path, or a list of paths")
    return MarkedSubject(
        subject=find(given) if isinstance(given, str) else given,
        name=given if isinstance(given, str) else "",
        profile=load_profile(profile),
        seed=seed,
        expectations=load_expectations([*(folder / file for file in files), *options.expectations]),
        shrink_evaluations=options.shrink_evaluations,
    )


def planned_items(marked: MarkedSubject) -> list[AttestCase]:
    """Return the items of a subject, row by row. Raises ValueError with one sentence if there are none."""
    found: list[AttestCase] = []
    try:
        with interruptible():
            for row, task in enumerate(tasks(marked.subject, marked.profile, marked.seed)):
                drawn: dict[str, list[Draw]] = {}
                for draw, checks in task.draws:
                    for check in checks:
                        drawn.setdefault(check, []).append(draw)
                for check, draws in drawn.items():
                    case = first_try(draws[0])
                    if case is not None:
                        found.append(AttestCase(check, row, case.dtype, case.features, marked, tuple(draws)))
    except Interrupted:
        raise KeyboardInterrupt from None
    except Exception as error:  # the declarations of a subject are code
        raise ValueError(f"cannot draw cases for {marked.subject.name}: {describe(error)}") from error
    if not found:
        profile = marked.profile.name
        raise ValueError(f"the profile {profile} has no case for {marked.subject.name}: nothing is tested")
    return found


def judge_item(item: AttestCase) -> Judged:
    """Judge one item in this process. Raises KeyboardInterrupt where the run is ended."""
    import jax

    try:
        with interruptible():
            reason = why_not_here(item.subject, jax.default_backend())
            if reason is not None:
                return Judged("skipped", f"{item.subject.name} cannot run here: {reason}")
            return _concluded(item, [result for draw in item.draws for result in _results(item, draw)])
    except Interrupted:
        raise KeyboardInterrupt from None
    except LookupError as error:
        return Judged("failed", sentence(str(error.args[0])))
    except BaseException as error:  # of a subject's declarations; those of its calls are verdicts
        return Judged("failed", f"ERROR {item.subject.name}: {item.check}\n  {exception_text(error)}")


@lru_cache(maxsize=_TRIALS)
def _trial(marked: MarkedSubject, draw: Draw) -> Trial | None:
    """Return the trial of a draw, which the next checks of its row use again; None if it has no case."""
    case: Case | None = chosen(draw)
    return None if case is None else Trial(marked.subject, case)


def _results(item: AttestCase, draw: Draw) -> list[Result]:
    trial = _trial(item.marked, draw)
    if trial is None:
        return []
    return [_known(item.marked, result) for result in judge_trial(trial, (item.check,))]


def _known(marked: MarkedSubject, result: Result) -> Result:
    """Return the result under the name that the marker has, with the expectations applied."""
    return expect(replace(result, subject=marked.name or result.subject), marked.expectations)


def _concluded(item: AttestCase, results: Sequence[Result]) -> Judged:
    """Return the outcome of an item, from the results of all its cases."""
    red = [result for result in results if result.verdict.red]
    if red:
        return Judged("failed", _explained(item, red, len(results)))
    for result in results:
        if result.verdict is Verdict.XFAIL:
            return Judged("xfailed", f"{result.message} ({result.link})")
    if any(result.verdict is Verdict.PASS for result in results):
        return Judged("passed")
    if not results:
        return Judged("skipped", "INCONCLUSIVE: no case of this row can show a defect")
    return Judged("skipped", sentence(f"{results[0].verdict}: {results[0].message}"))


def _explained(item: AttestCase, red: Sequence[Result], cases: int) -> str:
    """Return the explanation of the simplest red result, in few lines."""
    simple = to_shrink(red)
    failing = next((each for each in simple.values() if each.semantic), next(iter(simple.values()), red[0]))
    shown = _shrunk(item, failing)
    replay = None if item.marked.name else python_replay(shown)
    lines = explain(shown, replay).splitlines()
    lines[1:1] = [f"  {line}" for line in _stages(item, shown)]
    if cases > 1:
        lines.insert(1, f"  {len(red)} of the {cases} cases of this row fail")
    if len(lines) > _LINES:
        left_out = len(lines) - _LINES + 1
        first = _LINES - 1 - _LAST_LINES
        lines = [*lines[:first], f"  [... {left_out} lines left out ...]", *lines[-_LAST_LINES:]]
    return "\n".join(lines)


def _stages(item: AttestCase, shown: Result) -> list[str]:
    """Return the outputs of the shown case that are wrong, with the stage of the computation, in one line.

    An item judges one check; the stage follows from the outputs of all that compare with the oracle.
    """
    if shown.check not in ACCURACY or not any(measured.broken for measured in shown.measurements):
        return []
    results = judge_trial(Trial(item.subject, shown.case), ACCURACY)
    return [strip(cause) for cause in causes(results) if cause.outputs][:1]


def _shrunk(item: AttestCase, failing: Result) -> Result:
    """Return a simpler failing case of a check's first failure in this process; else the failure itself."""
    marked = item.marked
    listed = all_checks()[item.check].kind.listed
    if failing.verdict is not Verdict.FAIL or listed or item.check in marked.shrunk:
        return failing
    marked.shrunk.add(item.check)
    if marked.shrink_evaluations == 0:
        return failing
    seconds = limits()["search_seconds"]
    (found,) = shrink(marked.subject, [Failure(failing)], marked.shrink_evaluations, seconds)
    return new_minimal(failing, found, marked.expectations) or failing


def _bound(arguments: Sequence[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the marker by name. Raises TypeError."""

    def attest(subject: Any, *, profile: Any = None, seed: Any = None, expectations: Any = ()) -> None: ...

    try:
        bound = inspect.signature(attest).bind(*arguments, **keywords)
    except TypeError as error:
        raise TypeError(f"{error}; write attest(subject, profile=, seed=, expectations=)") from None
    bound.apply_defaults()
    return bound.arguments


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
