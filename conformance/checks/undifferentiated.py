"""Plain calls: out and lse agree with the oracle's also without differentiation (S22).

Every other check differentiates. A kernel with its own derivative has a second forward pass for that.
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
            f"only without differentiation: {finding.message}",
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
