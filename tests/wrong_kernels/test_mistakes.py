"""Each mistake is found, and named by the card of its cause; the kernel without them passes."""

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.causes.card import card
from attest.conformance.causes.group import causes
from attest.conformance.record import Result, Verdict
from attest.conformance.running.judge import judge
from tests.wrong_kernels import subjects

PLAIN = {"q_len": 40, "kv_len": 70, "q_heads": 2, "kv_heads": 2, "head_dim": 8}
# Each feature alone, and none, in cases of more than one block of keys.
CASES = tuple(
    Case(**{**PLAIN, "seed": seed, **options})
    for options in ({}, {"causal": True}, {"window": (7, 3)}, {"soft_cap": 0.5}, {"kv_heads": 1})
    for seed in (1, 2)
)


def judged(name: str) -> list[Result]:
    subject = getattr(subjects, name)
    return [result for case in CASES for result in judge(subject, case, ("forward", "lse", "gradients"))]


@pytest.mark.parametrize("name", subjects.MISTAKES)
def test_a_mistake_is_one_cause_that_is_named(name):
    (cause,) = causes(judged(name))
    # The name of the kernel gives its mistake away.
    shown = card(cause, 1, 1).replace(name, "")
    assert all(text in shown for text in subjects.MISTAKES[name]["shown"]), shown
    assert subjects.MISTAKES[name]["clause"] in shown or cause.of_precision


def test_the_kernel_without_mistakes_passes():
    assert {result.verdict for result in judged("correct")} <= {Verdict.PASS, Verdict.INCONCLUSIVE}
