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
    assert result.message.startswith("in a call with another scale, after one of the same shapes: outside")
    assert result.clauses == ("S19",)


def test_one_forgotten_option_is_enough() -> None:
    assert verdict(toy(keeping("causal"))).message.startswith("in a call without causal order, after one")
    plain = verdict(toy(keeping("causal")), replace(CASE, causal=False))
    assert plain.message.startswith("in a call with causal order, after one of the same shapes")


def test_no_option_is_tried_that_the_subject_does_not_take() -> None:
    assert verdict(toy(features=frozenset({"causal"}))).verdict is Verdict.PASS
    bare = verdict(toy(features=frozenset()), replace(CASE, causal=False))
    assert (bare.verdict, "no other option" in bare.message) == (Verdict.INCONCLUSIVE, True)
