"""The law of directional differences: its bound is sharp, and holds where the algebra is exact."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attest.conformance.checks.laws import differences
from attest.conformance.judging.trial import Trial
from attest.conformance.record import Verdict
from attest.reference.oracle import attention
from attest.reference.semantics import STANDARD, Semantics
from tests.conformance.checks.laws.test_laws import PLAIN, kernel, outputs, verdict

LAW = "directional_differences"
# Every argument with a gradient.
EVERY = replace(PLAIN, bias="bhq", sinks=2, sinks_per_head=True, causal=True)


def off_by(share: float) -> Callable[[Any], Any]:
    return lambda array: array * (1 + share)


@pytest.mark.parametrize("name", ["dquery", "dkey", "dvalue", "dbias", "dsoftmax_aux"])
def test_a_gradient_that_is_off_by_a_twentieth_is_found(name: str) -> None:
    result = verdict(kernel(**outputs(**{name: off_by(0.05)})), LAW, EVERY)
    assert result.verdict is Verdict.FAIL
    assert result.message.endswith(f": {name} differ")


CASES = {
    "every": EVERY,
    "shared": replace(PLAIN, bias="1h1", sinks=3, dropout=0.3),
    "large": replace(PLAIN, bias="bhq", bias_pattern="lowest", sinks=1, sink_pattern="extreme"),
    "empty_rows": replace(PLAIN, mask="bh", empty_rows=True),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_answers_obey_the_bound_by_its_remainder_alone(name: str) -> None:
    """In float64, only the third derivative is left of the bound, and some of it is used."""
    trial = Trial(kernel(), CASES[name])
    rewrite = differences.differences(trial)
    answers = [
        attention(each.built.problem, STANDARD, each.built.cotangents).items() for each in rewrite.calls
    ]
    silent = [{output: np.zeros_like(array) for output, array in each.items()} for each in answers]
    used = []
    for equation in rewrite.equations:
        assert equation.right_bound is not None
        left, right = (side(answers, lambda x: x) for side in (equation.left, equation.right))
        bound = equation.right_bound(answers, silent)
        assert left.shape == right.shape == bound.shape
        assert (np.abs(left - right) <= bound + 1e-10).all()
        used.append(float(np.max(np.abs(left - right) / (bound + 1e-10))))
    assert max(used) > 0.01


def test_the_cotangent_of_lse_counts_only_where_it_is_declared() -> None:
    silent = Semantics(lse_gradient=False)
    (first, *_) = differences.differences(Trial(kernel(semantics=silent), PLAIN)).calls
    assert not np.any(first.built.cotangents.lse)


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"dtypes": ("bfloat16",)}, "does not declare float32, in which differences are sharp"),
        ({"semantics": Semantics(gradients=frozenset())}, "declares no gradients"),
        ({}, None),
    ],
)
def test_which_subjects_have_sharp_differences(declared: dict[str, Any], reason: str | None) -> None:
    assert differences.why_not(kernel(**declared)) == reason
