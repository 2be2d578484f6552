"""The simplest failures have pictures, if the kernel shows something wrong in them."""

from dataclasses import replace

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.record import Verdict, merge_records
from attest.conformance.running import pictures, runner
from attest.conformance.running.judge import judge
from attest.conformance.running.pictures import with_pictures
from attest.conformance.running.plan import Task
from attest.conformance.running.runner import run
from tests import toys
from tests.conformance.running.fakes import planned, request

TOP_LEFT = "tests.toys:top_left"
CAUSAL = Case(q_len=2, kv_len=4, head_dim=2, causal=True)


def drawn(call=toys.top_left.call, check="forward", case=CAUSAL, **changes):
    """The picture of a failure of a subject, found as a run finds it."""
    subject = replace(toys.top_left, call=call)
    (failing,) = judge(toys.top_left, case, (check,))
    assert failing.verdict is Verdict.FAIL
    minimal = replace(failing, subject=TOP_LEFT, minimal=True, **changes)
    (found,) = with_pictures([minimal], {TOP_LEFT: subject}, 0)
    assert replace(found, picture=None) == minimal
    return found.picture


def test_a_wrong_mask_is_drawn():
    shown = drawn()
    assert shown.seen == ("#??.", "##??")
    assert (shown.differ, shown.rows, shown.keys) == (4, 2, 4)


def test_only_the_simplest_failures_are_drawn():
    (failing,) = judge(toys.top_left, CAUSAL, ("forward",))
    assert with_pictures([failing], {TOP_LEFT: toys.top_left}, 0) == [failing]


def test_a_failure_that_visibility_does_not_explain_has_no_picture():
    assert drawn(toys.right.call) is None
    assert drawn(phase="running") is None


@pytest.mark.parametrize("call", [toys.raises.call, toys.nothing.call], ids=["raises", "returns nothing"])
def test_a_kernel_that_fails_while_it_is_drawn_has_no_picture(call):
    assert drawn(call) is None


def test_a_large_case_has_no_picture(monkeypatch):
    few = {"picture_seconds": 20.0, "pictures_seconds": 40.0, "picture_calls": 3}
    monkeypatch.setattr(pictures, "limits", lambda: few)
    assert drawn() is None


def test_a_slow_kernel_has_no_picture(monkeypatch):
    no_time = {"picture_seconds": 0.0, "pictures_seconds": 40.0, "picture_calls": 256}
    monkeypatch.setattr(pictures, "limits", lambda: no_time)
    assert drawn() is None


LARGER = Case(q_len=3, kv_len=6, head_dim=2, causal=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_has_a_picture_of_each_simplest_failure(monkeypatch, workers):
    planned(monkeypatch, Task(TOP_LEFT, LARGER, ("forward", "gradients")))
    record = run(request(subjects={TOP_LEFT: toys.top_left}, workers=workers))
    minimal = [each for each in record.results if each.minimal]
    assert {each.check for each in minimal} == {"forward", "gradients"}
    assert all(each.picture is not None and each.picture.differ for each in minimal)
    assert all(each.picture is None for each in record.results if not each.minimal)
    again = run(request(subjects={TOP_LEFT: toys.top_left}, workers=workers))
    assert [each.picture for each in again.results] == [each.picture for each in record.results]


def test_a_run_that_does_not_shrink_draws_nothing(monkeypatch):
    planned(monkeypatch, Task(TOP_LEFT, LARGER, ("forward",)))
    record = run(request(subjects={TOP_LEFT: toys.top_left}, shrink=False))
    assert {(each.verdict, each.picture) for each in record.results} == {(Verdict.FAIL, None)}


def test_merged_shards_have_the_pictures_of_the_run(monkeypatch):
    """Each shard finds its own case the simplest, and draws it; in the whole run, only one of them is."""
    other = replace(LARGER, seed=1, q_len=4)
    planned(
        monkeypatch, *(Task(TOP_LEFT, case, ("forward",)) for case in (LARGER, other, replace(other, seed=2)))
    )
    # Searches end where they begin.
    monkeypatch.setattr(runner, "shrink", lambda subject, failures, *_: [each.result for each in failures])
    asked = {"subjects": {TOP_LEFT: toys.top_left}}
    parts = [run(request(shard=(number, 3), **asked)) for number in (1, 2, 3)]
    drawn_apart = sum(each.picture is not None for part in parts for each in part.results)
    merged, whole = merge_records(parts), run(request(**asked))
    assert [each.picture for each in merged.results] == [each.picture for each in whole.results]
    assert sum(each.picture is not None for each in whole.results) == 1 < drawn_apart
