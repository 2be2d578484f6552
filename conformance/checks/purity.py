"""Purity: a call leaves its inputs unchanged and returns plain arrays (S19)."""

from attest.conformance.checks import Check, Finding
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import REPEATED
from attest.conformance.record import Verdict


def _run(trial: Trial) -> Finding:
    modified = trial.plain.modified
    if modified:
        return Finding(Verdict.FAIL, message=f"the call modified its input {', '.join(modified)}")
    return Finding(Verdict.PASS)


CHECKS = (Check("purity", kind=REPEATED, clauses=lambda _trial: ("S19",), run=_run),)
