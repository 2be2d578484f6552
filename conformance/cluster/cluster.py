"""A run on the workers of a Dask cluster: batches of calls are sent, and their outcomes come back.

The caller chooses the worker of each batch. So a call that ends its worker is not tried on one worker after
the other, as the scheduler would do, and a worker that differs from the others gets none.
"""

import logging
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from distributed import CancelledError, Client, Future, KilledWorker

from attest.conformance.cluster.batches import Batch, Batches
from attest.conformance.cluster.local import LocalCluster
from attest.conformance.cluster.members import Member, Members, Requirements
from attest.conformance.cluster.worker import Description, describe, run_batch
from attest.conformance.process.limits import limits
from attest.conformance.process.pool import Job, Outcome
from attest.conformance.process.settings import LostError, WorkerError
from attest.conformance.process.signals import postponed
from attest.conformance.process.workers import Drawing
from attest.conformance.text import describe as in_words

_LOCAL = "local:"
_PATIENCE = 0.2  # seconds within which a run that waits notices a signal
_LOOK_SECONDS = 1.0  # between two looks at which workers are there
_RESULT_SECONDS = 60.0  # for a value on its way

# What was sent and has not come back: the worker, the batch and its future, by the key of the future.
Flight = dict[Any, tuple[Member, Batch, "Future[Any]"]]


class _Client(Client):
    """A client that is closed only where it says so; Dask's own waits and complains when it is forgotten."""

    def __del__(self) -> None:
        """Do nothing."""


