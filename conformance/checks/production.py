"""Accuracy at production size, in a sample of the rows and keys."""

from dataclasses import replace

from attest.conformance.checks import Check, Finding, judged
from attest.conformance.checks.accuracy import feature_clauses
from attest.conformance.drawing.production import SampledProblem, build_sampled
from attest.conformance.judging.execute import SubjectError, execute
from attest.conformance.judging.measure import measure
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import PRODUCTION
from attest.conformance.record import Measurement, Verdict

# Stray rows that a message names.
_NAMED = 3


def _run(trial: Trial) -> Finding:
    subject = trial.subject
    if trial.own_dropout:
        return Finding(Verdict.INCONCLUSIVE, message="which weights are dropped is not known at this size")
    sampled = build_sampled(trial.case, subject.returns_lse)
    outputs = execute(subject, sampled.built, trial.case.tiling)
    answer, predictions = sampled.truth(subject.semantics, trial.numerics)
    parts, wanted = sampled.part(outputs), answer.items()
    for name in wanted:
        if name not in parts and (name != "lse" or subject.returns_lse):
            raise SubjectError(f"returned no {name}")
    finding = judged(
        tuple(
            _placed(sampled, measure(name, parts[name], wanted[name], predictions[name], trial.case))
            for name in parts
            if name in wanted
        )
    )
    stray = sampled.stray_rows(outputs["dquery"]) if "dquery" in outputs else []
    if not stray:
        return finding
    shown = ", ".join(str(row) for row in stray[:_NAMED])
    message = f"dquery is not 0 in {len(stray)} rows whose cotangents are 0, such as (batch, row) {shown}"
    return Finding(Verdict.FAIL, finding.measurements, "; ".join(filter(None, (message, finding.message))))


def _placed(sampled: SampledProblem, measurement: Measurement) -> Measurement:
    """Return the measurement with the index of its worst element in the whole output.

    The other places are left out: they count rows of the sample.
    """
    worst = measurement.worst
    if worst is not None:
        worst = replace(worst, index=sampled.place(measurement.output, worst.index))
    return replace(measurement, worst=worst, where=(), fingerprints=())


CHECKS = (
    Check(
        "production",
        kind=PRODUCTION,
        clauses=lambda trial: feature_clauses(trial, ("S1", "S13", "S14", "S16")),
        run=_run,
    ),
)
