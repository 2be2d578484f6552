"""A pool of processes that run one job at a time and can be killed at any moment.

A process runs jobs of one subject only: what a subject changes in NumPy or JAX cannot reach another one.
A process and its parent share a pipe and a file for the phase, but no lock. So nothing waits for a process
that has died, and its death is noticed at once.
"""

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from attest.conformance.process.limits import limits
from attest.conformance.process.phases import notice_compiling, read_phase, reported
from attest.conformance.process.settings import WorkerError, hush, settle
from attest.conformance.process.signals import Interrupted
from attest.conformance.process.starting import BLOCKED, start
from attest.conformance.subject import Subject
from attest.conformance.user_frames import raised

# Compiled kernels stay in the memory of the process that compiled them, so processes are replaced.
_JOBS_PER_PROCESS = 100

# After so many deaths at the start in a row, the next process would die, too.
_DEATHS_AT_START = 3


@dataclass(frozen=True)
class Job:
    """Calls of `work` in a worker, with a subject and one argument after the other; each has an outcome.

    subject: the name or `module:attribute` that finds it in another process; "" if `work` gets None instead.
    work: a function of a module.
    also: the arguments after the first. They share its compiled programs.
    """

    subject: str
    work: Callable[[Any, Any], Any]
    argument: Any
    also: tuple[Any, ...] = ()

    @property
    def calls(self) -> "tuple[Job, ...]":
        """A job for each argument."""
        return tuple(Job(self.subject, self.work, argument) for argument in (self.argument, *self.also))


def _joined(calls: "Sequence[Job]") -> Job:
    first, *others = calls
    return Job(first.subject, first.work, first.argument, tuple(call.argument for call in others))


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call of a job: a value, or a `fault`: why there is none.

    timed_out: whether its time ran out. lost: whether the machine was lost, so that nothing is known of the
    call. phase, check: where the call was when it was cut short.
    """

    job: Job
    value: Any = None
    fault: str = ""
    timed_out: bool = False
    lost: bool = False
    phase: str = ""
    check: str = ""


class Pool:
    """At most `workers` processes, started when there is a job for them. `timeout`: seconds for one call.

    left: the rest of jobs whose process ended in the middle; it must be given again.
    """

    def __init__(self, workers: int, timeout: float) -> None:
        self._size = workers
        self.timeout = timeout
        self._workers: list[_Worker] = []
        self._deaths_at_start = 0
        self.left: list[Job] = []
        self._folder = Path(tempfile.mkdtemp(prefix="attest-"))

    @property
    def idle(self) -> bool:
        """Whether a further job could begin now."""
        return len(self._workers) < self._size or any(not worker.calls for worker in self._workers)

    @property
    def busy(self) -> bool:
        """Whether a job is still without an outcome."""
        return any(worker.calls for worker in self._workers)

    @property
    def longest(self) -> tuple[Job, float] | None:
        """The call that has run longest, and for how many seconds; None if none runs."""
        running = [(worker.calls[0], worker.seconds) for worker in self._workers if worker.calls]
        return max(running, key=lambda call: call[1], default=None)

    def give(self, job: Job) -> None:
        """Begin a job, only while the pool is idle. Raises WorkerError if no process can be started."""
        idle = [worker for worker in self._workers if not worker.calls]
        for worker in [worker for worker in idle if worker.subject == job.subject]:
            if worker.begin(job):
                return
            self._remove(worker)
        if len(self._workers) == self._size:  # then one of them is idle, with another subject
            self._remove(next(worker for worker in self._workers if not worker.calls))
        worker = _Worker(job.subject, self._folder)
        self._workers.append(worker)
        worker.begin(job)  # its death, if it has died already, is noticed later

    def outcomes(self, patience: float) -> Generator[Outcome, None, None]:
        """Yield the available outcomes, after waiting for one for at most `patience` seconds."""
        watched = [thing for worker in self._workers for thing in worker.watched]
        if watched:
            wait(watched, patience)
        for worker in tuple(self._workers):
            alive = worker.alive  # read first, so that everything it sent before it died is received
            outcome = worker.outcome(self.timeout)
            if outcome is None and not alive:
                outcome = self._buried(worker)
            elif worker.spent or (outcome is not None and outcome.timed_out):
                self._remove(worker)
            if outcome is not None:
                yield outcome

    def stop(self) -> None:
        """Kill every process."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _buried(self, worker: "_Worker") -> Outcome | None:
        """Remove a process that has died. Return the outcome of its call; None if it had not begun."""
        fault = worker.died
        if worker.ready:
            self._deaths_at_start = 0
            outcome = worker.cut_short(fault) if worker.calls else None
        else:
            self._deaths_at_start += 1
            outcome = None
        self._remove(worker)
        if self._deaths_at_start == _DEATHS_AT_START:
            raise WorkerError(f"worker processes cannot start: {fault} while it started")
        return outcome

    def _remove(self, worker: "_Worker") -> None:
        worker.kill()
        self._workers.remove(worker)
        if worker.calls:
            self.left.append(_joined(worker.calls))


