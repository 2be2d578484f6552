"""Which failing case is shown: the simplest one on which the same check of the same subject fails."""

from contextlib import suppress
from dataclasses import replace

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from conformance.case import Case
from conformance.judge import judge
from conformance.record import Result, Verdict
from conformance.strategies import simpler
from conformance.subject import Subject


def shrink(subject: Subject, failing: Result, evaluations: int) -> Result:
    """Search the simpler cases with at most `evaluations` calls of the kernel; minimal=True on the result."""
    simplest = failing
    known: dict[Case, bool] = {failing.case: True}

    def fails(case: Case) -> bool:
        nonlocal simplest
        if case not in known:
            if len(known) > evaluations or subject.why_not(case) is not None:
                return False
            (result,) = judge(subject, case, (failing.check,))
            known[case] = result.verdict is Verdict.FAIL
            if known[case] and _size(case) < _size(simplest.case):
                simplest = result
        return known[case]

    @seeded(0)
    @settings(
        max_examples=evaluations,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large),
    )
    @given(simpler(failing.case))
    def search(case: Case) -> None:
        if fails(case):
            raise _StillFailsError

    with suppress(_StillFailsError):
        search()
    return replace(simplest, minimal=True)


class _StillFailsError(AssertionError):
    """A failing case: what Hypothesis shrinks towards simplicity."""


def _size(case: Case) -> tuple[int, ...]:
    """What makes a case hard to read, most important first."""
    return (
        case.batch * (case.q_len + case.kv_len),
        len(case.features),
        case.q_heads * (case.head_dim + case.value_width),
        len(case.to_json()),
        case.seed,
    )
