"""Determinism: the same inputs give bit-identical results (S17)."""

from attest.conformance.checks import Check, Finding
from attest.conformance.judging.execute import execute
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import DRAWN
from attest.conformance.record import Verdict
from attest.conformance.subject import Subject


def _run(trial: Trial) -> Finding:
    again = execute(trial.subject, trial.built, trial.case.tiling)
    changed = [name for name, array in trial.outputs.items() if array.tobytes() != again[name].tobytes()]
    if changed:
        return Finding(Verdict.FAIL, message=f"a second run of the same call changed {', '.join(changed)}")
    return Finding(Verdict.PASS)


def _applies(subject: Subject) -> str | None:
    return None if subject.semantics.deterministic else "declares that it is not deterministic"


CHECKS = (Check("determinism", kind=DRAWN, clauses=lambda _trial: ("S17",), run=_run, applies=_applies),)
