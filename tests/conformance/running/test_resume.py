"""A run that was cut short goes on where it was: what it had judged is kept, and the rest is judged."""

import json
import random
from dataclasses import replace
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.conformance.cli.resuming import before
from attest.conformance.files import FileError
from attest.conformance.record import JudgedCall, RunRecord, Verdict
from attest.conformance.records import journal as journals
from attest.conformance.records.journal import Journal, journal_path, read_calls
from attest.conformance.records.record_file import read_record, record_text
from attest.conformance.running import runner
from attest.conformance.running.environment import FACTS, differing
from attest.conformance.running.plan import Task, load_profile, tasks
from attest.conformance.running.resume import Before, call_key
from attest.conformance.running.runner import empty_record, run
from attest.conformance.sizes import sizes
from tests import toys
from tests.conformance.running.fakes import CASES, judged, planned, request, result, shrunk

HERE = {"device": "cpu", "versions": {"jax": "0.11.2"}, "flags": {}, "block_sizes": {"toys.right": "allxall"}}


def whole_run(monkeypatch) -> tuple[RunRecord, list[JudgedCall]]:
    """A run of two failures, and its calls as they are reported."""
    planned(monkeypatch)
    judged(monkeypatch, (CASES[0], "forward"), (CASES[1], "gradients"))
    shrunk(monkeypatch)
    reported: list[JudgedCall] = []
    record = run(request(), keep=lambda results, key: reported.append(JudgedCall(key, tuple(results))))
    return record, [call for call in reported if call.key]


@pytest.mark.parametrize("count", range(len(CASES) + 1))
def test_the_rest_of_a_run_makes_the_record_of_the_whole_run(monkeypatch, count):
    whole, calls = whole_run(monkeypatch)
    assert len(calls) == len(CASES)
    some = tuple(random.Random(count).sample(calls, count))
    asked: list[object] = []
    inner = runner.judge
    monkeypatch.setattr(runner, "judge", lambda s, case, checks: asked.append(case) or inner(s, case, checks))
    record = run(request(before=Before(some)))
    assert record_text(replace(record, seconds=0.0)) == record_text(replace(whole, seconds=0.0))
    assert len(asked) == len(CASES) - count
    assert not {case.id for case in asked} & {call.results[0].case.id for call in some}


def test_what_was_red_before_still_stops_a_run_that_ends_at_the_first_failure(monkeypatch):
    _, calls = whole_run(monkeypatch)
    failed = tuple(call for call in calls if any(each.verdict is Verdict.FAIL for each in call.results))
    record = run(request(before=Before(failed[:1]), fail_fast=True))
    assert not record.complete
    assert len(record.results) <= 4


@pytest.mark.parametrize("seed", [0, 1])
def test_each_call_of_a_plan_has_a_name_of_its_own_and_the_same_in_every_plan(seed):
    plans = [
        [
            call_key("toys.right", *draw)
            for task in tasks(toys.right, load_profile("quick"), seed)
            for draw in task.draws
        ]
        for _ in range(2)
    ]
    assert plans[0] == plans[1]
    assert len(set(plans[0])) == len(plans[0]) > 50


def test_the_name_of_a_call_depends_on_no_order_of_a_set():
    facts = [f"fact{number}" for number in range(40)]
    one, other = frozenset(facts), frozenset(reversed(facts))
    assert call_key("a", one, ()) == call_key("a", other, ())
    assert call_key("a", one, ()) != call_key("a", frozenset(facts[1:]), ())
    assert call_key("a", CASES[0], ("forward",)) != call_key("b", CASES[0], ("forward",))
    assert call_key("a", CASES[0], ("forward",)) != call_key("a", CASES[0], ("lse",))


@given(st.integers(0, 3), st.booleans())
def test_a_journal_gives_back_its_calls_and_is_resumed_again(tmp_path_factory, count, searched):
    path = tmp_path_factory.mktemp("journals") / "run.json.journal"
    header = replace(empty_record(request()), environment=HERE)
    calls = [JudgedCall(f"key{number}", (result(CASES[number]),)) for number in range(4)]
    journal = Journal(path, header, 5.0, calls[:count])
    for call in calls[count:]:
        journal.add(call.results, call.key)
    if searched:
        journal.add([replace(result(CASES[0]), minimal=True)])
    journal.add([], "a call without a case")
    journal.close()
    again = before(path, header)
    assert again.calls == (*calls, JudgedCall("a call without a case", ()))
    assert len(read_record(path).results) == 4 + searched
    Journal(path, header, 5.0, again.calls).close()
    assert before(path, header) == again


def test_a_journal_is_replaced_only_by_one_that_holds_what_it_held(tmp_path, monkeypatch):
    path = tmp_path / "run.json.journal"
    header = replace(empty_record(request()), environment=HERE)
    first = Journal(path, header, 5.0)
    first.add([result()], "key")
    first.close()
    held = path.read_bytes()

    def full(_path, _text):
        raise FileError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("attest.conformance.records.journal.write_text", full)
        with pytest.raises(FileError, match="no space"):
            Journal(path, header, 5.0, before(path, header).calls)
    assert path.read_bytes() == held


