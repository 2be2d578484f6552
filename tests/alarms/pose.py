"""Poses one case to several correct kernels, which share its arrays, its exact answer and its contrast."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from conformance.judge import judge_trial
from conformance.plan import Profile, Task, tasks
from conformance.record import Result
from conformance.subject import Subject
from conformance.trial import Trial


def drawn_tasks(subject: Subject, profile: Profile, seed: int, stop: Any) -> list[Task]:
    """The tasks of a subject; none if the run is to stop before they are drawn."""
    drawn: list[Task] = []
    for task in tasks(subject, profile, seed):
        if stop.is_set():
            return []
        drawn += task.apart()
    return drawn


def judge_together(subjects: Sequence[Subject], task: Task) -> Iterator[tuple[Subject, list[Result]]]:
    """Each subject's results on a task, with a tiling of its own."""
    first: Trial | None = None
    for subject in subjects:
        case = replace(task.case, tiling=task.case.tiling % len(subject.tilings))
        if subject.why_not(case) is not None:
            continue
        trial = Trial(subject, case)
        if first is not None and subject.semantics == first.subject.semantics:
            # What the case is does not depend on who is asked.
            shared = {name: first.__dict__[name] for name in _SHARED if name in first.__dict__}
            trial.__dict__.update(shared)
        yield subject, judge_trial(trial, task.checks)
        first = first or trial


# Of a Trial: those of its properties that all subjects of the same semantics have in common. Whether a case
# can tell right from wrong depends on the declared arithmetic too, and is asked for the first subject alone.
_SHARED = ("built", "answer", "blind_spots")


def drop_caches() -> None:
    """Free the compiled programs of this process."""
    jax.clear_caches()
