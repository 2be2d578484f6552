"""The execution of tasks, in processes that can be killed and replaced, or in this one.

A kernel that hangs or ends its process costs only its own task.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from attest.conformance.process.pool import Job, Outcome, Pool, guarded
from attest.conformance.process.signals import postponed
from attest.conformance.subject import Subject

# Seconds within which a run that waits for its workers notices a signal.
_PATIENCE = 0.2

# Seconds that an ended run waits for the case that is being drawn.
_FAREWELL = 5.0


class Elsewhere(Protocol):
    """Workers on other machines."""

    def perform(
        self,
        jobs: Iterable[Job],
        timeout: float,
        wanted: Callable[[Job], bool],
        watch: Callable[[Job, float], None],
    ) -> Generator[Outcome, None, None]:
        """Yield the outcome of every call of every job, as `perform` of this module does."""
        ...


Workers = int | Elsewhere


def perform(
    jobs: Iterable[Job],
    subjects: Mapping[str, Subject],
    workers: Workers,
    timeout: float,
    wanted: Callable[[Job], bool] = lambda _job: True,
    watch: Callable[[Job, float], None] = lambda _call, _seconds: None,
) -> Generator[Outcome, None, None]:
    """Yield the outcome of every call of every job, as they come; jobs are drawn while earlier ones run.

    subjects: by the name in the jobs. workers: how many processes, or those of other machines; 0: in this
    process, where nothing can be timed out, and where all jobs are drawn first.
    wanted: whether a job is still needed, called just before it begins; others have no outcome.
    watch: called now and then with the call that has run longest, and for how many seconds.
    Raises WorkerError, LostError, and what drawing a job raises. Closing the iterator stops the workers.
    """
    if not isinstance(workers, int):
        return workers.perform(jobs, timeout, wanted, watch)
    if workers == 0:
        return _here(jobs, subjects, wanted, watch)
    return _elsewhere(jobs, workers, timeout, wanted, watch)


def _here(
    jobs: Iterable[Job],
    subjects: Mapping[str, Subject],
    wanted: Callable[[Job], bool],
    watch: Callable[[Job, float], None],
) -> Generator[Outcome, None, None]:
    for job in tuple(jobs):
        for call in job.calls:
            if wanted(call):
                watch(call, 0.0)
                yield guarded(call, subjects[call.subject] if call.subject else None)


def _elsewhere(
    jobs: Iterable[Job],
    workers: int,
    timeout: float,
    wanted: Callable[[Job], bool],
    watch: Callable[[Job, float], None],
) -> Generator[Outcome, None, None]:
    drawing = Drawing(jobs)
    waiting: deque[Job] = deque()
    # A signal takes effect between two rounds of the loop, so that no outcome is lost.
    with postponed() as to_end:
        pool = Pool(workers, timeout)
        try:
            while not to_end():
                waiting.extendleft(pool.left)
                pool.left.clear()
                while pool.idle and (waiting or drawing.fetch(waiting)):
                    job = waiting.popleft()
                    if wanted(job):
                        pool.give(job)
                if not pool.busy:
                    if drawing.ended:
                        return
                    drawing.wait(waiting, _PATIENCE)
                if longest := pool.longest:
                    watch(*longest)
                yield from pool.outcomes(_PATIENCE if not pool.idle or drawing.ended else _PATIENCE / 20)
        finally:
            pool.stop()
            drawing.stop()


@dataclass(frozen=True)
class _Raised:
    error: BaseException


class Drawing:
    """A drawer of jobs in its own thread, so that drawing does not delay the outcomes.

    It waits for nothing, so that the number of all jobs is soon known.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.ended = False
        self._jobs = jobs
        self._drawn: queue.SimpleQueue[Job | _Raised | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="attest-drawing", daemon=True)
        self._thread.start()

    def fetch(self, waiting: deque[Job]) -> bool:
        """Move one drawn job into `waiting`, if there is one. Raises the exception of the drawing thread."""
        try:
            return not self.ended and self._take(self._drawn.get_nowait(), waiting)
        except queue.Empty:
            return False

    def wait(self, waiting: deque[Job], seconds: float) -> None:
        """Wait for one job, for a while."""
        try:
            self._take(self._drawn.get(timeout=seconds), waiting)
        except queue.Empty:
            return

    def stop(self) -> None:
        """End the thread after the case that it draws."""
        self._stopped.set()
        self._thread.join(_FAREWELL)

    def _take(self, drawn: Job | _Raised | None, waiting: deque[Job]) -> bool:
        if isinstance(drawn, Job):
            waiting.append(drawn)
            return True
        self.ended = True
        if isinstance(drawn, _Raised):
            raise drawn.error
        return False

    def _draw(self) -> None:
        try:
            for job in self._jobs:
                if self._stopped.is_set():
                    return
                self._drawn.put(job)
        except BaseException as error:  # raised again where the jobs are wanted
            self._drawn.put(_Raised(error))
        else:
            self._drawn.put(None)
