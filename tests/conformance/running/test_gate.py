"""What fails a whole run beyond single verdicts, and which subjects it must hold."""

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.record import RunRecord, Verdict
from attest.conformance.running import gate
from attest.conformance.running.gate import runnable_subjects, with_policy
from attest.conformance.subject import Subject
from tests import toys
from tests.conformance.running.fakes import result
from tests.conformance.running.test_expectations import STALE


def record(*verdicts: Verdict, **more) -> RunRecord:
    results = tuple(result(Case(seed=seed), verdict=verdict) for seed, verdict in enumerate(verdicts))
    return RunRecord(**{"profile": "quick", "seed": 0, "results": results, **more})


P, M, U = Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.UNSUPPORTED


@pytest.mark.parametrize(
    ("verdicts", "problem"),
    [
        ((P,) * 10, None),
        ((P,) * 9 + (M,), None),
        ((P,) * 9 + (M, M), "2 of 11 verdicts are INCONCLUSIVE"),
        ((U, Verdict.XFAIL), "no check passed"),
        ((P, U, U, U), None),
    ],
)
def test_a_run_must_have_tested_something(verdicts, problem):
    judged = with_policy(record(*verdicts), ())
    assert [problem in found for found in judged.problems] == ([] if problem is None else [True])
    assert judged.status == ("pass" if problem is None else "fail")


def test_each_subject_must_have_passed_something():
    other = result(verdict=Verdict.UNSUPPORTED, subject="toys.other")
    judged = with_policy(RunRecord("quick", 0, (result(), other)), ())
    assert judged.problems == ("toys.other: no check passed, so nothing was tested",)


def test_stale_expectations_fail_a_run():
    judged = with_policy(record(P), (STALE,))
    assert judged.status == "fail"
    assert "stale expectation" in judged.problems[0]


@pytest.mark.parametrize(
    "part", [{"shard": (1, 2)}, {"narrowed": "--check lse"}, {"complete": False, "note": "interrupted"}]
)
def test_a_part_of_a_run_is_not_held_to_the_whole(part):
    assert with_policy(record(M, **part), (STALE,)).problems == ()


def test_entrants_are_those_that_run_here(monkeypatch):
    known = {
        "anywhere": toys.right,
        "on a gpu": Subject("gpu", toys.right.call, backend="gpu"),
        "on a cpu": Subject("cpu", toys.right.call, backend="cpu"),
        "in another process": Subject("other", toys.right.call, ready=lambda: "needs another process"),
    }

    def find(name):
        if name not in known:
            raise LookupError(f"subject {name!r} cannot be loaded: ImportError: no module")
        return known[name]

    monkeypatch.setattr(gate, "discover", lambda: dict.fromkeys([*known, "broken"]))
    monkeypatch.setattr(gate, "find", find)
    found = runnable_subjects("cpu")
    assert set(found.subjects) == {"anywhere", "on a cpu"}
    assert found.skipped == {
        "on a gpu": "runs on gpu, this machine has cpu",
        "in another process": "needs another process",
    }
    assert found.broken == ("subject 'broken' cannot be loaded: ImportError: no module",)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, RuntimeError])
def test_an_entrant_that_ends_the_process_spoils_itself_only(monkeypatch, kind):
    def raises():
        raise kind("no")

    def find(name):
        return raises() if name == "cannot be loaded" else known[name]

    known = {"works": toys.right, "cannot be asked": Subject("asked", toys.right.call, ready=raises)}
    if kind is not RuntimeError:  # `find` makes a LookupError of what is an Exception
        known["cannot be loaded"] = None
    monkeypatch.setattr(gate, "discover", lambda: known)
    monkeypatch.setattr(gate, "find", find)
    found = runnable_subjects("cpu")
    assert set(found.subjects) == {"works"}
    assert len(found.broken) == len(known) - 1
    assert all(f"raised {kind.__name__}: no" in sentence for sentence in found.broken)
