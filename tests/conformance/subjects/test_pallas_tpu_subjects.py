"""The TPU subject: run where it can be, and asked enough in the quick gate."""

from functools import cache

import pytest

from attest.conformance.running.plan import Task, load_profile, tasks
from attest.conformance.subject import find
from tests.conformance.subjects.crossed import blocks_crossed

SUBJECT = find("pallas.tpu_interpret")


@cache
def quick() -> tuple[Task, ...]:
    return tuple(tasks(SUBJECT, load_profile("quick"), seed=0))


@pytest.mark.parametrize("threads", [None, "8"])
def test_it_runs_in_a_process_that_asks_for_its_threads(
    monkeypatch: pytest.MonkeyPatch, threads: str | None
) -> None:
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    if threads is not None:
        monkeypatch.setenv("PJRT_NPROC", threads)
    reason = SUBJECT.ready()
    assert reason is None if threads else "needs a process started with PJRT_NPROC=8" in (reason or "")


def test_the_gate_crosses_blocks_both_ways_in_every_order_of_a_grid() -> None:
    crossed = [(task.case.tiling, sorted(blocks_crossed(SUBJECT, task.case))) for task in quick()]
    assert sum(fewer >= 3 for _, (fewer, _) in crossed) >= 5
    for number in range(len(SUBJECT.tilings)):
        assert any(tiling == number and fewer >= 2 and more >= 3 for tiling, (fewer, more) in crossed)
    seeds = [tiling.options["seed"] for tiling in SUBJECT.tilings]
    assert len(set(seeds)) == len(seeds) >= 3


def test_the_gate_asks_each_feature_in_each_dtype_or_the_other() -> None:
    asked = {feature for task in quick() for feature in task.case.features}
    assert asked == SUBJECT.features
    assert {task.case.dtype for task in quick()} == set(SUBJECT.dtypes)
