"""The compile matrix on the workers of a cluster is that of processes."""

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import triton

from attest.conformance.cli.commands import main
from attest.conformance.compiling import facts
from attest.conformance.compiling.compiler import Binary, Compiler, Job
from attest.conformance.compiling.facts import compile_facts
from attest.conformance.compiling.matrix import Matrix, Narrowing, compile_matrix
from attest.conformance.process.pool import Job as Task
from attest.conformance.process.pool import Outcome, guarded
from attest.conformance.process.workers import Workers
from tests.cluster.conftest import Processes
from tests.cluster.test_cluster import ended

pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret, reason="nothing can be compiled under TRITON_INTERPRET"
)
ONLY = Narrowing(targets=("sm_90",), features=("gqa",), head_dims=(64,), dtypes=("bfloat16",))


def compiled(source: str) -> Binary:
    """A compiler that refuses one source."""
    if source == "bad":
        raise RuntimeError("bad source")
    return Binary({"registers": len(source)})


def jobs(_case: Any, _device: Any) -> list[Job]:
    return [Job(kernel, {}, kernel) for kernel in ("good", "bad", "lost")]


TOY = Compiler("toy", frozenset({"sm_90"}), lambda: None, jobs, compiled, ("numpy", "no-such-package"))


class LossyWorkers:
    """Workers on another machine, of which one is lost with each call whose source is "lost"."""

    def perform(
        self,
        jobs: Any,
        timeout: float,
        wanted: Callable[[Task], bool],
        watch: Callable[[Task, float], None],
    ) -> Iterator[Outcome]:
        for job in jobs:
            if job.argument[-1] == "lost":
                yield Outcome(job, fault="lost 2 times", lost=True)
            else:
                sent = pickle.loads(pickle.dumps(guarded(pickle.loads(pickle.dumps(job)), None)))
                yield replace(sent, job=job)


def rows(matrix: Matrix) -> list[dict[str, Any]]:
    return [{**row, "seconds": 0} for row in matrix.to_json()["results"]]


def of(workers: Workers) -> list[dict[str, Any]]:
    return rows(compile_matrix("quick", ONLY, workers, compilers=(TOY,)))


def test_a_cluster_compiles_what_processes_do_and_a_lost_compilation_fails():
    there, here = of(LossyWorkers()), of(0)
    assert [row["status"] for row in there] == ["pass", "fail", "fail"]
    assert there[:2] == here[:2]
    assert there[2]["faults"] == ["does not compile: lost 2 times"]


def test_workers_must_have_the_compilers_of_the_caller(monkeypatch):
    monkeypatch.setattr(facts, "all_compilers", lambda: (TOY,))
    monkeypatch.setattr(facts, "version", lambda package: {"numpy": "0.1"}[package])
    monkeypatch.setattr(facts, "PackageNotFoundError", KeyError)
    found = compile_facts()
    assert found["versions"]["numpy"] == "0.1"
    assert "no-such-package" not in found["versions"]
    assert found["versions"]["jax"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--mixed",), "--mixed: expected with --cluster"),
        (
            ("--cluster", "local:1", "-n", "1"),
            "--cluster and -n: a cluster has workers of its own: give one of both",
        ),
        (("--cluster", "local:0"), "--cluster: got 'local:0', expected local:N with 1 to 1024 workers"),
    ],
    ids=["mixed", "workers", "address"],
)
def test_wrong_options_are_one_sentence(options, sentence, capsys):
    assert main(["compile", *options])
    assert capsys.readouterr().err == f"attest: {sentence}\n"


def test_the_command_compiles_on_a_local_cluster(processes: Processes):
    found = []
    for options in (("-n", 1), ("--cluster", "local:1")):
        narrow = ("--target", "sm_90", "--feature", "gqa", "--kernel", "forward", "--head-dim", 64)
        ended(processes.attest("compile", *narrow, *options, "--json", "matrix.json"))
        matrix = json.loads((processes.folder / "matrix.json").read_text())
        found.append([{**row, "seconds": 0} for row in matrix["results"]])
    assert found[0] == found[1] != []
