"""Options: no call is answered with the options of a call before it (S19).

A kernel that keeps compiled programs and finds them by the shapes of their arrays alone would do that.
"""

from collections.abc import Iterator
from dataclasses import replace

from attest.conformance.cases.case import Case
from attest.conformance.checks import Check, Finding, held_to_oracle
from attest.conformance.drawing.recipes import model
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import TRANSFORMED
from attest.conformance.record import Verdict

_KEPT = "the options of a call before it, of the same shapes, were used in a call"
_ANOTHER_SCALE = 0.37  # no default scale: that of a head dim of 7.3


def _run(trial: Trial) -> Finding:
    """Call with the options of the case, then with each one changed; see whose options were used."""
    _ = trial.plain  # the call before all others
    tried = 0
    for words, case in _others(trial.case):
        if trial.subject.why_not(case) is None and model().completed(case.features) == case.features:
            tried += 1
            other = Trial(trial.subject, case)
            outputs = other.plain.outputs
            finding = held_to_oracle(other, outputs, ("out",))
            # A kernel that is wrong in another way is not right for the options of the case.
            if (
                finding.verdict is Verdict.FAIL
                and held_to_oracle(trial, outputs, ("out",)).verdict is Verdict.PASS
            ):
                return replace(finding, message=f"{_KEPT} {words}: {finding.message}")
    if not tried:
        return Finding(
            Verdict.INCONCLUSIVE, message="the subject takes no other option than those of the case"
        )
    return Finding(Verdict.PASS)


def _others(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield the case with one option changed, in words; its arrays have the same shapes."""
    yield "with another scale", replace(case, scale=_ANOTHER_SCALE if case.scale is None else None)
    yield (
        "with causal order" if not case.causal else "without causal order",
        replace(case, causal=not case.causal),
    )
    if case.window is not None:
        yield "without its window", replace(case, window=None)
    if case.soft_cap is not None:
        yield "with twice the soft cap", replace(case, soft_cap=2 * case.soft_cap)


CHECKS = (Check("options", kind=TRANSFORMED, clauses=lambda _trial: ("S19",), run=_run),)
