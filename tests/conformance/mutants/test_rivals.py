"""The rules of other test suites: which errors break them, and what they say of a mutant."""

import numpy as np
import pytest

from attest.conformance.cases.case import Case
from attest.conformance.mutants import rivals
from attest.conformance.mutants.catalogue import load
from attest.conformance.mutants.rivals import RULES, RivalJudge, broken, errors

EXACT = {"out": np.linspace(1.0, 2.0, 200)}
NO_THRESHOLD = dict.fromkeys(("float32", "bfloat16", "float16"), 0.0)
ONE_PERCENT, ONE_PER_MILLE, BEST, SHARE, TORCH, TWICE, THRICE = RULES


def found(got, dtype="float32"):
    return errors({"out": got}, EXACT, dtype)


def test_exact_values_break_no_rule():
    assert broken(found(EXACT["out"]), found(EXACT["out"]), NO_THRESHOLD) == frozenset()


@pytest.mark.parametrize(
    ("error", "broken_rules"),
    [
        (1e-6, {BEST, TWICE, THRICE}),
        (1e-3, {BEST, TORCH, TWICE, THRICE}),
        (5e-3, {ONE_PER_MILLE, BEST, TORCH, TWICE, THRICE}),
        (1.0, {*RULES}),
    ],
)
def test_a_rule_breaks_by_the_size_of_an_error(error, broken_rules):
    assert broken(found(EXACT["out"] + error), found(EXACT["out"]), NO_THRESHOLD) == broken_rules


def test_few_wrong_elements_break_no_share():
    got = EXACT["out"].copy()
    got[:2] += 1.0
    assert SHARE not in broken(found(got), found(EXACT["out"]), NO_THRESHOLD)
    got[2] += 1.0
    assert SHARE in broken(found(got), found(EXACT["out"]), NO_THRESHOLD)


def test_errors_are_compared_with_those_of_a_correct_kernel():
    clean = found(EXACT["out"] + 1e-3)
    assert not {TWICE, THRICE} & broken(found(EXACT["out"] + 1.9e-3), clean, NO_THRESHOLD)
    assert {TWICE, THRICE} & broken(found(EXACT["out"] + 2.5e-3), clean, NO_THRESHOLD) == {TWICE}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_breaks_every_rule_of_size(value):
    got = EXACT["out"].copy()
    got[0] = value
    assert broken(found(got), found(EXACT["out"]), NO_THRESHOLD) == {*RULES} - {SHARE}


def test_a_nan_and_an_infinity_where_they_belong_are_right():
    exact = {"lse": np.array([-np.inf, np.nan, 1.0])}
    assert errors(exact, exact, "float32").closest == 0.0


def test_another_shape_breaks_every_rule():
    assert broken(found(EXACT["out"][:3]), found(EXACT["out"]), NO_THRESHOLD) == {*RULES}


def test_a_defect_breaks_rules_and_a_correct_rewrite_keeps_to_its_threshold(monkeypatch):
    case = Case(q_len=3, kv_len=5, head_dim=4, causal=True)
    monkeypatch.setattr(rivals, "drawn", lambda *_: [(case, ("forward",))])
    null = load("nulls")["comparisons_negated"]
    thresholds = RivalJudge("quick", 0, {}).closest(null)
    judge = RivalJudge("quick", 0, thresholds)
    defect, rewrite = judge.score(load("clean_kernel")["causal_top_left"]), judge.score(null)
    assert defect is not None
    assert rewrite is not None
    assert (BEST in defect.killed_by, defect.null) == (True, False)
    assert (BEST in rewrite.killed_by, rewrite.null) == (False, True)


def test_a_rule_that_fails_the_clean_kernel_fails_its_correct_rewrites(monkeypatch):
    case = Case(dtype="bfloat16", q_len=40, kv_len=70, head_dim=16)
    monkeypatch.setattr(rivals, "drawn", lambda *_: [(case, ("forward", "gradients"))])
    nothing = RivalJudge("quick", 0, dict.fromkeys(NO_THRESHOLD, np.inf)).score(load("nulls")["nothing"])
    assert nothing is not None
    assert ONE_PER_MILLE in nothing.killed_by
    assert not {BEST, TWICE, THRICE} & nothing.killed_by
