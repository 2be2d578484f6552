"""Shrinking: the simplest case on which the same check of the same subject fails."""

from contextlib import suppress
from itertools import islice

from hypothesis import Phase

from attest.conformance.cases.case import Case
from attest.conformance.checks import all_checks
from attest.conformance.drawing.seeded_draws import try_values
from attest.conformance.drawing.strategies import simpler, smallest
from attest.conformance.judging.trial import Trial
from attest.conformance.record import Result, Verdict
from attest.conformance.running.judge import judge
from attest.conformance.subject import Subject


def shrink(subject: Subject, failing: Result, evaluations: int, stays_of_precision: bool = False) -> Result:
    """Search the simpler cases with at most `evaluations` calls of the kernel; return the simplest's result.

    A failure of semantics stays one of semantics. A failure of precision may become one of semantics on a
    simpler case. `stays_of_precision` prevents that, for a run that also reports a failure of semantics. A
    case that is not sensitive enough to show a defect does not count: it must pass once the kernel is fixed.
    """
    simplest = failing
    known: dict[Case, bool] = {failing.case: True}
    needs_contrast = all_checks()[failing.check].needs_contrast

    def fails(case: Case) -> bool:
        nonlocal simplest
        if case not in known:
            if len(known) > evaluations or subject.why_not(case) is not None:
                return False
            (result,) = judge(subject, case, (failing.check,))
            alike = result.semantic >= failing.semantic and not (stays_of_precision and result.semantic)
            known[case] = (
                alike
                and result.verdict is Verdict.FAIL
                and not (needs_contrast and Trial(subject, case).blind_spots)
            )
            if known[case] and _size(case) < _size(simplest.case):
                simplest = result
        return known[case]

    def search(case: Case) -> None:
        if fails(case):
            raise _StillFailsError

    for case in islice(smallest(failing.case), evaluations // 4):
        if fails(case):
            break
    with suppress(_StillFailsError):
        try_values(search, simpler(simplest.case), evaluations, 0, [Phase.generate, Phase.shrink])
    return simplest


class _StillFailsError(AssertionError):
    """Raised for a failing case, which Hypothesis then shrinks."""


def _size(case: Case) -> tuple[int, ...]:
    """Return what makes a case hard to read, most important first."""
    return (
        case.batch * (case.q_len + case.kv_len),
        len(case.features),
        case.q_heads * (case.head_dim + case.value_width),
        len(case.to_json()),
        case.seed,
    )
