"""A run begins once its workers can do every part of it, and otherwise ends with one sentence."""

from types import SimpleNamespace
from typing import Any

import pytest

from attest.conformance.cluster import cluster as module
from attest.conformance.cluster.cluster import Cluster
from attest.conformance.cluster.members import Requirements
from attest.conformance.cluster.worker import Description
from attest.conformance.process.pool import Job
from attest.conformance.process.settings import LostError, WorkerError
from tests.cluster.test_members import CPU, GPU, HERE, ON_GPU

BOTH = {"toys.right": False, "hopper": True}
A, B, C = "tcp://a", "tcp://b", "tcp://c"
FITS = {A: {**HERE}, B: {**HERE, **ON_GPU}}
UNLIKE = {**HERE, "commit": "another"}


def work(_subject, argument):
    return argument


def connected(workers: dict[str, Any], facts: dict[str, Any]) -> tuple[Cluster, list[str]]:
    """A cluster whose workers have these facts; those without facts do not describe themselves."""
    said: list[str] = []
    found = Cluster.__new__(Cluster)
    found._text, found._say, found._asked, found._there, found._looked = "tcp://s", said.append, {}, (), 0.0
    found._client = SimpleNamespace(
        status="running",
        sync=lambda ask, **options: ask(**options),
        scheduler=SimpleNamespace(identity=lambda n_workers: {"workers": workers}),
        cancel=lambda futures: None,
    )
    found._receive = lambda _flight, _patience: []

    def ask(address: str, _names: list[str]) -> None:
        if address in facts:
            found._members.described(address, Description("", facts[address], {}))

    found._ask = ask
    return found, said


@pytest.fixture(autouse=True)
def soon(monkeypatch) -> None:
    """Let each look at the clock take a minute."""
    now = iter(range(0, 10**6, 60))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))


@pytest.mark.parametrize(
    ("workers", "facts", "reason"),
    [
        (
            {A: CPU},
            FITS,
            "hopper needs a GPU, and no worker that fits declares one: start one with --resources GPU=1",
        ),
        (
            {B: GPU},
            FITS,
            "toys.right needs no GPU, and no worker that fits is without one:"
            " start one without --resources GPU=1",
        ),
        (
            {A: CPU, B: GPU},
            {**FITS, A: UNLIKE},
            "toys.right needs no GPU, and no worker that fits is without one:"
            " start one without --resources GPU=1",
        ),
        (
            {A: CPU, B: GPU},
            {**FITS, B: UNLIKE},
            "hopper needs a GPU, and no worker that fits declares one: start one with --resources GPU=1",
        ),
        ({A: CPU, B: GPU}, {A: UNLIKE, B: UNLIKE}, "no worker fits this run"),
        ({A: CPU, B: GPU}, {}, "no worker has described itself within 120 s"),
        ({}, {}, "it has no worker: start one with `dask worker tcp://s --no-nanny`"),
    ],
    ids=["CPUs alone", "GPUs alone", "GPUs fit", "CPUs fit", "none fits", "silent", "empty"],
)
def test_a_part_without_a_worker_ends_the_run_with_one_sentence(workers, facts, reason):
    found, _ = connected(workers, facts)
    with pytest.raises(WorkerError) as refused:
        found.admit(Requirements(HERE, BOTH))
    assert str(refused.value) == f"--cluster tcp://s: {reason}"


def test_a_run_does_not_wait_for_ever_for_a_worker_that_is_silent():
    found, said = connected({A: CPU, B: GPU, C: CPU}, FITS)
    found.admit(Requirements(HERE, BOTH))
    assert set(found._members.admitted) == {A, B}
    assert said == []


def test_gpus_alone_do_everything_for_a_caller_with_one():
    found, said = connected({B: GPU}, FITS)
    found.admit(Requirements(FITS[B], BOTH))
    assert found._members.lacking == frozenset()
    assert said == []


@pytest.mark.parametrize(
    ("gone", "which", "subject"), [(A, "without a GPU", "toys.right"), (B, "with a GPU", "hopper")]
)
def test_calls_whose_last_worker_has_gone_end_the_run(gone, which, subject):
    workers = {A: CPU, B: GPU}
    found, _ = connected(workers, FITS)
    found.admit(Requirements(HERE, BOTH))
    del workers[gone]
    with pytest.raises(LostError) as lost:
        list(found.perform([Job(subject, work, 1)], 1.0, lambda _job: True, lambda _job, _seconds: None))
    assert str(lost.value) == f"the last worker {which} of --cluster tcp://s was lost"
