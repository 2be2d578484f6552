"""`run_conformance_test` and `replay_case`, for the test suites of other projects."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from attest.conformance.judging.failure import explain
from attest.conformance.record import Result, RunRecord
from attest.conformance.running.expectations import load_expectations
from attest.conformance.running.gate import with_policy
from attest.conformance.running.plan import load_profile
from attest.conformance.running.runner import Request, run
from attest.conformance.subject import Subject

# The names of the subjects that were judged in this process.
_judged: set[str] = set()


class SharedProcessWarning(UserWarning):
    """Several subjects were judged in one process, where one that changes NumPy or JAX spoils the others."""


def run_conformance_test(
    subject: Subject, profile: str = "quick", seed: int = 0, expectations: Sequence[Path] = ()
) -> RunRecord:
    """Hold a kernel to everything that it declares, in this process.

    profile: "quick", "standard" or "nightly". expectations: TOML files or folders of expected failures.
    Raises AssertionError that explains the simplest failing case of each check, and ValueError for an
    unknown profile or a broken file of expectations. Warns with SharedProcessWarning if another subject was
    judged in this process before. Returns the record of what was judged.
    """
    record = conformance_record(subject, profile, seed, expectations)
    if record.status == "fail":
        failures = failures_by_check(record).values()
        raise AssertionError("\n\n".join([f"{subject.name} does not conform", *failures, *record.problems]))
    return record


def conformance_record(
    subject: Subject, profile: str = "quick", seed: int = 0, expectations: Sequence[Path] = ()
) -> RunRecord:
    """Return the record behind `run_conformance_test`, which does not raise for a kernel that fails."""
    if not isinstance(subject, Subject):  # type: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise TypeError(f"subject: got {type(subject).__name__}, expected an attest.Subject")
    _warn_if_shared(subject)
    known = load_expectations(expectations)
    request = Request({subject.name: subject}, load_profile(profile), seed, expectations=known)
    record = run(request)
    if not record.complete:  # Ctrl-C ends the whole suite, not this test
        raise KeyboardInterrupt
    return with_policy(record, known)


def _warn_if_shared(subject: Subject) -> None:
    """Warn if this process has run another subject, and remember that it has run this one."""
    warning = remember_judged(subject)
    if warning is not None:
        warnings.warn(warning, skip_file_prefixes=(str(Path(__file__).parent),))


def remember_judged(subject: Subject) -> SharedProcessWarning | None:
    """Remember that this process runs a subject; return the warning if it has run another one before."""
    others = sorted(_judged - {subject.name})
    _judged.add(subject.name)
    if not others:
        return None
    return SharedProcessWarning(
        f"{subject.name} is judged in a process that has run {', '.join(others)}: what another subject"
        " changes in NumPy or JAX counts as its failure. Give each its own process, as `attest` does"
    )


def was_judged(subject: Subject) -> bool:
    """Return whether this process has run a subject of this name."""
    return subject.name in _judged


def failures_by_check(record: RunRecord) -> Mapping[str, str]:
    """Return the explanation of the simplest case of each check with a red verdict."""
    shown: dict[str, Result] = {}
    for result in sorted(record.results, key=lambda result: (not result.minimal, result.sort_key)):
        if result.verdict.red:
            shown.setdefault(result.check, result)
    return {check: explain(result, python_replay(result)) for check, result in sorted(shown.items())}


def python_replay(result: Result) -> str:
    """Return a replay in Python: a test suite's subject is seldom known by name to another process."""
    case = json.dumps(result.case.to_json(), sort_keys=True)
    return f"replay_case(subject, {result.check!r}, {case!r})  # from attest.conformance import replay_case"


def replay_case(subject: Subject, check: str, case: str) -> Result:
    """Run one case again, given as JSON; print and return the verdict."""
    from attest.conformance.cases.case import case_from_json
    from attest.conformance.running.judge import judge

    _warn_if_shared(subject)
    (result,) = judge(subject, case_from_json(json.loads(case)), (check,))
    print(explain(result, python_replay(result)))
    return result
