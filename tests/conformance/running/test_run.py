"""A run keeps everything that it finds, names what it could not find, and shrinks new failures only."""

import signal
from collections import Counter
from dataclasses import replace

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.record import Measurement, Result, Verdict, merge_records
from attest.conformance.records.record_file import write_record
from attest.conformance.records.schema import record_to_json
from attest.conformance.running import progress, runner
from attest.conformance.running.expectations import Expectation
from attest.conformance.running.fit import RequestError
from attest.conformance.running.plan import Restriction, Task
from attest.conformance.running.progress import Progress
from attest.conformance.running.runner import in_shard, run
from tests import toys
from tests.conformance.running.fakes import CASES, PROFILE, judged, planned, request, result, shrunk

KNOWN = Expectation("toys.right", "forward", "known to fail", "https://example.org/1", case={"q_len": 9})


def test_every_task_is_judged_by_every_check(monkeypatch):
    planned(monkeypatch)
    judged(monkeypatch)
    record = run(request())
    assert record.complete
    assert record.status == "pass"
    assert Counter((r.case, r.check) for r in record.results) == Counter(
        (case, check) for case in CASES for check in ("forward", "gradients")
    )


def test_the_simplest_failure_of_each_check_is_shrunk_and_both_cases_are_kept(monkeypatch):
    planned(monkeypatch)
    judged(monkeypatch, (CASES[0], "forward"), (CASES[1], "forward"), (CASES[2], "gradients"))
    searched = shrunk(monkeypatch)
    record = run(request())
    assert [(r.check, r.case) for r in searched] == [("forward", CASES[1]), ("gradients", CASES[2])]
    minimal = [r for r in record.results if r.minimal]
    assert [(r.check, r.case) for r in minimal] == [("forward", Case(q_len=1)), ("gradients", Case(q_len=1))]
    assert record.counts["FAIL"] == 5


def test_a_failure_of_precision_does_not_hide_one_of_meaning(monkeypatch):
    numbers = Measurement("out", 1, 2.0, 1.0, 1.0, 0.0, broken=("bound",))
    found = {
        CASES[1]: result(CASES[1], verdict=Verdict.FAIL, measurements=(numbers,)),
        CASES[0]: result(CASES[0], verdict=Verdict.FAIL, message="raised"),
        CASES[2]: result(
            CASES[2], verdict=Verdict.FAIL, measurements=(replace(numbers, broken=("z", "semantics")),)
        ),
        CASES[3]: result(CASES[3]),
    }
    planned(monkeypatch, *(Task("toys.right", case, ("forward",)) for case in CASES))
    monkeypatch.setattr(runner, "judge", lambda subject, case, checks: [found[case]])
    searched = shrunk(monkeypatch)
    run(request())
    assert [(r.case, r.semantic) for r in searched] == [(CASES[1], False), (CASES[0], True)]
    assert found[CASES[2]].semantic
    assert not found[CASES[3]].semantic


def test_a_case_that_is_the_simplest_already_is_kept_once(monkeypatch):
    planned(monkeypatch)
    judged(monkeypatch, (CASES[0], "forward"))
    shrunk(monkeypatch, simplest=None)
    failures = [r for r in run(request()).results if r.verdict is Verdict.FAIL]
    assert [(r.case, r.minimal) for r in failures] == [(CASES[0], True)]


def test_an_expected_failure_is_never_shrunk(monkeypatch):
    planned(monkeypatch)
    judged(monkeypatch, (CASES[0], "forward"))
    searched = shrunk(monkeypatch)
    record = run(request(expectations=(KNOWN,)))
    assert searched == []
    (known,) = (r for r in record.results if r.verdict is Verdict.XFAIL)
    assert known.link == KNOWN.link
    assert KNOWN.reason in known.message
    assert record.status == "pass"


def test_a_new_failure_that_shrinks_into_a_known_one_keeps_its_own_case(monkeypatch):
    planned(monkeypatch)
    judged(monkeypatch, (CASES[2], "forward"), (CASES[0], "forward"))
    shrunk(monkeypatch, simplest=CASES[0])
    record = run(request(expectations=(KNOWN,)))
    assert [r.case for r in record.results if r.verdict is Verdict.FAIL] == [CASES[2]]


