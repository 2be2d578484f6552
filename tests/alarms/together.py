"""Poses one case to several correct kernels, which share its arrays, its exact answer and its contrast."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax

from attest.conformance.cases.case import Case
from attest.conformance.judging.trial import Trial
from attest.conformance.record import Result
from attest.conformance.running.judge import judge_trial
from attest.conformance.subject import Subject


def judge_together(
    subjects: Sequence[Subject], asked_case: Case, checks: Sequence[str]
) -> Iterator[tuple[Subject, list[Result]]]:
    """Each subject's results on a case, with a tiling of its own."""
    asked: list[Trial] = []
    for subject in subjects:
        case = replace(asked_case, tiling=asked_case.tiling % len(subject.tilings))
        if subject.why_not(case) is not None:
            continue
        trial = Trial(subject, case)
        for other in asked:
            if subject.semantics == other.subject.semantics:
                names = _OF_CASE + (_OF_NUMERICS if trial.numerics == other.numerics else ())
                trial.__dict__.update(
                    {name: other.__dict__[name] for name in names if name in other.__dict__}
                )
        yield subject, judge_trial(trial, checks)
        asked.append(trial)


# What trials of subjects of the same semantics have in common. Whether a case can tell right from wrong
# depends on the declared arithmetic too, and is asked for the first subject alone.
_OF_CASE = ("built", "answer", "blind_spots")
# What they have in common if they declare the same arithmetic, too.
_OF_NUMERICS = ("predictions", "repeated_predictions", "coarse_predictions")


def drop_caches() -> None:
    """Free the compiled programs of this process."""
    jax.clear_caches()
