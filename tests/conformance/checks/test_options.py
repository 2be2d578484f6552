"""A kernel that answers a call with the options of an earlier one is found, and no other."""

from dataclasses import replace
from typing import Any

from attest.conformance.cases.case import Case
from attest.conformance.judging.trial import Trial
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge_trial
from tests.toys import toy, toy_attention

CASE = Case(q_len=5, kv_len=7, head_dim=4, causal=True, seed=3)


def verdict(subject: Any, case: Case = CASE) -> Any:
    (result,) = judge_trial(Trial(subject, case), ["options"])
    return result


def keeping(*forgotten: str) -> Any:
    """The toy, which keeps its options by all else: shapes, and the options that it does not forget."""
    seen: dict[Any, dict[str, Any]] = {}

    def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
        known = tuple(sorted((name, value) for name, value in options.items() if name not in forgotten))
        first = seen.setdefault((query.shape, key.shape, known), options)
        return toy_attention(query, key, value, **first)

    return call


def test_a_right_kernel_passes() -> None:
    assert verdict(toy()).verdict is Verdict.PASS
    assert verdict(toy(keeping())).verdict is Verdict.PASS


def test_a_program_that_is_found_by_its_shapes_alone_is_wrong() -> None:
    result = verdict(toy(keeping("causal", "softmax_scale")))
    assert result.verdict is Verdict.FAIL
    assert result.message.startswith(
        "the options of a call before it, of the same shapes, were used in a call"
    )
    assert " with another scale: outside the error model: out " in result.message
    assert result.clauses == ("S19",)


def test_one_forgotten_option_is_enough() -> None:
    assert " were used in a call without causal order: outside" in verdict(toy(keeping("causal"))).message
    plain = verdict(toy(keeping("causal")), replace(CASE, causal=False))
    assert " were used in a call with causal order: outside" in plain.message


def test_a_kernel_that_is_wrong_in_another_way_is_left_to_other_checks() -> None:
    def top_left(*arrays: Any, **options: Any) -> Any:
        return toy_attention(*arrays, **options, shift=0)

    assert verdict(toy(top_left), replace(CASE, causal=False)).verdict is Verdict.PASS
    (wrong,) = judge_trial(Trial(toy(top_left), CASE), ["forward"])
    assert wrong.verdict is Verdict.FAIL


def test_no_option_is_tried_that_the_subject_does_not_take() -> None:
    assert verdict(toy(features=frozenset({"causal"}))).verdict is Verdict.PASS
    bare = verdict(toy(features=frozenset()), replace(CASE, causal=False))
    assert (bare.verdict, "no other option" in bare.message) == (Verdict.INCONCLUSIVE, True)