def test_the_one_case_of_a_refusal_is_its_simplest(monkeypatch):
    planned(monkeypatch, Task("toys.right", CASES[0], ("refusal.query_rank",)))
    judged(monkeypatch, (CASES[0], "refusal.query_rank"))
    searched = shrunk(monkeypatch)
    (failure,) = run(request()).results
    assert failure.minimal
    assert searched == []


def test_an_interrupted_run_is_partial_and_says_so(monkeypatch):
    def judge(subject, case, checks):
        if case == CASES[2]:
            signal.raise_signal(signal.SIGINT)
        return [Result(subject.name, check, (), case, Verdict.PASS) for check in checks]

    planned(monkeypatch)
    monkeypatch.setattr(runner, "judge", judge)
    kept: list[Result] = []
    record = run(request(), keep=lambda results, _key: kept.extend(results))
    assert not record.complete
    assert record.note.startswith("interrupted, judging: 2 of 4 tasks done")
    assert {r.case for r in record.results} == {r.case for r in kept} == {CASES[0], CASES[1]}
    assert record.status == "fail"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_a_subject_raises_ends_nothing(monkeypatch, kind):
    def judge(subject, case, checks):
        if case == CASES[2]:
            raise kind("not I")
        return [Result(subject.name, check, (), case, Verdict.PASS) for check in checks]

    planned(monkeypatch)
    monkeypatch.setattr(runner, "judge", judge)
    record = run(request())
    assert record.complete
    messages = {r.message for r in record.results if r.case == CASES[2]}
    assert {message.splitlines()[0] for message in messages} == {f"raised {kind.__name__}: not I"}
    assert record.counts["PASS"] == 6


def test_results_are_handed_over_as_they_are_found(monkeypatch):
    def judge(subject, case, checks):
        before.append([result.case for result in kept])
        return [result(case)]

    planned(monkeypatch, *(Task("toys.right", case, ("forward",)) for case in CASES[:2]))
    monkeypatch.setattr(runner, "judge", judge)
    kept: list[Result] = []
    before: list[list[Case]] = []
    assert run(request(), keep=lambda results, _key: kept.extend(results)).complete
    assert before == [[], [CASES[0]]]
    assert [result.case for result in kept] == [CASES[0], CASES[1]]


def test_a_run_that_is_to_fail_fast_ends_at_its_first_red_verdict(monkeypatch):
    planned(monkeypatch)
    judged(monkeypatch, (CASES[1], "forward"))
    searched = shrunk(monkeypatch)
    record = run(request(fail_fast=True))
    assert {r.case for r in record.results} == {CASES[0], CASES[1]}
    assert not record.complete
    assert record.note == "stopped at the first failing verdict, judging: 2 of 4 tasks done"
    assert searched == []
    judged(monkeypatch)
    assert run(request(fail_fast=True)).complete


