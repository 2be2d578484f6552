"""The simplest failures have pictures, if the kernel shows something wrong in them."""

from dataclasses import replace

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.record import Verdict
from attest.conformance.running import pictures
from attest.conformance.running.judge import judge
from attest.conformance.running.pictures import with_pictures
from tests import toys

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
