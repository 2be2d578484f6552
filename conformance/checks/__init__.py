"""The checks: one module for each property, each with a tuple CHECKS.

A check is a plain record. To add one, add a module here; nothing else lists them.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.conformance.judging.measure import beyond_precision, measure
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import Kind
from attest.conformance.record import Measurement, Verdict
from attest.conformance.subject import Subject


@dataclass(frozen=True)
class Finding:
    """What a check found: PASS, FAIL or UNSUPPORTED, with numbers and a sentence where there are any.

    clauses: what was broken, where it is not what the check tests.
    """

    verdict: Verdict
    measurements: tuple[Measurement, ...] = ()
    message: str = ""
    clauses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """One property.

    kind: how cases are chosen for it, one of conformance/kinds.py.
    clauses: what it tests on a case. applies: None, or why the subject is not held to it.
    run: judges; may raise SubjectError, which is a FAIL.
    needs_contrast: a PASS counts only if the case is sensitive enough to show a defect.
    """

    name: str
    kind: Kind
    clauses: Callable[[Trial], tuple[str, ...]]
    run: Callable[[Trial], Finding]
    applies: Callable[[Subject], str | None] = lambda _subject: None
    needs_contrast: bool = False


@cache
def all_checks() -> dict[str, Check]:
    """Return every check by name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {check.name: check for module in modules for check in module.CHECKS}


def held_to_oracle(trial: Trial, outputs: Mapping[str, NDArray[Any]], names: Iterable[str]) -> Finding:
    """Measure those of `names` that are among the outputs and the oracle's: PASS if no judgement broke."""
    wanted = trial.answer.items()
    return judged(
        tuple(
            _measured(trial, name, outputs[name], wanted[name])
            for name in names
            if name in outputs and name in wanted
        )
    )


def _measured(trial: Trial, name: str, got: NDArray[Any], want: NDArray[np.float64]) -> Measurement:
    """Measure one output; what independent roundings do not explain is measured with repeated ones."""
    measurement = measure(name, got, want, trial.predictions[name], trial.case)
    if set(measurement.broken) - {"bound"}:
        measurement = measure(name, got, want, trial.repeated_predictions[name], trial.case)
    if measurement.broken and beyond_precision(got, want, trial.coarse_predictions[name]):
        measurement = replace(measurement, broken=(*measurement.broken, "semantics"))
    return measurement


def judged(measurements: tuple[Measurement, ...]) -> Finding:
    """Return PASS if no judgement broke, or a FAIL that names those that did."""
    wrong = [f"{m.output} ({', '.join(m.broken)})" for m in measurements if m.broken]
    verdict = Verdict.FAIL if wrong else Verdict.PASS
    return Finding(verdict, measurements, f"outside the error model: {', '.join(wrong)}" if wrong else "")