@pytest.fixture
def clock(monkeypatch):
    """A clock of the run that goes on by a second with every case that is judged."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def begin(*failing):
        judged(monkeypatch, *failing)
        judge = runner.judge

        def slow(*asked):
            now[0] += 1
            return judge(*asked)

        monkeypatch.setattr(runner, "judge", slow)

    return begin


def test_many_checks_of_one_family_are_named_together(monkeypatch, clock):
    refusals = tuple(f"refusal.{name}" for name in ("a", "b", "c", "d"))
    left = Task("toys.right", Case(causal=True), ("lse", *refusals, "positions.shard"))
    planned(monkeypatch, *(Task("toys.right", case, ("forward",)) for case in CASES[:2]), left)
    clock()
    assert "of the 6 checks lse, positions.shard, 4 of refusal.*" in run(request(budget=2)).note


def test_a_run_begins_nothing_after_its_budget_and_says_what_it_left(monkeypatch, clock):
    tasks = [Task("toys.right", case, ("forward",)) for case in CASES[:3]]
    left = Task("toys.right", Case(causal=True, soft_cap=2.0), ("forward", "poison", "lse"))
    planned(monkeypatch, *tasks, left)
    clock((CASES[0], "forward"))
    searched = shrunk(monkeypatch)
    record = run(request(budget=2))
    assert {r.case for r in record.results} == {CASES[0], CASES[1]}
    assert record.note == (
        "stopped after its 2 seconds: 2 of 4 cases not judged; no case judged of the 2 features causal,"
        " soft_cap; no case judged of the 2 checks lse, poison"
    )
    assert not record.complete
    assert searched == []


def test_a_passing_run_that_its_budget_cut_fails(monkeypatch, clock):
    planned(monkeypatch)
    clock()
    record = run(request(budget=1))
    assert not any(result.verdict.red for result in record.results)
    assert (record.status, record.whole) == ("fail", False)


def test_a_record_names_the_seconds_of_the_run(monkeypatch, clock):
    planned(monkeypatch)
    clock()
    record = run(request())
    assert record.seconds == len(CASES)
    assert replace(record, seconds=0.0) == record


def test_a_run_knows_its_total_before_anything_is_judged(monkeypatch, clock):
    planned(monkeypatch)
    clock()
    seen: list[Progress] = []
    run(request(), watch=seen.append)
    assert [(now.done, now.total) for now in seen if now.planned] == [(now.done, len(CASES)) for now in seen]
    assert [now.done for now in seen] == [0, 1, 1, 2, 2, 3, 3, 4]


def test_a_run_names_the_subject_and_the_features_that_it_judges(monkeypatch, clock):
    tasks = [Task("toys.right", case, ("forward",)) for case in (CASES[0], Case(causal=True, soft_cap=2.0))]
    planned(monkeypatch, *tasks)
    clock()
    seen: list[Progress] = []
    run(request(), watch=seen.append)
    assert list(dict.fromkeys(now.now for now in seen)) == [
        "toys.right: no option",
        "toys.right: causal, soft_cap",
    ]


def test_the_time_left_follows_from_the_speed_after_the_first_task(monkeypatch, clock):
    planned(monkeypatch, *(Task("toys.right", Case(seed=seed), ("forward",)) for seed in range(6)))
    clock()
    seen: list[Progress] = []
    run(request(), watch=seen.append)
    left = {now.done: now.left for now in seen}
    assert left == {0: None, 1: None, 2: None, 3: 3.0, 4: 2.0, 5: 1.0, 6: None}


def test_the_time_left_is_at_most_that_of_the_budget(monkeypatch, clock):
    planned(monkeypatch, *(Task("toys.right", Case(seed=seed), ("forward",)) for seed in range(30)))
    clock()
    seen: list[Progress] = []
    run(request(budget=5), watch=seen.append)
    assert {now.done: now.left for now in seen}[4] == 1.0


def test_searches_and_pictures_are_stages_of_a_run(monkeypatch):
    planned(monkeypatch)
    judged(monkeypatch, (CASES[0], "forward"))
    shrunk(monkeypatch)
    seen: list[Progress] = []
    run(request(), watch=seen.append)
    assert list(dict.fromkeys((now.stage, now.total) for now in seen)) == [
        ("judging", 4),
        ("shrinking", 1),
        ("drawing pictures", 1),
    ]


def test_tasks_of_a_subject_that_is_given_up_are_no_longer_part_of_the_total(monkeypatch):
    limits = runner.limits()
    monkeypatch.setattr(runner, "limits", lambda: {**limits, "faults_per_subject": 1})
    planned(monkeypatch)

    def judge(subject, case, checks):
        if subject is toys.top_left:
            raise ValueError("no")
        return [result(case, check) for check in checks]

    monkeypatch.setattr(runner, "judge", judge)
    seen: list[Progress] = []
    subjects = {"toys.top_left": toys.top_left, "toys.right": toys.right}
    record = run(request(subjects=subjects, shrink=False), watch=seen.append)
    assert "toys.top_left: hung or died" in record.problems[0]
    judging = [now for now in seen if now.stage == "judging"]
    assert (judging[0].total, judging[-1].total, judging[-1].done) == (8, 5, 5)


def test_a_record_names_the_checks_that_did_not_run(monkeypatch):
    planned(monkeypatch)
    judged(monkeypatch)
    profile = replace(PROFILE, kinds={"drawn": {}, "poisoned": {}})
    left_out = run(request(profile=profile)).left_out
    (of_lse,) = (text for text in left_out if text.startswith("toys.right: does not return lse: "))
    assert "lse" in of_lse.removeprefix("toys.right: does not return lse: ").split(", ")
    (of_profile,) = (text for text in left_out if "right: the profile quick has no such cases: " in text)
    assert "purity" in of_profile
    assert "production" in of_profile
    assert not any("refusal" in text or "forward" in text for text in left_out)
    assert run(request(profile=profile, only=Restriction(checks=("forward",)))).left_out == ()


def test_a_budget_that_is_enough_changes_nothing(monkeypatch, clock):
    planned(monkeypatch)
    clock((CASES[0], "forward"))
    shrunk(monkeypatch)
    assert run(request(budget=100)) == run(request())


def test_a_budget_ends_searches_too(monkeypatch, clock):
    planned(monkeypatch)
    clock((CASES[0], "forward"))
    searched = shrunk(monkeypatch)
    record = run(request(budget=len(CASES)))
    assert record.complete
    assert searched == []
    assert [result.case for result in record.results if result.verdict is Verdict.FAIL] == [CASES[0]]


@pytest.mark.parametrize(
    ("kind", "workers"),
    [(ZeroDivisionError, 0), (SystemExit, 0), (KeyboardInterrupt, 0), (GeneratorExit, 0), (SystemExit, 1)],
)
def test_a_subject_without_drawable_cases_is_a_problem_and_spoils_nothing_else(monkeypatch, kind, workers):
    def tasks(subject, profile, seed, only):
        yield Task("toys.right", CASES[0], ("forward",))
        raise kind("in the numerics that it declares")

    monkeypatch.setattr(runner, "tasks", tasks)
    record = run(request(subjects={"tests.toys:right": toys.right}, workers=workers))
    assert len(record.results) == 1
    assert record.status == "fail"
    assert f"{kind.__name__}: in the numerics" in record.problems[0]


def test_a_crash_of_the_run_itself_has_handed_over_what_it_had(monkeypatch):
    def watch(now):
        if now.done:
            raise OSError("the terminal is gone")

    planned(monkeypatch)
    judged(monkeypatch)
    kept: list[Result] = []
    with pytest.raises(OSError, match="terminal is gone"):
        run(request(), watch, keep=lambda results, _key: kept.extend(results))
    assert {r.case for r in kept} == {CASES[0]}


def test_an_impossible_restriction_is_refused_before_anything_is_saved(monkeypatch):
    def tasks(subject, profile, seed, only):
        raise ValueError("does not declare bias")
        yield

    kept = []
    monkeypatch.setattr(runner, "tasks", tasks)
    with pytest.raises(RequestError, match="does not declare bias"):
        run(
            request(only=Restriction(features=frozenset({"bias"}))),
            keep=lambda results, _key: kept.extend(results),
        )
    assert kept == []


def test_a_run_of_nothing_fails(monkeypatch):
    monkeypatch.setattr(runner, "tasks", lambda subject, profile, seed, only: iter(()))
    record = run(request())
    assert record.status == "fail"
    assert record.problems == ("nothing was judged: no case matches the options",)


def test_two_runs_write_the_same_bytes_but_for_their_times(monkeypatch, tmp_path):
    planned(monkeypatch)
    judged(monkeypatch, (CASES[0], "forward"))
    shrunk(monkeypatch)
    paths = [tmp_path / name for name in ("first.json", "second.json")]
    for path in paths:
        write_record(replace(run(request()), seconds=0.0), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_shards_share_out_every_task_once(monkeypatch):
    each = [Task("toys.right", Case(seed=seed), ("forward",)) for seed in range(60)]
    planned(monkeypatch, *each)
    judged(monkeypatch)
    parts = [run(request(shard=(number, 3))) for number in (1, 2, 3)]
    assert all(len(part.results) > 10 for part in parts)
    whole = run(request())
    merged = merge_records(parts)
    assert record_to_json(replace(merged, seconds=whole.seconds)) == record_to_json(whole)


def test_a_shard_knows_its_tasks_whatever_else_is_drawn():
    task = Task("toys.right", CASES[0], ("forward",))
    homes = [number for number in (1, 2, 3, 4) if in_shard("toys.right", task, (number, 4))]
    assert len(homes) == 1


def test_records_of_other_runs_do_not_merge(monkeypatch):
    planned(monkeypatch)
    judged(monkeypatch)
    first, second = (run(request(shard=(number, 2))) for number in (1, 2))
    with pytest.raises(ValueError, match="shards: got 1/2, expected 1/2, 2/2"):
        merge_records([first])
    with pytest.raises(ValueError, match="shards"):
        merge_records([first, first])
    with pytest.raises(ValueError, match="seed"):
        merge_records([first, run(request(shard=(2, 2), seed=1))])
    with pytest.raises(ValueError, match="narrowed"):
        merge_records([first, run(request(shard=(2, 2), narrowed="--dtype float32"))])
    assert merge_records([second, first]).complete
