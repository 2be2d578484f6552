"""Accuracy: out, lse and the gradients agree with the oracle's within the declared error."""

from attest.conformance.cases.features import ALL_FEATURES
from attest.conformance.checks import Check, Finding, held_to_oracle
from attest.conformance.judging.execute import SubjectError
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import DRAWN
from attest.conformance.record import Verdict
from attest.conformance.subject import Subject

# Outputs that are judged together, and the clauses that they test besides those of the case's features.
_FORWARD = (("out",), ("S1", "S16"))
_LSE = (("lse",), ("S13",))
_GRADIENTS = (("dquery", "dkey", "dvalue", "dbias", "dsoftmax_aux"), ("S14",))


def feature_clauses(trial: Trial, always: tuple[str, ...]) -> tuple[str, ...]:
    """Return `always`, then the clauses of the features that the case switches on."""
    case = trial.case
    clauses = [*always, *(ALL_FEATURES[name].clause for name in sorted(case.features))]
    if case.empty_rows or case.kv_len < case.q_len:
        clauses.append("S10")
    if case.poison:
        clauses.append("S4")
    if len(trial.subject.tilings) > 1:
        clauses.append("S18")
    return tuple(dict.fromkeys(clauses))


def _right_plainly(trial: Trial, outputs: tuple[str, ...]) -> bool:
    """Return whether the same call without differentiation is right."""
    try:
        return held_to_oracle(trial, trial.plain.outputs, outputs).verdict is Verdict.PASS
    except SubjectError:
        return False


def _check(name: str, group: tuple[tuple[str, ...], tuple[str, ...]]) -> Check:
    outputs, always = group

    def run(trial: Trial) -> Finding:
        finding = held_to_oracle(trial, trial.outputs, outputs)
        if finding.verdict is Verdict.FAIL and name != "gradients" and _right_plainly(trial, outputs):
            message = f"only under differentiation: {finding.message}"
            return Finding(Verdict.FAIL, finding.measurements, message, ("S22",))
        return finding

    def applies(subject: Subject) -> str | None:
        if name == "lse" and not subject.returns_lse:
            return "does not return lse"
        if name == "gradients" and not subject.semantics.gradients:
            return "declares no gradients"
        return None

    return Check(
        name=name,
        kind=DRAWN,
        clauses=lambda trial: feature_clauses(trial, always),
        run=run,
        applies=applies,
        needs_contrast=True,
    )


CHECKS = (_check("forward", _FORWARD), _check("lse", _LSE), _check("gradients", _GRADIENTS))
