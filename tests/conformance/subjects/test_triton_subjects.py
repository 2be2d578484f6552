"""The Triton subjects: run where they can, and asked enough in the quick gate."""

from dataclasses import replace
from functools import cache

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.cases.features import DTYPES
from attest.conformance.checks import all_checks
from attest.conformance.clauses import CLAUSES
from attest.conformance.judging.trial import Trial
from attest.conformance.running.choice import first_try
from attest.conformance.running.plan import load_profile, tasks
from attest.conformance.subject import find
from tests.conformance.subjects.crossed import blocks_crossed

INTERPRETED = find("triton.interpret")
COMPILED = find("triton.cuda")


@cache
def quick() -> tuple[tuple[Case, tuple[str, ...]], ...]:
    """The cases of the quick gate with their checks, with the shapes and features that they have in a run."""
    planned = tasks(INTERPRETED, load_profile("quick"), seed=0)
    tried = [(first_try(draw), checks) for task in planned for draw, checks in task.draws]
    return tuple((case, checks) for case, checks in tried if case is not None)


@pytest.mark.parametrize(
    ("subject", "interpret", "words"),
    [
        (INTERPRETED, None, "needs a process started with TRITON_INTERPRET=1"),
        (INTERPRETED, "1", None),
        (COMPILED, "1", "has the kernels interpreted"),
        (COMPILED, None, None),
    ],
)
def test_a_process_runs_one_of_them(monkeypatch, subject, interpret, words) -> None:
    monkeypatch.setattr("attest.conformance.subjects.triton.find_spec", lambda name: name)
    monkeypatch.setattr("attest.conformance.subjects.triton.version", lambda name: "3.7.1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpret is not None:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    reason = subject.ready()
    assert reason is None if words is None else words in reason


@pytest.mark.parametrize("subject", [INTERPRETED, COMPILED], ids=lambda subject: subject.name)
def test_without_triton_they_say_so(monkeypatch, subject) -> None:
    monkeypatch.setattr("attest.conformance.subjects.triton.find_spec", lambda name: None)
    assert "triton, which is not installed" in subject.ready()


def test_the_interpreter_names_the_triton_that_it_needs(monkeypatch) -> None:
    monkeypatch.setattr("attest.conformance.subjects.triton.version", lambda name: "3.6.0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert INTERPRETED.ready() == "needs triton 3.7 or newer, and 3.6.0 is installed"


def test_the_quick_gate_covers_every_clause_of_one_device() -> None:
    checks = all_checks()
    covered = {
        clause
        for case, names in quick()
        for name in names
        for clause in checks[name].clauses(Trial(INTERPRETED, case))
    }
    assert covered == set(CLAUSES) - {"S21"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_quick_gate_crosses_three_blocks_both_ways(dtype: str) -> None:
    held = [case for case, names in quick() if case.dtype == dtype and "gradients" in names]
    assert any(min(blocks_crossed(INTERPRETED, case)) >= 3 for case in held)
    assert any(case.kv_len >= 1024 for case in held), "too short for the statistics of rounding errors"


def test_the_quick_gate_covers_every_feature_in_gradients() -> None:
    held = [case.features for case, names in quick() if "gradients" in names]
    assert frozenset().union(*held) == INTERPRETED.features


def test_the_declared_blocks_are_those_of_the_kernels() -> None:
    pytest.importorskip("triton")
    from attest.conformance.subjects.triton import _FEWEST_KEYS, PRODUCTION_BLOCKS
    from attest.kernels.triton.blocks import WORK, choose

    chosen = choose("forward", "sm_90", head_dim=128, itemsize=2, work="edges")
    assert (chosen.q, chosen.k) == PRODUCTION_BLOCKS
    for dtype, fewest in _FEWEST_KEYS.items():
        sizes = {
            choose("forward", device, head_dim, 4 if dtype == "float32" else 2, work).k
            for device in ("sm_80", "sm_90", "gfx942")
            for work in WORK
            for head_dim in (64, 128, 256)
        }
        assert min(sizes) == fewest


def test_a_subject_is_asked_for_no_more_tokens_than_it_takes() -> None:
    profile = load_profile("quick")
    for longest in (512, 1280):
        short = replace(INTERPRETED, limits=replace(INTERPRETED.limits, longest=longest))
        planned = [task.case for task in tasks(short, profile, seed=0)]
        assert max(max(case.q_len, case.kv_len) for case in planned) <= longest
    assert any(case.kv_len >= 1024 for case in planned)
