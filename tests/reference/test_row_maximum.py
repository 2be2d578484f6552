"""The row maximum of an output that is not normalised, differentiated as a dialect of S26 declares."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from attest.reference.rows import row_blocks
from attest.reference.semantics import STANDARD
from tests.examples import examples
from tests.reference.answers import answer_of, assert_agrees, simple
from tests.reference.strategies import Drawn, drawn_problems

DIFFERENTIATED = replace(STANDARD, row_max_gradient="differentiated")


def differentiated(drawn: Drawn) -> Drawn:
    return replace(
        drawn,
        problem=replace(drawn.problem, normalize_output=False),
        semantics=replace(drawn.semantics, row_max_gradient="differentiated"),
    )


@examples(75)
@given(drawn_problems(dialects=True))
def test_the_second_opinion_agrees(drawn: Drawn) -> None:
    assert_agrees(differentiated(drawn))


def test_logits_that_a_cap_makes_equal_tie() -> None:
    """Capped, logits of 40 and 176 differ by 4e-35, which is less than pairs resolve: both take a share."""
    key = np.array([[[[40.0]], [[176.0]], [[1.0]]]], np.float32)
    drawn = simple(1, 3, heads=1, dims=(1, 3), softmax_scale=1.0, logits_soft_cap=1.0)
    problem = replace(drawn.problem, query=np.ones((1, 1, 1, 1), np.float32), key=key)
    drawn = differentiated(replace(drawn, problem=problem))
    assert_agrees(drawn)
    (block,) = row_blocks(drawn.problem, drawn.semantics)
    assert block.max_share is not None
    assert block.max_share.tolist() == [[0.5, 0.5, 0.0]]


@examples(30)
@given(drawn_problems())
def test_a_normalised_output_has_no_maximum_to_differentiate(drawn: Drawn) -> None:
    normalised = replace(drawn, problem=replace(drawn.problem, normalize_output=True))
    got, want = (
        answer_of(replace(normalised, semantics=semantics)).items()
        for semantics in (DIFFERENTIATED, STANDARD)
    )
    assert all(np.array_equal(got[name], array) for name, array in want.items())


def test_shifting_every_logit_changes_nothing() -> None:
    """exp(t - max t) knows only differences of logits: the gradients of a row of the bias sum to 0."""
    bias = np.zeros((1, 2, 3, 4), np.float32)
    drawn = differentiated(simple(3, 4, bias=bias, causal=True))
    drawn = replace(drawn, d_lse=None)
    gradient = answer_of(drawn).dbias
    assert gradient is not None
    assert np.abs(gradient).max() > 0.1
    assert np.abs(gradient.sum(axis=3)).max() < 1e-12
    constant = answer_of(replace(drawn, semantics=STANDARD)).dbias
    assert constant is not None
    assert np.abs(constant.sum(axis=3)).max() > 0.1


@pytest.mark.parametrize("sinks", [0, 1])
def test_those_that_tie_share_equally(sinks: int) -> None:
    """Logits of 0 with a sink of 0: out is the sum of the values, and every derivative is known."""
    drawn = simple(
        1,
        3,
        heads=1,
        softmax_scale=0.0,
        bias=np.zeros((1, 1, 1, 3), np.float32),
        softmax_aux=np.zeros((1, 1), np.float32) if sinks else None,
    )
    drawn = replace(differentiated(drawn), d_lse=None)
    answer = answer_of(drawn)
    value, d_out = drawn.problem.value[0, :, 0].astype(float), drawn.d_out[0, 0, 0].astype(float)
    each = value @ d_out
    assert answer.dbias is not None
    assert answer.dbias[0, 0, 0] == pytest.approx(each - each.sum() / (3 + sinks), abs=1e-12)
    if sinks:
        assert answer.dsoftmax_aux is not None
        assert answer.dsoftmax_aux[0, 0] == pytest.approx(-each.sum() / 4, abs=1e-12)
