"""Results: the findings of checks, workers and searches, in the form of records."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from attest.conformance.cases.case import Case
from attest.conformance.checks import Finding, all_checks
from attest.conformance.judging.trial import Trial
from attest.conformance.record import Result, Verdict
from attest.conformance.running.expectations import Expectation, expect
from attest.conformance.subject import Subject


def result_of(
    subject: Subject, check: str, case: Case, finding: Finding, clauses: tuple[str, ...], phase: str = ""
) -> Result:
    """Return the result of a check on a case; `clauses` count if the finding names none."""
    return Result(
        subject=subject.name,
        check=check,
        clauses=finding.clauses or clauses,
        case=case,
        verdict=finding.verdict,
        measurements=finding.measurements,
        message=finding.message,
        phase=phase,
        several_blocks=finding.verdict.red and _several_blocks(subject, case),
    )


def late(
    subject: Subject, checks: Sequence[str], case: Case, fault: str, phase: str, check: str
) -> list[Result]:
    """Return the one TIMEOUT of a case that ran out of time in `check`, or in the first one if unknown."""
    check = check if check in checks else checks[0]
    left_out = [name for name in checks if name != check]
    rest = f"; {', '.join(left_out)} not judged on this case" if left_out else ""
    finding = Finding(Verdict.TIMEOUT, message=f"{fault}, in the phase {phase}{rest}")
    return [result_of(subject, check, case, finding, _clauses(subject, check, case), phase)]


def died(subject: Subject, checks: Sequence[str], case: Case, fault: str, phase: str) -> list[Result]:
    """Return the FAILs of a case whose process died or raised, one for every check.

    Which check killed the process is not known for sure: an earlier one may have.
    """
    finding = Finding(Verdict.FAIL, message=fault)
    return [
        result_of(subject, check, case, finding, _clauses(subject, check, case), phase) for check in checks
    ]


def lost(subject: Subject, checks: Sequence[str], case: Case, fault: str) -> list[Result]:
    """Return the ERRORs of a case whose worker was lost with it, one for every check."""
    finding = Finding(Verdict.ERROR, message=fault)
    return [result_of(subject, check, case, finding, _clauses(subject, check, case)) for check in checks]


def simplest(failing: Result, found: Result) -> Result:
    """Return the result of a search for a simpler failing case, as the minimal result of the failing one."""
    return replace(found, subject=failing.subject, minimal=True, shrunk_from=failing.case.id)


def new_minimal(failing: Result, found: Result, expectations: Iterable[Expectation]) -> Result | None:
    """Return the minimal result of a failing one; None if the search has found nothing to show for it.

    The clock may have ended it where it began. A simpler case that is an expected failure does not show a new
    one.
    """
    if found.cut and found.case == failing.case:
        return None
    minimal = simplest(failing, found)
    return minimal if expect(minimal, expectations).verdict is Verdict.FAIL else None


def late_search(failing: Result, fault: str) -> Result:
    """Return the TIMEOUT of a search for a simpler failing case."""
    return replace(
        failing,
        verdict=Verdict.TIMEOUT,
        measurements=(),
        message=f"{fault}, in the phase shrinking: a simpler case may hang; the failing case is kept",
        phase="shrinking",
        shrunk_from=failing.case.id,
    )


def _several_blocks(subject: Subject, case: Case) -> bool:
    """Return whether the tiling of a case cuts queries or keys, and each that it cuts into two or more."""
    if case.tiling >= len(subject.tilings):
        return False
    tiling = subject.tilings[case.tiling]
    sides = ((case.q_len, tiling.query_block), (case.kv_len, tiling.key_block))
    cut = [length > block for length, block in sides if block is not None]
    return bool(cut) and all(cut)


def _clauses(subject: Subject, check: str, case: Case) -> tuple[str, ...]:
    try:
        return all_checks()[check].clauses(Trial(subject, case))
    except Exception:  # the failure itself is reported already
        return ()
