"""Poison: NaN stored in hidden places reaches no result (S4).

The case runs twice: with NaN and inf stored under masks and past lengths, and with ordinary values there.
Every output and every gradient must be equal, including those of the poisoned places.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.conformance.checks import Check, Finding
from attest.conformance.judging.execute import call_of
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import POISONED
from attest.conformance.record import Verdict
from attest.conformance.subject import Subject

_LEAK = "NaN and inf stored in hidden places changed"
_REMEDY = (
    "if the kernel is meant to multiply hidden values by 0,"
    ' declare semantics=Semantics(hidden_nonfinite="leaks")'
)


def _run(trial: Trial) -> Finding:
    poisoned, clean = (Trial(trial.subject, replace(trial.case, poison=poison)) for poison in (True, False))
    leaked = [name for name, array in poisoned.outputs.items() if not _same(array, clean.outputs[name])]
    if leaked:
        return Finding(Verdict.FAIL, message=f"{_LEAK} {', '.join(leaked)}\n{_REMEDY}")
    if not _stored(poisoned, clean):
        return Finding(Verdict.INCONCLUSIVE, message="the case hides nothing: no place for poison")
    return Finding(Verdict.PASS)


def _stored(poisoned: Trial, clean: Trial) -> bool:
    """Return whether there is poison anywhere."""
    arrays, others = (call_of(each.built).arrays for each in (poisoned, clean))
    return any(not _same(array, others[name]) for name, array in arrays.items())


def _same(poisoned: NDArray[Any], clean: NDArray[Any]) -> bool:
    return np.array_equal(poisoned.astype(np.float64), clean.astype(np.float64), equal_nan=True)


def _applies(subject: Subject) -> str | None:
    return "declares that NaN leaks" if subject.semantics.hidden_nonfinite == "leaks" else None


CHECKS = (Check("poison", POISONED, lambda _trial: ("S4",), _run, _applies),)