def test_a_journal_of_an_older_version_is_shown(tmp_path):
    path = tmp_path / "run.json.journal"
    header = replace(empty_record(request()), environment=HERE)
    journal = Journal(path, header, 5.0)
    journal.add([result()])
    journal.close()
    first, line, _ = path.read_text().split("\n")
    path.write_text("\n".join([first, json.dumps({"result": json.loads(line)["results"][0]}), ""]))
    assert read_record(path).results == (result(),)
    assert [call.key for call in read_calls(BytesIO(path.read_bytes()), "")[1]] == [""]


def test_a_journal_of_any_size_is_resumed_line_by_line(tmp_path, monkeypatch):
    path = tmp_path / "run.json.journal"
    header = replace(empty_record(request()), environment=HERE)
    journal = Journal(path, header, 5.0)
    for number in range(200):
        journal.add([result()], f"key{number}")
    journal.close()
    size = len(path.read_bytes().splitlines()[-1]) + 100
    assert path.stat().st_size > 20 * size
    monkeypatch.setattr(journals, "sizes", lambda: replace(sizes(), record_bytes=size, line_bytes=size))
    assert len(before(path, header).calls) == 200
    with path.open("ab") as file:
        file.write(b'{"judged": "cut off')
    assert len(before(path, header).calls) == 200
    with path.open("ab") as file:
        file.write(b"x" * size)
    with pytest.raises(ValueError, match=f"{path}: broken journal, line 202: it has more than {size} bytes"):
        before(path, header)


def test_a_journal_that_cannot_be_read_is_one_sentence(tmp_path):
    (tmp_path / "run.json.journal").mkdir()
    with pytest.raises(ValueError, match=r"run.json.journal: not a readable journal: Is a directory$"):
        before(tmp_path / "run.json", empty_record(request()))


OTHERS = {
    "seed": (replace(empty_record(request()), seed=1), "seed: got 0, expected 1"),
    "profile": (
        replace(empty_record(request()), profile="nightly"),
        "profile: got 'quick', expected 'nightly'",
    ),
    "shard": (replace(empty_record(request()), shard=(1, 2)), r"shard: got \(1, 1\), expected \(1, 2\)"),
    "narrowed": (
        replace(empty_record(request()), narrowed="--check lse"),
        "narrowed: got '', expected '--check",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_journal_of_another_run_is_refused(tmp_path, name):
    other, sentence = OTHERS[name]
    Journal(tmp_path / "run.json.journal", replace(empty_record(request()), environment=HERE), 5.0).close()
    with pytest.raises(ValueError, match=f"run.json.journal: it is of another run: {sentence}"):
        before(tmp_path / "run.json", replace(other, environment=HERE))


def test_every_fact_that_decides_a_result_tells_two_runs_apart(tmp_path):
    path = tmp_path / "run.json"
    Journal(journal_path(path), replace(empty_record(request()), environment=HERE), 5.0).close()
    here = empty_record(request())
    for changed in (
        {"device": "gpu"},
        {"versions": {"jax": "0.12"}},
        {"versions": {}},
        {"flags": {"XLA_FLAGS": "--x"}},
        {"commit": "abc"},
        {"block_sizes": {"another": "16x16"}},
        {"distributions": {"toy": {"name": "toys", "version": "2"}}},
    ):
        with pytest.raises(ValueError, match=f"of another run: {next(iter(changed))}"):
            before(path, replace(here, environment={**HERE, **changed}))
    assert before(path, replace(here, environment={**HERE, "cores": 64})) == Before()


def test_a_record_without_a_journal_has_nothing_to_go_on_with(tmp_path):
    with pytest.raises(
        ValueError, match=r"run.json: there is no .*run.json.journal, which a run with --json"
    ):
        before(tmp_path / "run.json", empty_record(request()))


def test_what_differs_is_named_down_to_the_single_fact():
    assert differing(HERE, HERE) == []
    assert differing({**HERE, "versions": {"jax": "1", "numpy": "2"}}, HERE) == [
        "versions: jax: got '1', expected '0.11.2'",
        "versions: numpy: got '2', expected None",
    ]
    assert "device" in FACTS


def test_a_task_goes_on_with_the_draws_that_are_left(monkeypatch):
    draws = [(case, ("forward",)) for case in CASES]
    planned(monkeypatch, Task("toys.right", *draws[0], also=tuple(draws[1:])))
    judged(monkeypatch)
    done = JudgedCall(call_key("toys.right", *draws[2]), (result(CASES[2]),))
    found: list[str] = []
    record = run(
        request(before=Before((done,))), keep=lambda results, _key: found.extend(r.case.id for r in results)
    )
    assert found == [CASES[number].id for number in (0, 1, 3)]
    assert len(record.results) == len(CASES)
