"""Calls that are lost with a worker are sent again, whatever else is known of the worker."""

from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from distributed import CancelledError, Client, KilledWorker, LocalCluster

from attest.conformance.cluster import cluster as module
from attest.conformance.cluster.batches import Batch, Batches
from attest.conformance.cluster.cluster import Cluster
from attest.conformance.cluster.members import Member, Members, Requirements
from attest.conformance.process.pool import Outcome
from attest.conformance.process.settings import WorkerError
from tests.cluster.test_batches import jobs


class Future:
    """A future that has ended."""

    def __init__(self, value=None, error=None, raised=None) -> None:
        self.key = f"key {id(self)}"
        self.status = "error" if error else "finished"
        self._value, self._error, self._raised = value, error, raised

    def exception(self, timeout):
        return self._error

    def result(self, timeout):
        if self._raised is not None:
            raise self._raised
        return self._value


class Two:
    """A connected cluster of two workers with two threads each."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.cancelled: list[object] = []
        self.cluster = Cluster.__new__(Cluster)
        self.cluster._client = SimpleNamespace(cancel=self.cancelled.extend)
        self.cluster._members = Members(Requirements(), lambda *_: None, self.said.append)
        self.one, self.other = (Member(f"tcp://{name}", 2, False, frozenset({False})) for name in "ab")
        self.cluster._members.admitted |= {self.one.address: self.one, self.other.address: self.other}
        self.batches = {False: Batches(), True: Batches()}

    def received(self, future, batch):
        """The outcomes of a batch of the first worker."""
        self.cluster._receive = lambda _flight, _patience: [future]
        flight = {future.key: (self.one, batch, future)}
        found = list(self.cluster._received(flight, self.batches, 0.0))
        assert flight == {}
        return found

    def sent_again(self):
        return self.batches[False].next(lambda _job: True, 1, idle=True)


@pytest.mark.parametrize("refused", [False, True])
def test_a_worker_that_has_gone_keeps_nothing(refused):
    """One of its threads may have failed before, so that it gets no more cases."""
    two = Two()
    if refused:
        two.cluster._members.refuse(two.one.address, "No space left on device")
    first, second = jobs(2)
    flight = {"1": (two.one, Batch((first,)), "future 1"), "2": (two.other, Batch((second,)), "future 2")}
    assert list(two.cluster._lost(flight, two.batches, {two.other.address})) == []
    assert list(flight) == ["2"]
    assert two.cancelled == ["future 1"]
    assert two.sent_again().jobs == (first,)


def test_the_outcomes_of_a_batch_are_handed_on():
    two = Two()
    (job,) = jobs(1)
    outcomes = [Outcome(job, "value")]
    assert two.received(Future(outcomes), Batch((job,))) == outcomes
    assert two.sent_again() is None


def test_a_worker_with_a_full_disk_gets_no_more_cases_and_the_others_get_its_batch():
    two = Two()
    (job,) = jobs(1)
    assert two.received(Future(error=OSError(28, "No space left on device")), Batch((job,))) == []
    assert list(two.cluster._members.admitted) == [two.other.address]
    (said,) = two.said
    assert said.startswith("worker tcp://a gets no cases: ")
    assert "No space left on device" in said
    assert two.sent_again().jobs == (job,)


@pytest.mark.parametrize(
    "future",
    [
        Future(error=KilledWorker("key", None, 0)),
        Future(raised=CancelledError("key")),
        Future(raised=TimeoutError()),
        Future(raised=OSError("the connection was closed")),
    ],
    ids=["killed", "cancelled", "late", "closed"],
)
def test_a_batch_that_is_lost_on_its_way_says_nothing_of_its_worker(future):
    two = Two()
    (job,) = jobs(1)
    assert two.received(future, Batch((job,))) == []
    assert len(two.cluster._members.admitted) == 2
    assert two.said == []
    assert two.sent_again().jobs == (job,)


def test_a_worker_that_cannot_import_what_describes_it_is_refused_with_the_reason():
    """As one without the folder of the tests, for a run that counts false alarms."""
    two = Two()
    future = Future(error=ModuleNotFoundError("No module named 'tests'"))
    two.cluster._members = Members(Requirements(), lambda *_: None, two.said.append)
    two.cluster._members.seen({"tcp://c": {"nthreads": 1}})
    two.cluster._asked = {future.key: ("tcp://c", future)}
    two.cluster._done = SimpleQueue()
    two.cluster._done.put(future)
    assert two.cluster._receive({}, 1.0) == []
    assert two.cluster._members.lacking == {False}
    (said,) = two.said
    assert said.startswith("worker tcp://c gets no cases: ")
    assert "No module named 'tests'" in said


def test_a_scheduler_of_another_version_is_refused_in_one_sentence(monkeypatch):
    closed: list[object] = []
    versions = {
        "client": {"packages": {"distributed": "2026.8.0"}},
        "scheduler": {"packages": {"distributed": "2025.1.0"}},
    }

    def close(timeout):
        closed.append(timeout)

    def client(*_, **__):
        return SimpleNamespace(get_versions=lambda: versions, close=close)

    monkeypatch.setattr(module, "_Client", client)
    with pytest.raises(WorkerError) as refused:
        Cluster("tcp://host:8786", print)
    assert str(refused.value) == (
        "--cluster tcp://host:8786: its scheduler runs distributed 2025.1.0, this is 2026.8.0:"
        " install the same version here and there"
    )
    assert closed


def test_workers_are_there_whatever_the_client_has_last_heard_of_them():
    """Every two seconds it asks for everything but the workers, and shows what it has last got."""
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as local,
        Client(local, set_as_default=False) as client,
    ):
        cluster = Cluster.__new__(Cluster)
        cluster._client, cluster._looked, cluster._text = client, 0.0, "tcp://s"
        cluster._members = Members(Requirements(), lambda *_: None, lambda _: None)
        asked = client.scheduler_info
        client.scheduler_info = lambda n_workers: asked(n_workers=0)
        assert list(cluster._look()) == [worker.address for worker in local.workers.values()]
