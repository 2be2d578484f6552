"""The calls of a run: a draw and the correct kernels that it is given to, judged in any process.

Draws of one task stay together, since they share what is compiled. Groups of subjects take turns.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from attest.conformance.process.pool import Job, Outcome
from attest.conformance.record import Verdict
from attest.conformance.running.choice import Draw, chosen
from attest.conformance.running.environment import environment
from attest.conformance.running.plan import Profile, Task, tasks
from attest.conformance.subject import Subject
from tests.alarms.subjects import everyone, kind_of
from tests.alarms.tally import Tally
from tests.alarms.together import drop_caches, judge_together

# A process of `attest check` keeps the programs of 100 calls of one subject; here a call has some four.
CALLS_PER_CACHE = 25
# The tasks of each kind of subjects in a round: each kind takes about as long, Triton's interpreter less.
TASKS_OF_A_ROUND = {
    "outsider.numpy": 8,
    "outsider.jax": 1,
    "emulator": 10,
    "xla.flash_attention": 3,
    "xla.attention": 4,
    "triton.interpret": 1,
}

_CALLS = count(1)


@dataclass(frozen=True)
class Call:
    """One draw for some subjects, by name. seed: of the plan that it belongs to."""

    subjects: tuple[str, ...]
    draw: Draw
    checks: tuple[str, ...]
    seed: int


def facts() -> dict[str, Any]:
    """Return the facts that workers have in common; only a worker that has this folder can be asked."""
    return environment()


def jobs_of(
    groups: Sequence[Sequence[Subject]], profile: Profile, seeds: Iterable[int], per_case: int
) -> Iterator[Job]:
    """Yield the calls of all seeds, of one after the other, in rounds of all groups."""
    turns = [count() for _ in groups]
    for seed in seeds:
        planned = [_planned(group, profile, seed) for group in groups]
        left = True
        while left:
            left = False
            for group, turn, of_group in zip(groups, turns, planned, strict=True):
                for task in islice(of_group, TASKS_OF_A_ROUND[kind_of(group[0])]):
                    left = True
                    yield _job(task, _next(group, next(turn), per_case), seed)


def judged(_subject: None, call: Call) -> Tally:
    """Judge the subjects of a call, and count what they do."""
    tally = Tally()
    case = chosen(call.draw)
    if case is not None:
        subjects = [everyone()[name] for name in call.subjects]
        for subject, found in judge_together(subjects, case, call.checks):
            for result in found:
                tally.add(subject.name, result, call.seed)
    if next(_CALLS) % CALLS_PER_CACHE == 0:
        drop_caches()
    return tally


def tally_of(outcome: Outcome) -> Tally:
    """Return what a call counted, or the fault that ended it as one red result."""
    if not outcome.fault:
        return outcome.value
    call: Call = outcome.job.argument
    verdict = Verdict.TIMEOUT if outcome.timed_out else Verdict.ERROR if outcome.lost else Verdict.FAIL
    tally = Tally()
    tally.cut_short(", ".join(call.subjects), verdict, outcome.fault, chosen(call.draw), call.seed)
    return tally


def _planned(group: Sequence[Subject], profile: Profile, seed: int) -> Iterator[Task]:
    """Yield the tasks of a group in an order of chance."""
    planned = list(tasks(group[0], profile, seed))
    random.Random(seed).shuffle(planned)
    yield from planned


def _next(group: Sequence[Subject], turn: int, per_case: int) -> tuple[str, ...]:
    """Return the names of the subjects whose turn it is."""
    return tuple(group[(turn * per_case + k) % len(group)].name for k in range(min(per_case, len(group))))


def _job(task: Task, subjects: tuple[str, ...], seed: int) -> Job:
    first, *others = (Call(subjects, draw, checks, seed) for draw, checks in task.draws)
    return Job("", judged, first, tuple(others))
