"""Kernels that hang, die or leave cost their own task and nothing else."""

import subprocess
import time
from pathlib import Path

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.process.pool import Pool
from attest.conformance.process.settings import WorkerError
from attest.conformance.process.workers import Job, perform
from attest.conformance.record import Result, Verdict
from attest.conformance.running import runner
from attest.conformance.running.plan import Task
from attest.conformance.running.runner import run
from tests import toys
from tests.conformance.running.fakes import planned, request

LIMITS = runner.limits()
PLAIN, CAUSAL = Case(q_len=2, kv_len=2), Case(q_len=2, kv_len=2, causal=True)


def _verdicts(record):
    return {
        (r.subject.partition(":")[2], r.case.causal): (r.verdict, r.message.partition("\n")[0])
        for r in record.results
    }


def test_the_rest_of_the_run_survives_a_death(monkeypatch):
    names = ("dies_if_causal", "leaves", "exits", "talks")
    planned(monkeypatch, Task("", PLAIN, ("forward",)), Task("", CAUSAL, ("forward",)))
    subjects = {f"tests.toys:{name}": getattr(toys, name) for name in names}
    record = run(request(subjects=subjects, workers=2))
    assert record.complete
    assert _verdicts(record) == {
        ("dies_if_causal", False): (Verdict.PASS, ""),
        ("dies_if_causal", True): (Verdict.FAIL, "the process died with exit status 3"),
        ("leaves", False): (Verdict.FAIL, "the process died with exit status 0"),
        ("leaves", True): (Verdict.FAIL, "the process died with exit status 0"),
        ("exits", False): (Verdict.FAIL, "raised SystemExit: no"),
        ("exits", True): (Verdict.FAIL, "raised SystemExit: no"),
        ("talks", False): (Verdict.PASS, ""),
        ("talks", True): (Verdict.PASS, ""),
    }
    assert all(r.clauses[:2] == ("S1", "S16") for r in record.results)
    # What died is not asked again; what raised is, in search of a simpler case.
    assert {r.subject for r in record.results if r.minimal} == {"tests.toys:exits"}
    assert {r.phase for r in record.results if "died" in r.message} == {"running"}


@pytest.mark.found_outside
def test_a_subject_that_changes_numpy_spoils_no_other(monkeypatch):
    """Neither by a call nor by the import of its module; also not when failures are shrunk."""
    planned(monkeypatch, Task("", PLAIN, ("forward", "gradients")), Task("", CAUSAL, ("forward",)))
    subjects = {
        "tests.toys:patches_numpy": toys.patches_numpy,
        "tests.patches_numpy:subject": toys.right,
        "tests.toys:right": toys.right,
        "tests.toys:top_left": toys.top_left,
    }
    record = run(request(subjects=subjects, workers=1))
    assert record.complete
    verdicts = {r.verdict for r in record.results if r.subject == "tests.toys:right"}
    assert verdicts == {Verdict.PASS}
    assert {r.verdict for r in record.results if r.subject == "tests.toys:top_left"} == {Verdict.PASS}
    spoilt = {r.verdict for r in record.results if "patches_numpy" in r.subject}
    assert spoilt & {Verdict.ERROR, Verdict.FAIL}


def test_a_hang_is_one_result_that_names_its_phase(monkeypatch):
    planned(monkeypatch, Task("", PLAIN, ("forward", "lse", "gradients")))
    record = run(request(subjects={"tests.toys:hangs": toys.hangs}, workers=1, timeout=8.0))
    (hang,) = record.results
    assert (hang.verdict, hang.check, hang.phase) == (Verdict.TIMEOUT, "forward", "running")
    assert hang.message == (
        "did not finish within 8 s, in the phase running; lse, gradients not judged on this case"
    )
    assert record.status == "fail"


