"""A plan and a judge that need no kernel: what a run does with them is under test."""

from dataclasses import replace

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.record import Result, Verdict
from attest.conformance.running import runner
from attest.conformance.running.plan import Profile, Task
from attest.conformance.running.runner import Request
from tests import toys

PROFILE = Profile("quick", shrink_evaluations=7, kinds={})
CASES = tuple(Case(q_len=length, kv_len=length, seed=3) for length in (9, 4, 30, 17))
SIMPLEST = Case(q_len=1)


def result(case: Case = CASES[0], check: str = "forward", verdict: Verdict = Verdict.PASS, **more) -> Result:
    return Result(
        **{"subject": "toys.right", "check": check, "clauses": (), "case": case, "verdict": verdict, **more}
    )


def request(**more) -> Request:
    return Request(**{"subjects": {"toys.right": toys.right}, "profile": PROFILE, "seed": 0, **more})


def planned(monkeypatch: pytest.MonkeyPatch, *these: Task) -> None:
    """Let every run plan these tasks; without any, one task with two checks for each of CASES."""
    these = these or tuple(Task("toys.right", case, ("forward", "gradients")) for case in CASES)
    monkeypatch.setattr(runner, "tasks", lambda subject, profile, seed, only: iter(these))


def judged(monkeypatch: pytest.MonkeyPatch, *failing: tuple[Case, str]) -> None:
    """Let every check pass, but for the given ones."""

    def judge(subject, case, checks):
        return [
            result(case, check, Verdict.FAIL if (case, check) in failing else Verdict.PASS)
            for check in checks
        ]

    monkeypatch.setattr(runner, "judge", judge)


def shrunk(monkeypatch: pytest.MonkeyPatch, simplest: Case | None = SIMPLEST) -> list[Result]:
    """Let every search end at one case, or where it began if None; the results that were searched from."""
    searched: list[Result] = []

    def shrink(subject, failures, evaluations, seconds, simple):
        assert evaluations == PROFILE.shrink_evaluations
        searched.extend(failure.result for failure in failures)
        return [replace(each.result, case=simplest or each.result.case, minimal=True) for each in failures]

    monkeypatch.setattr(runner, "shrink", shrink)
    return searched
