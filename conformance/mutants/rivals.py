"""Judges mutants of the clean kernel by the rules that other test suites use, on the same cases.

A rule compares out, lse and the gradients of a case with the exact answer of the oracle. Most test suites
have only an approximate answer to compare with, so the rules do better here than there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.conformance.cases.case import Case
from attest.conformance.judging.trial import Trial
from attest.conformance.mutants.catalogue import Mutant
from attest.conformance.mutants.clean_kernel import Planted, planted_kernel
from attest.conformance.mutants.clean_score import Judge, drawn

# Each rule by name; those of the last kind need the errors of a correct kernel.
RULES = (
    "allclose, rtol and atol 1e-2",
    "allclose, rtol and atol 1e-3",
    "allclose, the smallest tolerance of each dtype that no correct rewrite exceeds",
    "99 % of elements within 1e-2",
    "torch.testing.assert_close, its defaults",
    "at most twice the largest error of a correct kernel",
    "at most three times the largest error of a correct kernel",
)
# rtol and atol of torch.testing.assert_close: docs.pytorch.org/docs/stable/testing.html.
_TORCH = {"float32": (1.3e-6, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float16": (1e-3, 1e-5)}
_WITHIN = 0.99
# The checks that compare answers with the oracle's.
_ANSWERS = frozenset({"forward", "lse", "gradients", "poison"})


@dataclass(frozen=True)
class RivalScore:
    """The rules of `RULES` that a mutant breaks on some case of the profile and seed."""

    name: str
    null: bool
    killed_by: frozenset[str]


@dataclass(frozen=True)
class Errors:
    """The errors of one case, over all its outputs.

    closest: the smallest t for which allclose(rtol=t, atol=t) passes. share: the elements within 1e-2, the
    least of all outputs. torch: whether assert_close passes. largest: of each output.
    """

    dtype: str
    closest: float
    share: float
    torch: bool
    largest: Mapping[str, float]


def errors(answer: Mapping[str, Any], exact: Mapping[str, NDArray[np.float64]], dtype: str) -> Errors:
    """Return the errors of a case. A NaN or an infinity where none belongs is an infinite error."""
    closest, share, torch, largest = 0.0, 1.0, True, dict[str, float]()
    rtol, atol = _TORCH[dtype]
    for name, want in exact.items():
        got = np.asarray(answer[name], np.float64)
        if got.shape != want.shape:
            return Errors(dtype, np.inf, 0.0, False, dict.fromkeys(exact, np.inf))
        if got.size == 0:
            continue
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        with np.errstate(invalid="ignore"):
            error = np.where(same, 0.0, np.abs(got - want))
        error = np.where(np.isnan(error), np.inf, error)
        size = np.where(np.isfinite(want), np.abs(want), 0.0)
        relative = error / (1.0 + size)
        closest = max(closest, float(relative.max()))
        share = min(share, float((relative <= 1e-2).mean()))
        torch = torch and bool((error <= atol + rtol * size).all())
        largest[name] = float(error.max())
    return Errors(dtype, closest, share, torch, largest)


def broken(found: Errors, clean: Errors, thresholds: Mapping[str, float]) -> frozenset[str]:
    """Return the rules that a case breaks.

    clean: the errors of the correct kernel on it. thresholds: the tolerance of each dtype that no correct
    rewrite exceeds.
    """

    def beyond(times: float) -> bool:
        return any(error > times * clean.largest[name] for name, error in found.largest.items())

    breaks = (
        found.closest > 1e-2,
        found.closest > 1e-3,
        found.closest > thresholds[found.dtype],
        found.share < _WITHIN,
        not found.torch,
        beyond(2.0),
        beyond(3.0),
    )
    return frozenset(rule for rule, broke in zip(RULES, breaks, strict=True) if broke)


class RivalJudge:
    """Judges mutants by every rule; keeps the exact answers and the errors of correct kernels."""

    def __init__(self, profile: str, seed: int, thresholds: Mapping[str, float]) -> None:
        self._judge = Judge()
        self._profile, self._seed = profile, seed
        self._exact: dict[str, Mapping[str, NDArray[np.float64]]] = {}
        self._clean: dict[tuple[str, str], Errors] = {}
        self._thresholds = thresholds

    def closest(self, null: Mutant) -> dict[str, float]:
        """Return the smallest tolerance of each dtype with which allclose passes a correct rewrite."""
        found = dict.fromkeys(_TORCH, 0.0)
        with planted_kernel(null) as kernel:
            for case in self._cases(null):
                of_case = self._errors(kernel, case)
                found[of_case.dtype] = max(found[of_case.dtype], of_case.closest)
        return found

    def score(self, mutant: Mutant) -> RivalScore | None:
        """Return the rules that a mutant breaks; None for one that does not run in NumPy."""
        killed_by: frozenset[str] = frozenset()
        with planted_kernel(mutant) as kernel:
            if kernel.answer is None:
                return None
            for case in self._cases(mutant):
                if len(killed_by) == len(RULES):
                    break
                # A rule that fails the clean kernel itself fails correct rewrites with the same bits.
                if mutant.null or self._judge.shows(mutant, kernel, case):
                    clean = self._of_clean(mutant.variant, case)
                    killed_by |= broken(self._errors(kernel, case), clean, self._thresholds)
        return RivalScore(mutant.name, mutant.null, killed_by)

    def _cases(self, mutant: Mutant) -> Iterable[Case]:
        for case, checks in drawn(mutant, self._profile, self._seed):
            if _ANSWERS & set(checks):
                yield case

    def _of_clean(self, variant: str, case: Case) -> Errors:
        key = (variant, case.id)
        if key not in self._clean:
            self._clean[key] = self._errors(self._judge.clean(variant), case)
        return self._clean[key]

    def _errors(self, kernel: Planted, case: Case) -> Errors:
        assert kernel.answer is not None
        trial = Trial(kernel.subject, case)
        if case.id not in self._exact:
            self._exact[case.id] = trial.answer.items()
        exact = self._exact[case.id]
        try:
            answer = kernel.answer(trial.built)
        except Exception:  # whatever a defect makes the kernel raise
            return Errors(case.dtype, np.inf, 0.0, False, dict.fromkeys(exact, np.inf))
        return errors(answer, exact, case.dtype)