def test_cases_of_one_task_are_judged_whatever_becomes_of_the_others(monkeypatch):
    """They share a process, each has its own time and outcome, and what is left goes to another process."""
    forward = ("forward",)
    cases = [PLAIN, CAUSAL, Case(q_len=3, kv_len=3), Case(q_len=3, kv_len=3, causal=True), Case(q_len=1)]
    first, *others = cases
    planned(monkeypatch, Task("", first, forward, tuple((case, forward) for case in others)))
    kept: list[Result] = []
    subjects = {"tests.toys:dies_if_causal": toys.dies_if_causal}
    record = run(request(subjects=subjects, workers=1), keep=lambda results, _key: kept.extend(results))
    assert [result.case for result in kept] == cases
    assert [r.verdict for r in kept] == [Verdict.FAIL if case.causal else Verdict.PASS for case in cases]
    assert record.complete


def test_a_search_for_a_simpler_case_that_hangs_keeps_the_failure(monkeypatch):
    monkeypatch.setattr(runner, "limits", lambda: {**LIMITS, "shrink_seconds": 8.0})
    planned(monkeypatch, Task("", Case(q_len=2, kv_len=3), ("forward",)))
    name = "tests.toys:wrong_at_two_queries_else_hangs"
    record = run(request(subjects={name: toys.wrong_at_two_queries_else_hangs}, workers=1))
    assert [(r.verdict, r.phase, r.case.q_len) for r in record.results] == [
        (Verdict.FAIL, "", 2),
        (Verdict.TIMEOUT, "shrinking", 2),
    ]


def test_a_worker_that_cannot_start_is_one_sentence(monkeypatch):
    jobs = [Job("tests.ends_its_process:subject", _answer, 0)]
    with pytest.raises(WorkerError, match="cannot start: the process died with exit status 7"):
        list(perform(jobs, {"tests.ends_its_process:subject": toys.right}, 1, 60.0))


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


@pytest.mark.parametrize("workers", [0, 1])
def test_what_runs_is_reported(workers):
    jobs = [Job("tests.toys:right", _answer, number) for number in range(3)]
    seen = []
    outcomes = perform(
        jobs, {"tests.toys:right": toys.right}, workers, 60.0, watch=lambda call, _seconds: seen.append(call)
    )
    assert len(list(outcomes)) == 3
    assert list(dict.fromkeys(seen)) == jobs


@pytest.mark.parametrize("workers", [0, 1])
def test_all_jobs_are_drawn_while_the_first_one_runs(workers, tmp_path):
    """So the number of tasks is known early, however many there are."""
    drawn = []

    def jobs():
        for number in range(50):
            drawn.append(number)
            yield Job("tests.toys:right", _after, (str(tmp_path / "go"), number))
        (tmp_path / "go").touch()

    outcomes = perform(jobs(), {"tests.toys:right": toys.right}, workers, 60.0)
    assert next(outcomes).value == 0
    assert len(drawn) == 50
    outcomes.close()


def test_closing_stops_the_workers():
    jobs = [Job("tests.toys:right", _answer, number) for number in range(3)]
    outcomes = perform(jobs, {"tests.toys:right": toys.right}, 1, 60.0)
    assert next(outcomes).value == "toys.right 0"
    outcomes.close()
    assert list(outcomes) == []


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0, 3.0])
def test_a_worker_that_is_starting_when_the_run_ends_says_nothing(capfd, seconds):
    pool = Pool(2, 60.0)
    for number in range(2):
        pool.give(Job("tests.toys:right", _answer, number))
    time.sleep(seconds)
    pool.stop()
    assert capfd.readouterr().err == ""


def test_what_a_job_has_started_ends_with_it(tmp_path):
    """A kernel's own child holds what its parent had open, and must not keep the run waiting."""
    job = Job("tests.toys:right", _with_a_child, str(tmp_path / "child"))
    (outcome,) = perform([job], {"tests.toys:right": toys.right}, 1, 8.0)
    assert outcome.timed_out
    child = int((tmp_path / "child").read_text())
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def _after(_subject, argument):
    """Return a number once a file exists; None if it never does."""
    path, number = argument
    for _ in range(1000):
        if Path(path).exists():
            return number
        time.sleep(0.01)
    return None


def _with_a_child(_subject, path):
    child = subprocess.Popen(["sleep", "600"])
    Path(path).write_text(str(child.pid))
    child.wait()


def _answer(subject, number):
    return f"{subject.name} {number}"
