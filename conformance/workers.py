"""How tasks reach kernels: in processes that may be killed and replaced, or in this one.

A kernel that hangs or takes its process down costs its own task, and no other.
"""

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from conformance.process import hush, settle
from conformance.signals import postponed
from conformance.subject import Subject

# Enough that no worker waits for its next job; the rest waits here, where it can still be withdrawn.
_IN_FLIGHT_PER_WORKER = 6

# Seconds within which a run that waits for its workers hears that it is to end.
_PATIENCE = 0.2

# Compiled kernels stay in the memory of the process that compiled them: begin afresh now and then.
_JOBS_PER_PROCESS = 100


@dataclass(frozen=True)
class Job:
    """One call of `work` in a worker, with a subject and one argument.

    subject: the name or `module:attribute` that finds it in another process. work: a function of a module.
    """

    subject: str
    work: Callable[[Subject, Any], Any]
    argument: Any


@dataclass(frozen=True)
class Outcome:
    """What became of a job: a value; or `fault`, one sentence, if it hung or its process died."""

    job: Job
    value: Any = None
    fault: str = ""


class WorkerError(Exception):
    """The workers themselves cannot run; the message is one sentence."""


def perform(
    jobs: Iterable[Job],
    subjects: Mapping[str, Subject],
    workers: int,
    timeout: float,
    wanted: Callable[[Job], bool] = lambda _job: True,
) -> Generator[Outcome, None, None]:
    """Every job's outcome, as they come; jobs are drawn while earlier ones run.

    subjects: by the name in the jobs. workers 0: in this process, where nothing can be timed out.
    wanted: whether a job still matters, asked when its turn comes; one that does not has no outcome.
    Raises WorkerError. Closing the iterator stops the workers.
    """
    if workers == 0:
        return _here(jobs, subjects, wanted)
    return _elsewhere(jobs, tuple(subjects), workers, timeout, wanted)


def _here(
    jobs: Iterable[Job], subjects: Mapping[str, Subject], wanted: Callable[[Job], bool]
) -> Generator[Outcome, None, None]:
    for job in jobs:
        if wanted(job):
            yield _guarded(job, subjects[job.subject])


def _elsewhere(
    jobs: Iterable[Job], names: Sequence[str], workers: int, timeout: float, wanted: Callable[[Job], bool]
) -> Generator[Outcome, None, None]:
    # Only here: a run without workers needs no pebble.
    from pebble import ProcessExpired, ProcessPool

    waiting: deque[Job] = deque()
    running: dict[Future[Outcome], Job] = {}

    def refill() -> None:
        while waiting and len(running) < _IN_FLIGHT_PER_WORKER * workers:
            job = waiting.popleft()
            if wanted(job):
                with postponed():
                    running[pool.schedule(_in_worker, args=(job,), timeout=timeout)] = job

    def finished(patience: float) -> Iterator[Outcome]:
        with postponed():
            done = wait(running, patience, FIRST_COMPLETED).done
        for future in [future for future in running if future in done]:  # in the order they were given
            job = running.pop(future)
            try:
                yield replace(future.result(), job=job)
            except TimeoutError:
                yield Outcome(job, fault=f"did not finish within {timeout:g} s")
            except ProcessExpired as error:
                yield Outcome(job, fault=f"the process died{_how(error.exitcode)}")

    # Forking would copy the threads of XLA in whatever state they are.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPool(workers, _JOBS_PER_PROCESS, initializer=_begin, initargs=(names,), context=context)
    try:
        for job in jobs:
            waiting.append(job)
            refill()
            yield from finished(0.0)
        refill()
        while running:
            yield from finished(_PATIENCE)
            refill()
    except (BrokenExecutor, LookupError) as error:
        raise WorkerError(f"the workers cannot run: {error}") from error
    finally:
        pool.stop()
        pool.join()


def _how(status: int | None) -> str:
    if status is None:
        return ""
    return f" of signal {-status}" if status < 0 else f" with exit status {status}"


def _begin(names: Sequence[str]) -> None:
    """Load what every task needs before the first one's time starts to run."""
    settle()
    hush()
    for name in names:
        try:
            _subject(name)
        except LookupError:  # its tasks will say so
            continue


def _in_worker(job: Job) -> Outcome:
    return _guarded(job, _subject(job.subject))


def _guarded(job: Job, subject: Subject) -> Outcome:
    """A subject may also raise what is no Exception, such as SystemExit, and must not end the worker."""
    try:
        return Outcome(job, job.work(subject, job.argument))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        lines = str(error).strip().splitlines()
        return Outcome(job, fault=f"raised {type(error).__name__}" + (f": {lines[0]}" if lines else ""))


@cache
def _subject(name: str) -> Subject:
    from conformance.subject import find

    return find(name)
