"""A worker gets cases only if what it computes belongs in the record of the run."""

import pytest

from attest.conformance.cluster.members import Members, Requirements
from attest.conformance.cluster.worker import Description
from attest.conformance.process.limits import limits

HERE = {
    "backend": "cpu",
    "device": "cpu",
    "platform": "Linux x86_64",
    "processor": "AMD EPYC",
    "python": "3.12.1",
    "versions": {"jax": "0.11.2"},
    "flags": {"XLA_FLAGS": "--x"},
    "commit": "abc",
    "cores": 2,
}
CPU = {"nthreads": 1, "resources": {}}
GPU = {"nthreads": 1, "resources": {"GPU": 1}}
ON_GPU = {"backend": "gpu", "device": "NVIDIA H100", "processor": "Intel Xeon"}


class Seen:
    """Members, with what they asked and said."""

    def __init__(self, subjects=None, mixed=False, environment=HERE):
        self.asked: dict[str, list[str]] = {}
        self.said: list[str] = []
        wanted = Requirements(environment, subjects or {"toys.right": False}, mixed)
        self.members = Members(wanted, self.asked.__setitem__, self.said.append)

    def joined(self, address, worker=CPU, reasons=None, fault="", **environment):
        there = {address: worker} | dict.fromkeys(self.members.admitted, worker)
        self.members.seen(there)
        self.members.described(address, Description(fault, {**HERE, **environment}, reasons or {}))
        return address in self.members.admitted


def test_a_worker_like_the_caller_is_admitted():
    seen = Seen()
    assert seen.joined("tcp://a", cores=64)
    assert seen.asked == {"tcp://a": ["toys.right"]}
    assert seen.said == []


UNLIKE = {
    "versions": ({"jax": "0.12"}, "versions: jax: got '0.12', expected '0.11.2'"),
    "flags": ({}, "flags: XLA_FLAGS: got None, expected '--x'"),
    "commit": ("def", "commit: got 'def', expected 'abc'"),
    "processor": ("Intel Xeon", "processor: got 'Intel Xeon', expected 'AMD EPYC'"),
    "python": ("3.13.0", "python: got '3.13.0', expected '3.12.1'"),
    "backend": ("gpu", "backend: got 'gpu', expected 'cpu'"),
}


@pytest.mark.parametrize("fact", UNLIKE)
def test_a_worker_that_would_compute_something_else_is_refused_once_with_the_reason(fact):
    seen = Seen()
    value, sentence = UNLIKE[fact]
    assert not seen.joined("tcp://a", **{fact: value})
    seen.members.seen({"tcp://a": CPU})
    assert seen.said == [f"worker tcp://a gets no cases: {sentence}"]
    assert not seen.members.undecided


def test_another_processor_is_used_on_request():
    seen = Seen(mixed=True)
    assert seen.joined("tcp://a", processor="Intel Xeon")
    assert not seen.joined("tcp://b", commit="def")


def test_a_worker_without_the_module_of_a_subject_is_refused():
    seen = Seen()
    reasons = {"mine:kernel": "subject 'mine:kernel' cannot be loaded: No module named 'mine'"}
    assert not seen.joined("tcp://a", reasons=reasons)
    assert "mine:kernel: subject 'mine:kernel' cannot be loaded: No module named 'mine'" in seen.said[0]


def test_a_worker_that_can_run_nothing_is_refused():
    seen = Seen()
    assert not seen.joined("tcp://a", fault="is a daemon, which may start no process")
    assert seen.said == ["worker tcp://a gets no cases: is a daemon, which may start no process"]


def test_workers_come_and_go():
    seen = Seen()
    assert seen.joined("tcp://a")
    seen.members.seen({})
    assert seen.members.admitted == {}
    seen.members.seen({"tcp://b": CPU})
    assert seen.members.undecided
    seen.members.seen({})
    assert not seen.members.undecided
    seen.members.described("tcp://b", Description("", HERE, {}))
    assert seen.members.admitted == {}
    assert seen.joined("tcp://b")


