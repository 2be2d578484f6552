"""The searches of a run: each is given what those before it found."""

from dataclasses import replace

from attest.conformance.running import runner
from attest.conformance.running.plan import Task
from attest.conformance.running.runner import run
from tests.conformance.running.fakes import CASES, SIMPLEST, judged, planned, request


def test_a_search_is_given_what_those_before_it_found_for_the_same_subject(monkeypatch):
    planned(monkeypatch, Task("toys.right", CASES[0], ("forward",)), Task("toys.right", CASES[1], ("lse",)))
    judged(monkeypatch, (CASES[0], "forward"), (CASES[1], "lse"))
    given = []

    def shrink(_subject, failures, _evaluations, _seconds, simple):
        given.append([(each.check, each.case) for each in simple])
        return [replace(each.result, case=SIMPLEST) for each in failures]

    monkeypatch.setattr(runner, "shrink", shrink)
    run(request())
    assert given == [[], [("forward", SIMPLEST)]]
