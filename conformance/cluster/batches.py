"""Batches: the calls that are sent to a worker at once, and what becomes of those that are lost with it."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from attest.conformance.process.pool import Job, Outcome

# A batch lasts about as many seconds, so that sending one costs little, and little is lost with a worker.
BATCH_SECONDS = 4.0
MOST_JOBS = 32
# Batches that are still to come for each worker, so that all of them end at about the same time.
_ROUNDS = 4
# So many times a call is lost alone before it is given up.
_LOSSES = 2


@dataclass(frozen=True)
class Batch:
    """Jobs of one subject that a worker gets at once.

    alone: whether the worker gets nothing else meanwhile, since the call was lost before. losses: how many
    times it was lost so. began: when the batch was made, by `time.monotonic`.
    """

    jobs: tuple[Job, ...]
    alone: bool = False
    losses: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def calls(self) -> tuple[Job, ...]:
        """Every call of the jobs."""
        return tuple(call for job in self.jobs for call in job.calls)


class Batches:
    """The jobs that wait for a worker.

    waiting: those that were not sent yet. What was lost with its worker is sent again before them, one call
    after the other, to workers that do nothing else.
    """

    def __init__(self) -> None:
        self.waiting: deque[Job] = deque()
        self._again: deque[tuple[Job, int]] = deque()  # each with its losses alone
        self._seconds, self._jobs = 0.0, 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self._again)

    def finished(self, batch: Batch) -> None:
        """Note how long a batch took."""
        self._seconds += time.monotonic() - batch.began
        self._jobs += len(batch.jobs)

    def lost(self, batch: Batch, reason: str) -> list[Outcome]:
        """Put the calls of a lost batch back; return the outcome of one that was lost alone too often."""
        losses = batch.losses + batch.alone
        if losses >= _LOSSES:
            fault = f"lost {_LOSSES} times with a worker that did nothing else, at last since {reason}"
            return [Outcome(call, fault=fault, lost=True) for call in batch.calls]
        self._again.extend((call, losses) for call in batch.calls)
        return []

    def next(self, wanted: Callable[[Job], bool], workers: int, idle: bool) -> Batch | None:
        """Return the next batch for a worker; None if there is none for it.

        workers: how many share what waits. idle: whether this one does nothing.
        """
        while self._again and idle:
            job, losses = self._again.popleft()
            if wanted(job):
                return Batch((job,), alone=True, losses=losses)
        jobs: list[Job] = []
        most = self._most(workers)
        while self.waiting and len(jobs) < most:
            if jobs and self.waiting[0].subject != jobs[0].subject:
                break
            job = self.waiting.popleft()
            if wanted(job):
                jobs.append(job)
        return Batch(tuple(jobs)) if jobs else None

    def _most(self, workers: int) -> int:
        """Return how many jobs the next batch may have: one, until the time of a job is known."""
        if not self._jobs:
            return 1
        of_time = int(BATCH_SECONDS * self._jobs / max(self._seconds, 1e-9))
        return max(1, min(MOST_JOBS, of_time, len(self.waiting) // (_ROUNDS * max(workers, 1))))
