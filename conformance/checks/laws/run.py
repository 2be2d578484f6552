"""The check of a law: it runs the calls and compares both sides of each equation.

Both sides may differ by the bound of the error model for each. Only bounds are used: the law does not trust
the oracle's answer.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from attest.conformance.checks import Check, Finding
from attest.conformance.checks.laws.calls import repeat_seconds
from attest.conformance.checks.laws.law import Array, Called, Equation, Law, Outputs, Rewrite
from attest.conformance.drawing.strategies import without
from attest.conformance.judging.contrast import has_empty_rows
from attest.conformance.judging.execute import execute
from attest.conformance.judging.measure import measure
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import LAWS
from attest.conformance.record import Measurement, Verdict
from attest.reference.defined import logits_fit
from attest.reference.error_model import Prediction, predict


def check_of(law: Law) -> Check:
    """Return the check `law.NAME`."""
    return Check(
        f"law.{law.name}",
        kind=LAWS,
        clauses=lambda _trial: law.clauses,
        run=partial(_run, law=law),
        applies=law.why_not,
    )


def _run(trial: Trial, law: Law) -> Finding:
    subject = trial.subject
    try:
        # The weights that the subject's own generator drops cannot be predicted for each call of a law.
        case = law.recipe(without(trial.case, {"dropout"}) if trial.own_dropout else trial.case)
    except ValueError as error:
        return Finding(Verdict.INCONCLUSIVE, message=f"the case does not show the law: {error}")
    mine = Trial(subject, case)
    reason = subject.why_not(case) or mine.out_of_range
    if reason is not None:
        return Finding(
            Verdict.INCONCLUSIVE, message=f"the subject does not take the case of the law: {reason}"
        )
    rewrite = law.rewrite(mine)
    if isinstance(rewrite, str):
        return Finding(Verdict.INCONCLUSIVE, message=f"the case does not show the law: {rewrite}")
    for called in rewrite.calls:
        reason = _why_not(mine, law, called)
        if reason is not None:
            return Finding(Verdict.INCONCLUSIVE, message=f"a call of the law is not judged: {reason}")
    outputs: list[Outputs] = []
    start = time.monotonic()
    for called in rewrite.calls:
        if law.exact and len(outputs) > 1 and time.monotonic() - start > repeat_seconds():
            break
        called.before()
        outputs.append(
            execute(subject, called.built, _tiling(mine, called)) if called.run is None else called.run()
        )
    if law.exact:
        return _same_bits(law, outputs)
    if (case.dtype == "float16" or case.family == "huge") and any(map(_overflows, outputs)):
        return Finding(Verdict.INCONCLUSIVE, message="an output is infinite, as one that overflows is")
    return _compared(mine, law, rewrite, outputs)


def _tiling(trial: Trial, called: Called) -> int:
    return trial.case.tiling if called.tiling is None else called.tiling


def _why_not(trial: Trial, law: Law, called: Called) -> str | None:
    """Return why the subject does not promise the results of a call, in one clause; None if it does."""
    subject, problem = trial.subject, (called.clean or called.built).problem
    limits, (least, most) = subject.limits, subject.head_dims
    together = trial.case.features | law.features
    excluded = next((excluded for excluded in limits.excludes if excluded <= together), None)
    if excluded is not None:
        return f"the subject does not combine {' and '.join(sorted(excluded))}"
    if max(problem.q_len, problem.kv_len) > limits.longest:
        return f"the subject takes at most {limits.longest} tokens"
    if problem.q_len % limits.length_multiple or problem.kv_len % limits.length_multiple:
        return f"the subject takes lengths that are multiples of {limits.length_multiple}"
    if (
        not least
        <= min(problem.head_dim, problem.value_dim)
        <= max(problem.head_dim, problem.value_dim)
        <= most
    ):
        return f"the subject takes head dims {least} to {most}"
    if problem.head_dim % limits.head_dim_multiple or problem.value_dim % limits.head_dim_multiple:
        return f"the subject takes head dims that are multiples of {limits.head_dim_multiple}"
    if subject.semantics.empty_rows == "unspecified" and has_empty_rows(problem, subject.semantics):
        return "a row sees no key, and the subject leaves such rows unspecified"
    if not logits_fit(problem, subject.semantics):
        return "a logit may overflow float32 (S1)"
    return None


def _overflows(outputs: Outputs) -> bool:
    return any(np.isinf(array.astype(np.float64)).any() for name, array in outputs.items() if name != "lse")


def _same_bits(law: Law, outputs: Sequence[Outputs]) -> Finding:
    first, *others = outputs
    for number, other in enumerate(others, 1):
        differ = [name for name, array in first.items() if other[name].tobytes() != array.tobytes()]
        if differ:
            message = f"{law.equal}: the bits of {', '.join(differ)} differ in call {number + 1}"
            return Finding(Verdict.FAIL, message=message)
    return Finding(Verdict.PASS)


def _compared(trial: Trial, law: Law, rewrite: Rewrite, outputs: Sequence[Outputs]) -> Finding:
    values = [{name: array.astype(np.float64) for name, array in each.items()} for each in outputs]
    bounds = _bounds(trial, rewrite)
    compared = [
        equation
        for equation in rewrite.equations
        if equation.output in outputs[0]
        and all((equation.source or equation.output) in each for each in outputs[1:])
    ]
    measurements = tuple(
        _measured(trial, equation, outputs[0][equation.output], values, bounds) for equation in compared
    )
    if not measurements:
        return Finding(Verdict.INCONCLUSIVE, message="the subject returns no output that the law compares")
    pairs = zip(compared, measurements, strict=True)
    wrong = dict.fromkeys(f"{each.output}{each.where}" for each, measured in pairs if measured.broken)
    if wrong:
        return Finding(Verdict.FAIL, measurements, f"{law.equal}: {', '.join(wrong)} differ")
    return Finding(Verdict.PASS, measurements)


def _bounds(trial: Trial, rewrite: Rewrite) -> list[Outputs]:
    """Return the bounds of every output of every call."""
    subject, known = trial.subject, dict[tuple[int, int], Outputs]()
    bounds: list[Outputs] = []
    for called in rewrite.calls:
        built, tiling = called.clean or called.built, _tiling(trial, called)
        place = id(built), tiling
        if place not in known:
            numerics = subject.numerics(trial.case.dtype, subject.tilings[tiling])
            predicted = predict(built.problem, subject.semantics, numerics, built.cotangents, repeats=False)
            known[place] = {name: prediction.bound for name, prediction in predicted.items()}
        bounds.append(known[place])
    return bounds


def _measured(
    trial: Trial, equation: Equation, output: Array, values: Sequence[Outputs], bounds: Sequence[Outputs]
) -> Measurement:
    with np.errstate(all="ignore"):
        got, want = equation.left(values, lambda x: x), equation.right(values, lambda x: x)
        bound = equation.left(bounds, np.abs)
        if equation.right_bound is not None:
            bound = bound + equation.right_bound(values, bounds)
        else:
            bound = bound + equation.right(bounds, np.abs)
        zeros = np.zeros_like(bound)
        kept = got.astype(output.dtype)
        given = kept if np.array_equal(kept.astype(np.float64), got, equal_nan=True) else got
    measurement = measure(equation.output, given, want, Prediction(bound, zeros, zeros), trial.case)
    # Without deviations, only the bound is judged.
    return replace(measurement, broken=tuple(name for name in measurement.broken if name == "bound"))
