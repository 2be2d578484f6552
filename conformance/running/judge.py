"""Judging one subject on one case: one Result for each check, even if the check raises."""

import time
from collections.abc import Sequence
from dataclasses import replace

from attest.conformance.cases.case import Case
from attest.conformance.checks import Check, Finding, all_checks, unknown_check
from attest.conformance.judging.execute import SubjectError
from attest.conformance.judging.trial import Trial
from attest.conformance.process.phases import checking
from attest.conformance.process.signals import Interrupted
from attest.conformance.record import Result, Verdict
from attest.conformance.running.results import result_of
from attest.conformance.subject import Subject
from attest.conformance.text import exception_text
from attest.conformance.user_frames import raised


def judge(subject: Subject, case: Case, checks: Sequence[str]) -> list[Result]:
    """Run checks on one case. An exception of the subject is a FAIL, one of the harness an ERROR.

    Raises LookupError for a check that does not exist.
    """
    return judge_trial(Trial(subject, case), checks)


def judge_trial(trial: Trial, checks: Sequence[str]) -> list[Result]:
    """Run checks on a trial, which keeps what they computed. Raises LookupError as `judge` does."""
    known = all_checks()
    unknown = [name for name in checks if name not in known]
    if unknown:
        raise LookupError(unknown_check(unknown[0]))
    return [_judge_one(trial, known[name]) for name in checks]


def _judge_one(trial: Trial, check: Check) -> Result:
    began = time.perf_counter()
    try:
        with checking(check.name):
            clauses = check.clauses(trial)
            finding = _finding(trial, check)
    except Exception as error:  # a fault of the harness, which must not end the run
        finding = Finding(Verdict.ERROR, message=f"the check itself raised {exception_text(error)}")
        clauses = ()
    except Interrupted:
        raise
    except (
        BaseException
    ) as error:  # such as SystemExit, which the harness never raises: it must not end the run
        clauses, finding = (), Finding(Verdict.FAIL, message=raised(error))
    result = result_of(trial.subject, check.name, trial.case, finding, clauses)
    return replace(result, seconds=round(time.perf_counter() - began, 3))


def _finding(trial: Trial, check: Check) -> Finding:
    unsupported = (
        trial.subject.why_not(trial.case) or check.applies(trial.subject) or _unspecified(trial, check)
    )
    if unsupported is not None:
        return Finding(Verdict.UNSUPPORTED, message=unsupported)
    undefined = _undefined(trial, check)
    if undefined is not None:
        return Finding(Verdict.INCONCLUSIVE, message=undefined)
    try:
        finding = check.run(trial)
    except SubjectError as error:
        return Finding(Verdict.FAIL, message=str(error), clauses=error.clauses)
    if finding.verdict is Verdict.PASS and check.needs_contrast and trial.blind_spots:
        return Finding(
            Verdict.INCONCLUSIVE,
            finding.measurements,
            f"the case cannot distinguish a kernel without {', '.join(trial.blind_spots)} from a correct one",
        )
    return finding


def _undefined(trial: Trial, check: Check) -> str | None:
    """Return why the results of a case are undefined (S1), in one clause; None if they are defined."""
    if trial.out_of_range is not None:
        return trial.out_of_range
    # Listed cases may be large, and their values are known to fit.
    if not check.kind.listed and trial.overflows:
        return "the logit of a visible pair, or the products in it, may overflow float32 (S1)"
    return None


def _unspecified(trial: Trial, check: Check) -> str | None:
    """Return why the results of a case are unspecified (S10); None for listed cases, which may be large."""
    if check.kind.listed or not trial.unspecified:
        return None
    return "declares that rows which see no key are unspecified, and the case has some"