class Cluster:
    """The connection to a cluster. Raises WorkerError with one sentence if there is none, or no worker fits.

    text: the address of a scheduler, or "local:N" for a scheduler and N workers that are started here. say:
    reports a sentence to the user.
    """

    def __init__(self, text: str, say: Callable[[str], None]) -> None:
        self._text, self._say = text, say
        self._open = ExitStack()
        self._done: SimpleQueue[Future[Any]] = SimpleQueue()
        self._asked: dict[Any, tuple[str, Future[Any]]] = {}
        self._members = Members(Requirements(), self._ask, say)
        self._looked = 0.0
        self._there: Collection[str] = ()
        _silence()
        try:
            self._client = self._connect()
        except BaseException:
            self._open.close()
            raise

    def close(self) -> None:
        """End the connection, and the processes that were started here."""
        self._open.close()

    def admit(self, requirements: Requirements) -> None:
        """Wait until workers fit a run. Raises WorkerError if there is none for a part of it.

        Each worker that does not fit is reported with its reason.
        """
        members = self._members = Members(requirements, self._ask, self._say)
        ends = time.monotonic() + limits()["cluster_seconds"]
        while True:
            self._look()
            self._receive({}, _PATIENCE)
            late = time.monotonic() > ends
            if not members.lacking and (late or not members.undecided):
                return
            if late or (members.refused and not members.undecided):
                raise WorkerError(f"--cluster {self._text}: {self._no_worker(members)}")

    @property
    def environment(self) -> Mapping[str, Any]:
        """The environment of the run: that of the caller, with the device that subjects on GPUs ran on."""
        return self._members.environment

    def _no_worker(self, members: Members) -> str:
        """Return why a run has no worker, in one clause."""
        if members.admitted:
            (gpu,) = members.lacking
            names = ", ".join(members.requirements.of(gpu))
            if gpu:
                return (
                    f"{names} needs a GPU, and no worker that fits declares one:"
                    " start one with --resources GPU=1"
                )
            return (
                f"{names} needs no GPU, and no worker that fits is without one:"
                " start one without --resources GPU=1"
            )
        if members.undecided:
            return f"no worker has described itself within {limits()['cluster_seconds']:g} s"
        if members.refused:
            return "no worker fits this run"
        return f"it has no worker: start one with `dask worker {self._text} --no-nanny`"

    def perform(
        self,
        jobs: Iterable[Job],
        timeout: float,
        wanted: Callable[[Job], bool],
        watch: Callable[[Job, float], None],
    ) -> Generator[Outcome, None, None]:
        """Yield the outcome of every call of every job, as `process.workers.perform` does.

        Raises LostError if the scheduler or the last worker is lost.
        """
        drawing = Drawing(jobs)
        batches = {False: Batches(), True: Batches()}
        flight: Flight = {}
        with postponed() as to_end:
            try:
                while not to_end():
                    yield from self._lost(flight, batches, self._look())
                    self._drawn(drawing, batches)
                    self._send(flight, batches, timeout, wanted)
                    if drawing.ended and not flight and not any(map(len, batches.values())):
                        return
                    if flight:
                        _, first, _ = min(flight.values(), key=lambda sent: sent[1].began)
                        watch(first.calls[0], time.monotonic() - first.began)
                    patience = _PATIENCE if drawing.ended or not self._members.any_free else _PATIENCE / 20
                    yield from self._received(flight, batches, patience)
            finally:
                self._client.cancel([future for _, _, future in flight.values()])
                self._members.forget_calls()
                drawing.stop()

    def _connect(self) -> "Client":
        address = self._text
        if self._text.startswith(_LOCAL):
            count = self._text.removeprefix(_LOCAL)
            if not count.isdecimal() or not 0 < int(count) <= 1024:
                raise WorkerError(f"--cluster: got {self._text!r}, expected local:N with 1 to 1024 workers")
            folder = self._open.enter_context(tempfile.TemporaryDirectory(prefix="attest-cluster-"))
            started = LocalCluster(int(count), Path(folder))
            self._open.callback(started.close)
            address = started.address
        try:
            client = _Client(address, timeout=limits()["connect_seconds"], set_as_default=False)
        except (OSError, ValueError, ImportError, TypeError) as error:
            raise WorkerError(
                f"--cluster {self._text}: no scheduler answers there: {in_words(error)}"
            ) from error
        self._open.callback(client.close, timeout=1)
        versions: Any = client.get_versions()
        ours, theirs = (versions[who]["packages"]["distributed"] for who in ("client", "scheduler"))
        if ours != theirs:
            raise WorkerError(
                f"--cluster {self._text}: its scheduler runs distributed {theirs}, this is {ours}:"
                " install the same version here and there"
            )
        return client

    def _ask(self, address: str, names: list[str]) -> None:
        future = self._submitted(address, describe, tuple(names), self._members.requirements.facts)
        self._asked[future.key] = (address, future)

    def _submitted(self, address: str, work: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        future = self._client.submit(
            work,
            *arguments,
            key=f"attest-{uuid.uuid4().hex}",
            workers=[address],
            allow_other_workers=False,
            retries=0,
            pure=False,
        )
        future.add_done_callback(self._done.put)
        return future

    def _look(self) -> Collection[str]:
        """Update which workers are there, now and then; return their addresses."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return self._there
        self._looked = now
        try:
            if self._client.status != "running":
                raise OSError
            # Not `scheduler_info`: the client overwrites what that returns, in a thread and without workers.
            scheduler: Any = self._client.scheduler
            identity: Any = self._client.sync(scheduler.identity, n_workers=-1)
            workers = identity["workers"]
        except (OSError, TimeoutError, RuntimeError) as error:
            raise LostError(f"the scheduler of --cluster {self._text} was lost") from error
        self._members.seen(workers)
        self._there = workers.keys()
        return self._there

    def _drawn(self, drawing: Drawing, batches: dict[bool, Batches]) -> None:
        """Sort the jobs that were drawn by whether they need a GPU."""
        drawn: deque[Job] = deque()
        while drawing.fetch(drawn):
            pass
        for job in drawn:
            self._of_kind(batches, job).waiting.append(job)

    def _of_kind(self, batches: dict[bool, Batches], job: Job) -> Batches:
        """Return the batches of jobs that need a GPU, or of those that need none, as a job does."""
        return batches[self._members.needs_gpu(job.subject)]

    def _send(
        self,
        flight: Flight,
        batches: dict[bool, Batches],
        timeout: float,
        wanted: Callable[[Job], bool],
    ) -> None:
        """Give each free worker a batch. Raises LostError if calls wait and no worker is left for them."""
        members = list(self._members.admitted.values())
        for needs_gpu, waiting in batches.items():
            able = [member for member in members if needs_gpu in member.takes]
            if waiting and not able and not self._members.undecided:
                raise LostError(f"the last worker{self._with(needs_gpu)} of --cluster {self._text} was lost")
            for member in able:
                while member.free:
                    batch = waiting.next(wanted, len(able), idle=not member.running)
                    if batch is None:
                        break
                    future = self._submitted(member.address, run_batch, batch.jobs, timeout)
                    member.running.add(future.key)
                    member.alone = batch.alone
                    flight[future.key] = (member, batch, future)

    def _with(self, gpu: bool) -> str:
        """Return which workers take a kind of work, if the run has both kinds."""
        if len(self._members.requirements.kinds) == 1:
            return ""
        return " with a GPU" if gpu else " without a GPU"

    def _received(
        self,
        flight: Flight,
        batches: dict[bool, Batches],
        patience: float,
    ) -> Generator[Outcome, None, None]:
        """Yield the outcomes of the batches that have ended, after waiting for one for so many seconds."""
        for future in self._receive(flight, patience):
            member, batch, _ = flight.pop(future.key)
            member.running.discard(future.key)
            member.alone = False
            of_kind = self._of_kind(batches, batch.jobs[0])
            value, reason = _value(future)
            if value is not None:
                of_kind.finished(batch)
                yield from value
                continue
            if member.address in self._members.admitted and reason:
                self._members.refuse(member.address, reason)
            yield from of_kind.lost(batch, f"worker {member.address}")

    def _receive(self, flight: Mapping[Any, object], patience: float) -> "list[Future[Any]]":
        """Return the futures of batches that have ended; admit or refuse the workers that were described."""
        found: list[Future[Any]] = []
        try:
            found.append(self._done.get(timeout=patience))
            while True:
                found.append(self._done.get_nowait())
        except Empty:
            pass
        for future in found:
            asked = self._asked.pop(future.key, None)
            if asked is not None:
                description, reason = _value(future)
                self._members.described(asked[0], description or Description(reason or "it was lost"))
        return [future for future in found if future.key in flight]

    def _lost(
        self,
        flight: Flight,
        batches: dict[bool, Batches],
        there: Collection[str],
    ) -> Generator[Outcome, None, None]:
        """Put back what workers that have gone were given; yield the outcomes of what is given up."""
        for key, (member, batch, future) in tuple(flight.items()):
            if member.address not in there:  # also of one that had been refused meanwhile
                del flight[key]
                self._client.cancel([future])
                of_kind = self._of_kind(batches, batch.jobs[0])
                yield from of_kind.lost(batch, f"worker {member.address}")


def _silence() -> None:
    """Silence what Dask and its event loop log: a lost connection is one sentence of the run."""
    for name in ("asyncio", *logging.root.manager.loggerDict):
        if name.startswith(("distributed", "tornado", "asyncio")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _value(future: "Future[Any]") -> tuple[Any, str]:
    """Return the value of a future; or None and what its call raised, "" if its worker was lost."""
    try:
        if future.status == "error":
            error: Any = future.exception(timeout=_RESULT_SECONDS)
            return None, "" if isinstance(error, KilledWorker) else in_words(error)
        return future.result(timeout=_RESULT_SECONDS), ""
    except (Exception, CancelledError):  # its worker was lost before it handed over the value
        return None, ""
