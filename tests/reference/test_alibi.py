"""ALiBi (S25): the oracle equals itself with the term as an explicit bias, and the error model covers it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.reference.error_model import predict
from attest.reference.numerics import Numerics
from attest.reference.oracle import attention
from attest.reference.problem import Problem, make_problem
from attest.reference.semantics import STANDARD, Semantics
from tests.reference.answers import answer_of, assert_equal, simple
from tests.reference.strategies import Drawn, drawn_problems


def materialised(problem: Problem, slopes: np.ndarray) -> np.ndarray:
    """The term [B, Hq, Sq, Sk] in float64 of a call without cumulative lengths, from nested sums."""
    rows = np.arange(problem.q_len) + problem.kv_len - problem.q_len
    rows = np.broadcast_to(rows, (problem.batch, problem.q_len))
    if problem.q_offset is not None:
        rows = np.arange(problem.q_len) + np.reshape(problem.q_offset, (-1, 1)) + 0 * rows
    if problem.q_positions is not None:
        rows = problem.q_positions.astype(np.int64) + 0 * rows
    keys = np.broadcast_to(np.arange(problem.kv_len), (problem.batch, problem.kv_len))
    if problem.kv_positions is not None:
        keys = problem.kv_positions.astype(np.int64) + 0 * keys
    distance = np.maximum(rows[:, :, None] - keys[:, None], keys[:, None] - rows[:, :, None])
    return -slopes.astype(np.float64).reshape(-1, problem.q_heads, 1, 1) * distance[:, None]


@given(drawn=drawn_problems(dialects=True), seed=st.integers(0, 2**31), capped=st.booleans())
def test_it_equals_an_explicit_bias(drawn: Drawn, seed: int, capped: bool) -> None:
    """Bit for bit: a slope of 12 bits times a small distance is exact, and so is its sum with the bias."""
    rng = np.random.default_rng(seed)
    slopes = (rng.integers(-8, 9, (drawn.problem.batch, drawn.problem.q_heads)) / 8).astype(np.float32)
    problem = replace(
        drawn.problem,
        cum_seqlens_q=None,
        cum_seqlens_k=None,
        q_offset=None if drawn.problem.cum_seqlens_q is not None else drawn.problem.q_offset,
        bias=None,
        alibi_slopes=None,
        logits_soft_cap=2.0 if capped else None,
    )
    # What a dialect does to a mask beside a bias, and bias that it ignores, are not about the term.
    semantics = replace(
        drawn.semantics, window="bottom_right", precedence="conjunction", ignored_arguments=frozenset()
    )
    alibi = replace(drawn, problem=replace(problem, alibi_slopes=slopes), semantics=semantics)
    bias = replace(drawn, problem=replace(problem, bias=materialised(problem, slopes)), semantics=semantics)
    got, want = answer_of(alibi), answer_of(bias)
    assert_equal(got, replace(want, dbias=None))


@pytest.mark.parametrize("choice", ["before_cap", "before_scale", "after_cap"])
def test_it_joins_where_the_bias_does(choice: Any) -> None:
    """S2: beside a bias, a scale and a cap, in each dialect; their sum is exact."""
    semantics = replace(STANDARD, bias=choice)
    bias = np.arange(12, dtype=np.float32).reshape(1, 1, 3, 4) / 4
    slopes = np.array([0.5, -0.25], np.float32)
    options = {"softmax_scale": 0.3, "logits_soft_cap": 1.5}
    both = replace(simple(bias=bias, alibi_slopes=slopes, **options), semantics=semantics)
    summed = bias + materialised(both.problem, slopes)
    one = replace(simple(bias=summed, **options), semantics=semantics)
    got, want = answer_of(both), answer_of(one)
    assert got.dbias is not None
    assert want.dbias is not None
    assert_equal(replace(got, dbias=None), replace(want, dbias=None))
    np.testing.assert_allclose(got.dbias[0, 0], want.dbias[0].sum(axis=0), atol=1e-14)


def test_positions_count_within_each_sequence() -> None:
    """S9, S23: packed sequences give what each gives alone."""
    slopes = np.array([0.5, 0.125], np.float32)
    cums = {"cum_seqlens_q": np.int32([0, 2, 5]), "cum_seqlens_k": np.int32([0, 4, 7])}
    packed = simple(5, 7, alibi_slopes=slopes, **cums).problem
    whole = attention(packed)
    for q, k in ((slice(0, 2), slice(0, 4)), (slice(2, 5), slice(4, 7))):
        alone = make_problem(packed.query[:, q], packed.key[:, k], packed.value[:, k], alibi_slopes=slopes)
        assert np.array_equal(attention(alone).out, whole.out[:, q])


def test_a_product_that_float64_rounds_is_exact() -> None:
    """(1 + 2**-23) * (2**31 - 1) = 2**31 + 255 - 2**-23 has 55 bits, and a bias takes all but the last."""
    problem = make_problem(
        *(np.zeros((1, 1, 1, 1), np.float32),) * 2,
        np.ones((1, 1, 1, 1), np.float32),
        alibi_slopes=np.array([1 + 2**-23], np.float32),
        q_positions=np.array([[-(2**30)]]),
        kv_positions=np.array([[2**30 - 1]]),
        bias=np.full((1, 1, 1, 1), 2.0**31 + 255),
    )
    assert attention(problem).lse[0, 0, 0] == 2.0**-23


def test_the_bound_covers_what_float32_makes_of_far_pairs() -> None:
    """Beyond 2**24 a distance is rounded before it is multiplied, and the bound has room for it."""
    rng = np.random.default_rng(0)
    far = 2**24 + 2 * rng.integers(0, 2**10, (1, 8)) + 1
    slope = np.float32(0.7)
    problem = make_problem(
        np.zeros((1, 1, 1, 2), np.float32),
        np.zeros((1, 8, 1, 2), np.float32),
        np.eye(8, dtype=np.float32)[None, :, None],
        alibi_slopes=np.array([slope]),
        q_positions=np.zeros((1, 1), np.int32),
        kv_positions=far.astype(np.int32),
    )
    logits = -slope * far[0].astype(np.float32)
    error = np.abs(logits.astype(np.float64) + float(slope) * far[0])
    largest = logits.max()
    lse = largest + np.log(np.exp(logits - largest).sum())
    predicted = predict(problem, STANDARD, Numerics("float32"))["lse"]
    assert 0 < abs(lse - attention(problem).lse[0, 0, 0]) <= predicted.bound[0, 0, 0]
    assert predicted.bound[0, 0, 0] >= error.max()
    assert not np.isnan(predicted.std).any()


def test_a_dialect_from_the_top_left_counts_from_there() -> None:
    slopes = np.array([0.5, 0.25], np.float32)
    drawn = simple(2, 4, alibi_slopes=slopes)
    top_left = attention(drawn.problem, Semantics(window="top_left"))
    want = attention(replace(drawn.problem, q_offset=0))
    assert np.array_equal(top_left.out, want.out)
