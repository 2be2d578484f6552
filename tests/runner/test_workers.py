"""Kernels that hang, die or leave cost their own task and nothing else."""

import pytest

from conformance import runner
from conformance.case import Case
from conformance.plan import Task
from conformance.record import Verdict
from conformance.runner import run
from conformance.workers import Job, perform
from tests import toys
from tests.runner.fakes import planned, request

LIMITS = runner.limits()
PLAIN, CAUSAL = Case(q_len=2, kv_len=2), Case(q_len=2, kv_len=2, causal=True)


def _verdicts(record):
    return {(r.subject.partition(":")[2], r.case.causal): (r.verdict, r.message) for r in record.results}


def test_the_rest_of_the_run_survives_a_death_and_a_hang(monkeypatch):
    names = ("dies_if_causal", "hangs", "exits", "talks")
    planned(monkeypatch, Task("", PLAIN, ("forward",)), Task("", CAUSAL, ("forward",)))
    subjects = {f"tests.toys:{name}": getattr(toys, name) for name in names}
    record = run(request(subjects=subjects, workers=2, timeout=4.0))
    assert record.complete
    assert _verdicts(record) == {
        ("dies_if_causal", False): (Verdict.PASS, ""),
        ("dies_if_causal", True): (Verdict.FAIL, "the process died with exit status 3"),
        ("hangs", False): (Verdict.FAIL, "did not finish within 4 s"),
        ("hangs", True): (Verdict.FAIL, "did not finish within 4 s"),
        ("exits", False): (Verdict.FAIL, "raised SystemExit: no"),
        ("exits", True): (Verdict.FAIL, "raised SystemExit: no"),
        ("talks", False): (Verdict.PASS, ""),
        ("talks", True): (Verdict.PASS, ""),
    }
    assert all(r.clauses[:2] == ("S1", "S16") for r in record.results)
    # What hung or died is not asked again; what raised is, in search of a simpler case.
    assert {r.subject for r in record.results if r.minimal} == {"tests.toys:exits"}


def test_a_subject_that_only_dies_is_given_up(monkeypatch):
    monkeypatch.setattr(runner, "limits", lambda: {**LIMITS, "faults_per_subject": 1})
    planned(monkeypatch, *(Task("", Case(seed=seed), ("forward",)) for seed in range(40)))
    record = run(request(subjects={"tests.toys:dies": toys.dies}, workers=1))
    assert 1 <= len(record.results) <= 7
    assert {r.verdict for r in record.results} == {Verdict.FAIL}
    assert "tests.toys:dies: hung or died" in record.problems[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_no_longer_wanted_is_not_done(workers):
    jobs = [Job("tests.toys:right", _answer, number) for number in range(6)]
    outcomes = perform(
        jobs, {"tests.toys:right": toys.right}, workers, 60.0, lambda job: job.argument % 2 == 1
    )
    assert [outcome.value for outcome in outcomes] == ["toys.right 1", "toys.right 3", "toys.right 5"]


def test_closing_stops_the_workers():
    jobs = [Job("tests.toys:right", _answer, number) for number in range(3)]
    outcomes = perform(jobs, {"tests.toys:right": toys.right}, 1, 60.0)
    assert next(outcomes).value == "toys.right 0"
    outcomes.close()
    assert list(outcomes) == []


def _answer(subject, number):
    return f"{subject.name} {number}"
