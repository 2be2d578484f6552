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

from attest.conformance.judging.failure import OUTSIDE
from attest.conformance.judging.measure import beyond_precision, measure
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import Kind
from attest.conformance.record import Measurement, Verdict
from attest.conformance.subject import Subject
from attest.conformance.text import nearest


@dataclass(frozen=True)
class Finding:
    """The finding of a check: PASS, FAIL or UNSUPPORTED, with numbers and a sentence where there are any.

    clauses: the broken clauses, if they are not those that the check tests.
    """

    verdict: Verdict
    measurements: tuple[Measurement, ...] = ()
    message: str = ""
    clauses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """One property.

    kind: how cases are chosen for it, one of conformance/kinds.py.
    clauses: the clauses that it tests on a case.
    applies: None, or the reason why the check does not apply to a subject.
    run: judges a trial; a SubjectError that it raises is a FAIL.
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


def unknown_check(name: str) -> str:
    """Return the sentence about the name of a check that does not exist."""
    known = sorted(all_checks())
    families = dict.fromkeys(check.partition(".")[0] for check in known)
    every = ", ".join(family if family in known else f"{family}.*" for family in families)
    return f"unknown check {name!r}: {nearest(name, known, f'known are {every}')}"


def held_to_oracle(trial: Trial, outputs: Mapping[str, NDArray[Any]], names: Iterable[str]) -> Finding:
    """Judge those of `names` that both the outputs and the oracle have: PASS if no judgement is broken."""
    wanted = trial.answer.items()
    return judged(
        tuple(
            _measured(trial, name, outputs[name], wanted[name])
            for name in names
            if name in outputs and name in wanted
        )
    )


def _measured(trial: Trial, name: str, got: NDArray[Any], want: NDArray[np.float64]) -> Measurement:
    """Measure one output, with repeated roundings where independent ones do not explain its errors.

    Their prediction takes fifteen times as long. It leaves the bound as it is, so that an output outside of
    the bound fails without it; its other judgements are then those of independent roundings.
    """
    measurement = measure(name, got, want, trial.predictions[name], trial.case)
    if not measurement.broken:
        return measurement
    if "bound" not in measurement.broken:
        measurement = measure(name, got, want, trial.repeated_predictions[name], trial.case)
    if measurement.broken and beyond_precision(got, want, trial.coarse_predictions[name]):
        measurement = replace(measurement, broken=(*measurement.broken, "semantics"))
    return measurement


def judged(measurements: tuple[Measurement, ...]) -> Finding:
    """Return PASS if no judgement is broken, or a FAIL that names the broken ones."""
    wrong = [f"{m.output} ({', '.join(m.broken)})" for m in measurements if m.broken]
    verdict = Verdict.FAIL if wrong else Verdict.PASS
    return Finding(verdict, measurements, f"{OUTSIDE}: {', '.join(wrong)}" if wrong else "")
