"""Shrinking: the simplest cases on which the same checks of the same subject fail."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from hypothesis import Phase

from attest.conformance.cases.case import Case
from attest.conformance.checks import all_checks
from attest.conformance.drawing.reductions import reduced
from attest.conformance.drawing.seeded_draws import try_values
from attest.conformance.drawing.strategies import simpler, smallest
from attest.conformance.judging.trial import Trial
from attest.conformance.record import Result, Verdict
from attest.conformance.running.judge import judge
from attest.conformance.subject import Subject


@dataclass(frozen=True)
class Failure:
    """A failure to search a simpler case for.

    stays_of_precision: whether the search must not end at a failure of semantics, because the run reports
        such a failure as well.
    """

    result: Result
    stays_of_precision: bool = False


def shrink(
    subject: Subject,
    failures: Sequence[Failure],
    evaluations: int,
    seconds: float = float("inf"),
    simple: Sequence[Result] = (),
) -> list[Result]:
    """Search the simpler cases of failures that begin with one case; return the simplest result of each.

    After them come the other failures on the simplest cases, which show what else is wrong there.

    simple: what searches of the same subject have found before. A failure on the case of one of them, if that
    is simpler, ends the search: the report shows both failures on one case.

    Each search judges at most `evaluations` cases, and shares what it computes with those after it. All of
    them end after `seconds`; a search that was cut off then is marked so. A failure of semantics stays one of
    semantics. A failure of precision may become one of semantics on a simpler case. A case that is not
    sensitive enough to show a defect does not count: it must pass once the kernel is fixed.
    """
    shared = _Judged(subject, tuple(failure.result.check for failure in failures), time.monotonic() + seconds)
    found = [_search(shared, failure, evaluations, simple) for failure in failures]
    every = {(each.check, each.case): each for each in found}
    for each in found:
        for other in shared.failures(each.case):
            every.setdefault((other.check, other.case), replace(other, cut=each.cut))
    return list(every.values())


class _Judged:
    """The cases judged so far, with the results of all checks of the searches."""

    def __init__(self, subject: Subject, checks: tuple[str, ...], deadline: float) -> None:
        self.subject = subject
        self._checks = checks
        self._deadline = deadline
        self._found: dict[Case, dict[str, Result]] = {}

    def judge(self, case: Case, check: str) -> Result:
        """Return the result of a check on a case. Raises _Late."""
        if case not in self._found:
            if time.monotonic() > self._deadline:
                raise _Late
            self._found[case] = {each.check: each for each in judge(self.subject, case, self._checks)}
        return self._found[case][check]

    def failures(self, case: Case) -> list[Result]:
        """Return the failures on a case that was judged."""
        return [each for each in self._found.get(case, {}).values() if each.verdict is Verdict.FAIL]


def _search(judged: _Judged, failure: Failure, evaluations: int, simple: Sequence[Result]) -> Result:
    failing = simplest = failure.result
    known: dict[Case, bool] = {failing.case: True}
    needs_contrast = all_checks()[failing.check].needs_contrast

    def fails(case: Case) -> bool:
        nonlocal simplest
        if case not in known:
            if len(known) > evaluations or judged.subject.why_not(case) is not None:
                return False
            result = judged.judge(case, failing.check)
            alike = result.semantic >= failing.semantic and not (
                failure.stays_of_precision and result.semantic
            )
            known[case] = (
                alike
                and result.verdict is Verdict.FAIL
                and not (needs_contrast and Trial(judged.subject, case).blind_spots)
            )
            if known[case] and _size(case) < _size(simplest.case):
                simplest = result
        return known[case]

    def search(case: Case) -> None:
        if fails(case):
            raise _StillFailsError

    try:
        for earlier in simple:
            if _size(earlier.case) < _size(simplest.case) and fails(earlier.case):
                return replace(simplest, cut=earlier.cut)
        if not any(map(fails, islice(smallest(failing.case), evaluations // 4))):
            reduced(failing.case, fails)
        with suppress(_StillFailsError):
            try_values(search, simpler(simplest.case), evaluations, 0, [Phase.generate, Phase.shrink])
    except _Late:
        return replace(simplest, cut=True)
    return simplest


class _StillFailsError(AssertionError):
    """Raised for a failing case, which Hypothesis then shrinks."""


class _Late(BaseException):
    """Raised where the time of all searches is over."""


def _size(case: Case) -> tuple[int, ...]:
    """Return what makes a case hard to read, most important first."""
    return (
        case.batch * (case.q_len + case.kv_len),
        len(case.features),
        case.q_heads * (case.head_dim + case.value_width),
        len(case.to_json()),
        case.seed,
    )
