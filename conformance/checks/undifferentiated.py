"""Plain calls: out and lse are the oracle's where nothing is differentiated, too (S22).

Every other check differentiates; a kernel with a derivative of its own has a forward pass for each.
"""

from attest.conformance.checks import Check, Finding, held_to_oracle
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import REPEATED
from attest.conformance.record import Verdict


def _run(trial: Trial) -> Finding:
    finding = held_to_oracle(trial, trial.plain.outputs, ("out", "lse"))
    if finding.verdict is not Verdict.FAIL:
        return finding
    if held_to_oracle(trial, trial.outputs, ("out", "lse")).verdict is Verdict.PASS:
        return Finding(
            Verdict.FAIL,
            finding.measurements,
            f"without differentiation alone, {finding.message}",
            ("S22",),
        )
    return finding


CHECKS = (
    Check(
        "undifferentiated",
        kind=REPEATED,
        clauses=lambda _trial: ("S1", "S13", "S22"),
        run=_run,
        needs_contrast=True,
    ),
)