def test_subjects_that_need_a_gpu_go_to_workers_that_declare_one():
    seen = Seen({"toys.right": False, "hopper": True})
    workers = {"tcp://a": CPU, "tcp://b": GPU, "tcp://c": GPU, "tcp://d": GPU}
    seen.members.seen(workers)
    assert seen.asked == {
        "tcp://a": ["toys.right"],
        **{address: ["hopper"] for address in ("tcp://b", "tcp://c", "tcp://d")},
    }
    seen.members.described("tcp://a", Description("", HERE, {}))
    there = {**HERE, **ON_GPU, "flags": {**HERE["flags"], "CUDA_VISIBLE_DEVICES": "3"}}
    seen.members.described("tcp://b", Description("", there, {}))
    seen.members.described("tcp://c", Description("", {**there, "flags": HERE["flags"]}, {}))
    seen.members.described("tcp://d", Description("", {**there, "device": "NVIDIA H200"}, {}))
    takes = {address: set(member.takes) for address, member in seen.members.admitted.items()}
    assert takes == {"tcp://a": {False}, "tcp://b": {True}, "tcp://c": {True}}
    assert seen.members.environment == {**HERE, "gpu_workers": ON_GPU}
    assert seen.members.needs_gpu("hopper")
    assert not seen.members.needs_gpu("toys.right")
    assert seen.said == ["worker tcp://d gets no cases: device: got 'NVIDIA H200', expected 'NVIDIA H100'"]


def test_the_record_of_a_run_on_gpus_alone_names_their_device():
    seen = Seen({"hopper": True})
    assert seen.members.environment == HERE
    assert seen.joined("tcp://a", GPU, **ON_GPU)
    assert seen.members.environment == {**HERE, **ON_GPU}
    assert not seen.joined("tcp://b")
    assert seen.said == [
        "worker tcp://b gets no cases: declares no GPU, and each subject of this run needs one"
    ]


def test_a_worker_with_a_gpu_is_not_used_for_what_needs_none_beside_others():
    seen = Seen()
    seen.members.seen({"tcp://a": CPU, "tcp://b": GPU})
    assert seen.said == ["worker tcp://b gets no cases: declares a GPU, and no subject of this run needs one"]


def test_the_order_in_which_workers_join_does_not_matter():
    """A worker with a GPU that is there first is not taken for one of a cluster of GPUs alone."""
    seen = Seen({"toys.right": False, "hopper": True})
    seen.members.seen({"tcp://b": GPU})
    assert seen.asked == {"tcp://b": ["hopper"]}
    seen.members.described("tcp://b", Description("", {**HERE, **ON_GPU}, {}))
    assert seen.members.lacking == {False}
    seen.members.seen({"tcp://b": GPU, "tcp://a": CPU})
    seen.members.described("tcp://a", Description("", HERE, {}))
    assert seen.members.lacking == frozenset()
    assert seen.said == []


def test_a_worker_that_does_not_describe_itself_is_not_waited_for(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("attest.conformance.cluster.members.time.monotonic", lambda: now[0])
    seen = Seen()
    seen.members.seen({"tcp://a": CPU})
    now[0] = limits()["start_seconds"]
    seen.members.seen({"tcp://a": CPU})
    assert seen.members.undecided
    now[0] += 1.0
    seen.members.seen({"tcp://a": CPU})
    assert not seen.members.undecided
    assert seen.said == ["worker tcp://a gets no cases: did not describe itself within 600 s"]
    seen.members.described("tcp://a", Description("", HERE, {}))
    assert seen.members.lacking == {False}


def test_a_cluster_of_gpus_alone_runs_everything_for_a_caller_with_one():
    here = {**HERE, **ON_GPU}
    seen = Seen({"toys.right": False, "hopper": True}, environment=here)
    assert seen.joined("tcp://a", GPU, **ON_GPU)
    assert set(seen.members.admitted["tcp://a"].takes) == {True, False}
    assert not seen.joined("tcp://b", GPU, **{**ON_GPU, "device": "NVIDIA H200"})


def test_a_worker_is_free_for_as_many_batches_as_it_has_threads():
    seen = Seen()
    assert seen.joined("tcp://a", {"nthreads": 2, "resources": {}})
    (member,) = seen.members.admitted.values()
    member.running.add("one")
    assert seen.members.any_free
    member.alone = True
    assert not seen.members.any_free
    member.alone = False
    member.running.add("two")
    assert not seen.members.any_free
    seen.members.forget_calls()
    assert member.free