class _Worker:
    """The parent's view of one process, which runs the jobs of `subject`."""

    def __init__(self, subject: str, folder: Path) -> None:
        self.subject = subject
        self.calls: list[Job] = []  # without an outcome yet, the current one first
        self.ready = False
        self._jobs = 0
        self._began = time.monotonic()
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = start(_serve, theirs, subject)
        self._phase = folder / str(self._process.pid)

    @property
    def watched(self) -> tuple[Connection, int]:
        return self._connection, self._process.sentinel

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def seconds(self) -> float:
        """The seconds since the current call began."""
        return time.monotonic() - self._began

    @property
    def spent(self) -> bool:
        return not self.calls and self._jobs >= _JOBS_PER_PROCESS

    def begin(self, job: Job) -> bool:
        """Send a job; return False if the idle process has died."""
        self._began = time.monotonic()
        self._phase.unlink(missing_ok=True)
        try:
            self._connection.send((job, self._phase))
        except OSError:
            if self.ready:
                return False
        self.calls = [*job.calls]
        return True

    def outcome(self, timeout: float) -> Outcome | None:
        """Return the outcome of the current call, if there is one."""
        with suppress(EOFError, OSError):  # a process that has died sends nothing more
            while self._connection.poll():
                sent: tuple[Any, str, str] | None = self._connection.recv()
                self._began = time.monotonic()
                if sent is None:
                    self.ready = True
                elif self.calls:
                    value, fault, phase = sent
                    self._jobs += 1
                    return Outcome(self.calls.pop(0), value, fault, phase=phase)
        late = self.seconds
        if not self.ready and late > limits()["start_seconds"]:
            raise WorkerError(f"worker processes cannot start: one did not start within {late:.0f} s")
        if not self.calls or not self.ready or late <= timeout:
            return None
        return self.cut_short(f"did not finish within {timeout:g} s", timed_out=True)

    def cut_short(self, fault: str, timed_out: bool = False) -> Outcome:
        """Return the outcome of the current call, which is cut short; the calls after it are left."""
        phase, check = read_phase(self._phase)
        return Outcome(self.calls.pop(0), None, fault, timed_out, phase=phase, check=check)

    @property
    def died(self) -> str:
        """A clause about how the process died."""
        status = self._process.exitcode or 0
        return f"the process died {f'of signal {-status}' if status < 0 else f'with exit status {status}'}"

    def kill(self) -> None:
        """End the process and those that it has started."""
        if self._process.is_alive():
            with suppress(OSError):
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            self._process.kill()
        self._process.join()
        self._process.close()
        self._connection.close()


def guarded(job: Job, subject: Subject | None) -> Outcome:
    """Do a job in this process. Any exception, even SystemExit, becomes its fault and ends no run."""
    try:
        return Outcome(job, job.work(subject, job.argument))
    except Interrupted:
        raise
    except BaseException as error:
        return Outcome(job, fault=raised(error), phase="running")


def _serve(connection: Connection, name: str) -> None:
    """Run jobs of one subject from the parent, one after the other, until the parent ends."""
    with suppress(OSError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _begin(name)
    with suppress(EOFError, OSError):
        connection.send(None)
        while True:
            job, phase = connection.recv()
            with reported(phase):
                for call in job.calls:
                    connection.send(_done(call))


def _done(job: Job) -> tuple[Any, str, str]:
    """Return the value, fault and phase of a call."""
    try:
        subject = _subject(job.subject) if job.subject else None
    except LookupError as error:
        return None, str(error.args[0]), "loading"
    outcome = guarded(job, subject)
    return outcome.value, outcome.fault, outcome.phase


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _begin(name: str) -> None:
    """Load everything that tasks need, before the time of the first one starts."""
    settle()
    hush()
    notice_compiling()
    if name:
        with suppress(LookupError):  # its tasks will fail with this error
            _subject(name)


@cache
def _subject(name: str) -> Subject:
    from attest.conformance.subject import find

    return find(name)
