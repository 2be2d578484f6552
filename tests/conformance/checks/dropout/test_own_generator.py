"""Dropout by a generator that is not known: a right one passes, and each wrong one is found."""

from dataclasses import replace
from typing import Any

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.checks import all_checks, dropout
from attest.conformance.judging.trial import Trial
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge
from attest.conformance.subject import Limits, Subject
from attest.reference.semantics import Semantics
from tests.conformance.checks.dropout.kernels import Draws, kernel

PLAIN = Case(q_heads=2, kv_heads=1, head_dim=8, q_len=9, kv_len=12, dropout=0.5, seed=3)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer seeds and tokens, which show a rate of one half that is off by a tenth."""
    numbers = {**dropout.numbers(), "seeds": 2, "tokens": 48}
    monkeypatch.setattr(dropout, "numbers", lambda: numbers)


def verdict(subject: Subject, case: Case = PLAIN, check: str = "dropout") -> Any:
    (result,) = judge(subject, case, (check,))
    return result


CASES = {"groups": PLAIN, "causal": replace(PLAIN, causal=True, q_heads=1, dropout=0.0)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("small")
def test_a_right_generator_passes(name: str) -> None:
    result = verdict(kernel(), CASES[name])
    assert result.verdict is Verdict.PASS, result.message


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_a_rate_that_is_off_by_a_tenth_is_found(rate: float) -> None:
    case = replace(PLAIN, dropout=rate)
    assert verdict(kernel(), case).verdict is Verdict.PASS
    for factor in (0.9, 1.1):
        result = verdict(kernel(Draws(factor=factor)), case)
        assert result.verdict is Verdict.FAIL
        assert "dropout keeps" in result.message


DEFECTS = {
    "backward_drops_nothing": (
        Draws(backward="none"),
        "the backward pass keeps other weights than the forward",
    ),
    "backward_drops_others": (
        Draws(backward="others"),
        "the backward pass keeps other weights than the forward",
    ),
    "rate": (Draws(factor=1.1), "dropout keeps"),
    "heads": (Draws(shape="bqk"), "heads 1 apart drop alike in"),
    "batch_entries": (Draws(shape="hqk"), "batch entries 1 apart drop alike in"),
    "rows": (Draws(shape="bhk"), "rows 1 apart drop alike in"),
    "keys": (Draws(shape="bhq"), "keys 1 apart drop alike in"),
    "seeds": (Draws(seeded=False), "seeds 1 apart drop alike in"),
    "not_scaled": (Draws(scaled=False), "outside the error model: "),
}


@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.usefixtures("small")
def test_a_wrong_generator_is_found(name: str) -> None:
    draws, message = DEFECTS[name]
    result = verdict(kernel(draws))
    assert result.verdict is Verdict.FAIL, result.message
    assert message in result.message


@pytest.mark.parametrize("check", ["forward", "gradients", "transforms.vmap", "determinism"])
def test_other_checks_use_the_weights_that_the_subject_keeps(check: str) -> None:
    assert verdict(kernel(), check=check).verdict is Verdict.PASS


def test_a_backward_pass_without_dropout_has_wrong_gradients() -> None:
    assert verdict(kernel(Draws(backward="none")), check="gradients").verdict is Verdict.FAIL


@pytest.mark.parametrize("check", ["law.gqa", "law.last_row"])
def test_laws_run_without_dropout(check: str) -> None:
    assert verdict(kernel(), check=check).verdict is Verdict.PASS


def test_dropout_at_production_size_is_not_judged() -> None:
    result = verdict(kernel(), check="production")
    assert (result.verdict, "not known at this size" in result.message) == (Verdict.INCONCLUSIVE, True)


def test_the_kept_weights_are_those_of_the_case() -> None:
    """The oracle gets as many dropped weights as the rate says, and none where there is no dropout."""
    kept = Trial(kernel(), replace(PLAIN, q_len=40, kv_len=41)).problem.dropout_keep
    assert kept is not None
    assert kept.shape == (1, 2, 40, 41)
    assert 0.45 < kept.mean() < 0.55
    assert Trial(kernel(), replace(PLAIN, dropout=0.0)).problem.dropout_keep is None


def test_which_subjects_the_check_applies_to() -> None:
    applies = all_checks()["dropout"].applies
    assert applies(kernel()) is None
    assert applies(kernel(features=frozenset())) == "does not declare dropout"
    known = applies(kernel(semantics=Semantics()))
    assert known == "declares a generator, by which the oracle drops the same weights"


def test_a_case_that_the_subject_does_not_take_is_not_judged() -> None:
    excluding = kernel(limits=Limits(excludes=(frozenset({"dropout", "causal"}),)))
    result = verdict(excluding, replace(PLAIN, causal=True, dropout=0.0))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "does not combine causal and dropout" in result.message


def test_counters_are_not_declared_with_a_generator_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"features: got .*origin.* counters are not known"):
        kernel(features=frozenset({"dropout", "origin"}))
