"""The calls of a run: every draw once in a seed, subjects in turn, and no draw long before it is needed."""

import time
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.process.pool import Job, Outcome
from attest.conformance.record import Verdict
from attest.conformance.running.plan import load_profile, tasks
from tests.alarms import calls, run
from tests.alarms.calls import TASKS_OF_A_ROUND, Call, jobs_of, judged, tally_of
from tests.alarms.run import _OverError, _Pace
from tests.alarms.subjects import OURS, choose, everyone, kind_of

NAMES = ("outsider.numpy", "emulator")
CALL = Call(("outsider.numpy.plain", "emulator.flash"), Case(q_len=3, kv_len=5), ("forward", "lse"), 7)


def test_every_draw_of_a_seed_is_judged_once_by_subjects_in_turn() -> None:
    groups, profile = choose(NAMES), load_profile("quick")
    jobs = list(jobs_of(groups, profile, [5], 4))
    for group in groups:
        mine = [job for job in jobs if job.argument.subjects[0] in {subject.name for subject in group}]
        drawn = [(call.argument.draw, call.argument.checks) for job in mine for call in job.calls]
        expected = [draw for task in tasks(group[0], profile, 5) for draw in task.draws]
        assert Counter(map(repr, drawn)) == Counter(map(repr, expected))
        turns = Counter(name for job in mine for name in job.argument.subjects)
        assert turns.keys() == {subject.name for subject in group}
        assert max(turns.values()) - min(turns.values()) <= 1


def test_each_kind_has_its_share_of_a_round_and_seeds_follow_each_other() -> None:
    jobs = list(jobs_of(choose(NAMES), load_profile("quick"), [5, 6], 1))
    shares = [TASKS_OF_A_ROUND[name] for name in NAMES]
    first = Counter(kind_of(everyone()[job.argument.subjects[0]]) for job in jobs[: sum(shares)])
    assert [first[name] for name in NAMES] == shares
    seeds = [job.argument.seed for job in jobs]
    assert seeds == sorted(seeds)
    assert set(seeds) == {5, 6}


def test_each_kind_of_subject_has_a_share() -> None:
    assert {kind_of(subject) for subject in everyone().values()} == TASKS_OF_A_ROUND.keys()
    assert set(OURS) <= TASKS_OF_A_ROUND.keys()


def test_a_call_counts_the_results_of_its_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[None] = []
    monkeypatch.setattr(calls, "drop_caches", lambda: dropped.append(None))
    monkeypatch.setattr(calls, "CALLS_PER_CACHE", 1)
    tally = tally_of(Outcome(Job("", judged, CALL), judged(None, CALL)))
    assert set(tally.counts) == {
        (subject, check, "PASS") for subject in CALL.subjects for check in CALL.checks
    }
    assert dropped == [None]


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome(Job("", judged, CALL), fault="the process died of signal 11"), Verdict.FAIL),
        (Outcome(Job("", judged, CALL), fault="did not finish", timed_out=True), Verdict.TIMEOUT),
        (Outcome(Job("", judged, CALL), fault="lost 2 times", lost=True), Verdict.ERROR),
    ],
    ids=["died", "late", "lost"],
)
def test_a_call_that_is_cut_short_is_red_and_kept(outcome: Outcome, verdict: Verdict) -> None:
    tally = tally_of(outcome)
    assert tally.red == 1
    (line,) = tally.lines
    assert (line["verdict"], line["message"], line["seed"]) == (verdict, outcome.fault, 7)
    assert (line["subject"], line["case"]) == (", ".join(CALL.subjects), CALL.draw.to_json())


def jobs(count: int) -> list[Job]:
    return [Job("", judged, replace(CALL, seed=seed)) for seed in range(count)]


def test_no_more_is_drawn_than_is_needed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "AHEAD", 2)
    pace = _Pace(time.monotonic() + 3600)
    ahead = pace.ahead(jobs(100))
    assert len(list(islice(ahead, 3))) == 3
    pace.done = 1
    assert len(list(islice(ahead, 1))) == 1
    pace.end = time.monotonic() - 1
    assert list(ahead) == []


def test_a_run_that_is_over_draws_nothing_and_waits_for_its_calls_for_a_while() -> None:
    now = time.monotonic()
    assert list(_Pace(now - 1).ahead(jobs(3))) == []
    _Pace(now - 1).watch(jobs(1)[0], 0.0)
    with pytest.raises(_OverError):
        _Pace(now - 2 * run.PATIENCE_SECONDS).watch(jobs(1)[0], 0.0)
