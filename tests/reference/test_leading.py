"""S27: a call with any number of batch dimensions equals the call with one."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.reference.leading import fold
from attest.reference.oracle import Cotangents, Sample, attention
from attest.reference.problem import Problem
from tests.examples import examples
from tests.reference.answers import answer_of, assert_equal, simple
from tests.reference.strategies import Drawn, drawn_problems

BATCHED = ("query", "key", "value", "attention_mask", "bias", "q_segment_ids", "kv_segment_ids")
SHARED = ("q_positions", "kv_positions", "kv_start", "kv_end", "alibi_slopes")


def reshaped(problem: Problem, batch: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of a problem with these batch dimensions in place of its own."""
    call = {name: value for name, value in vars(problem).items() if value is not None}
    for name in (*BATCHED, *SHARED):
        if name in call:
            own = batch if len(call[name]) == problem.batch else (1,) * len(batch)
            call[name] = call[name].reshape(*own, *call[name].shape[1:])
    offset = call.get("q_offset")
    if isinstance(offset, np.ndarray) and problem.cum_seqlens_q is None:
        call["q_offset"] = offset.reshape(batch)
    return call


def assert_folds(drawn: Drawn, batch: tuple[int, ...]) -> None:
    folded = fold(**reshaped(drawn.problem, batch))
    d_lse = None if drawn.d_lse is None else drawn.d_lse.reshape(*batch, *drawn.d_lse.shape[1:])
    cotangents = folded.cotangents(drawn.d_out.reshape(*batch, *drawn.d_out.shape[1:]), d_lse)
    flat = attention(folded.problem, drawn.semantics, cotangents)
    want = answer_of(drawn)
    assert_equal(flat, want)
    for name, array in folded.unfold(flat).items().items():
        expected = want.items()[name]
        if name == "dbias":
            assert folded.bias is not None
            expected = expected.reshape(folded.bias)
        elif name != "dsoftmax_aux":
            expected = expected.reshape(*batch, *expected.shape[1:])
        np.testing.assert_array_equal(array, expected, err_msg=name, strict=True)


@examples(60)
@given(drawn=drawn_problems(dialects=True), data=st.data())
def test_every_argument_and_result_folds(drawn: Drawn, data: st.DataObject) -> None:
    size = drawn.problem.batch
    shapes = [(size,), (1, size), (size, 1), (1, size, 1)] + ([()] if size == 1 else [])
    assert_folds(drawn, data.draw(st.sampled_from(shapes)))


def test_two_batch_dimensions() -> None:
    rng = np.random.default_rng(0)
    drawn = simple(
        3,
        4,
        batch=6,
        causal=True,
        bias=rng.standard_normal((6, 1, 3, 4)).astype(np.float32),
        attention_mask=rng.random((6, 2, 3, 4)) < 0.8,
        q_offset=np.array([0, 1, 2, 3, -1, 1]),
        kv_positions=rng.integers(0, 4, (6, 4)),
        dropout_prob=0.3,
        dropout_seed=1,
    )
    assert_folds(drawn, (2, 3))
    assert_folds(drawn, (3, 1, 2))


@pytest.mark.parametrize("own", [(1, 3), (2, 1), (1, 1), (2, 3)])
def test_a_gradient_sums_over_the_batch_dimensions_that_the_bias_lacks(own: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((*own, 2, 3, 4)).astype(np.float32)
    mask = rng.random((*own, 2, 3, 4)) < 0.8
    positions = rng.integers(0, 4, (*own, 3))
    problem = simple(3, 4, batch=6).problem
    tokens = {name: getattr(problem, name) for name in ("query", "key", "value")}
    arrays = {name: array.reshape(2, 3, *array.shape[1:]) for name, array in tokens.items()}
    d_out = rng.standard_normal((2, 3, 3, 2, 3))
    options = {"causal": True, "attention_mask": mask, "q_positions": positions, "bias": bias}
    folded = fold(**arrays, **options)
    assert (folded.problem.bias.shape[0] == 1) == (own == (1, 1))  # type: ignore[union-attr]
    got = folded.unfold(attention(folded.problem, cotangents=folded.cotangents(d_out)))
    assert got.dbias is not None
    whole = fold(
        **arrays,
        causal=True,
        attention_mask=np.broadcast_to(mask, (2, 3, 2, 3, 4)),
        q_positions=np.broadcast_to(positions, (2, 3, 3)),
        bias=np.broadcast_to(bias, (2, 3, 2, 3, 4)),
    )
    want = whole.unfold(attention(whole.problem, cotangents=whole.cotangents(d_out)))
    assert want.dbias is not None
    summed = tuple(axis for axis in (0, 1) if own[axis] == 1)
    np.testing.assert_allclose(got.dbias, want.dbias.sum(axis=summed, keepdims=True), atol=1e-14)
    np.testing.assert_array_equal(got.out, want.out, strict=True)
    assert got.out.shape == (2, 3, 3, 2, 3)
    assert got.lse.shape == (2, 3, 2, 3)


def test_no_batch_dimension_is_a_batch_of_one() -> None:
    drawn = simple(
        4,
        5,
        causal=True,
        cum_seqlens_q=np.int32([0, 1, 4]),
        cum_seqlens_k=np.int32([0, 2, 5]),
        q_offset=np.array([1, -1]),
        q_segment_ids=np.array([[0, 0, 1, 1]]),
        kv_segment_ids=np.array([[0, 0, 0, 1, 1]]),
    )
    assert_folds(drawn, ())
    call = reshaped(drawn.problem, ())
    assert fold(**call).problem.query.shape == (1, 4, 2, 4)
    assert fold(**call | {"q_offset": np.array(1)}).problem.q_offset == 1
    folded = fold(**call)
    sampled = attention(folded.problem, sample=Sample(np.array([2]), np.array([0])))
    assert folded.unfold(sampled).out.shape == (1, 2, 3)


def test_arrays_are_not_copied() -> None:
    query = np.zeros((2, 3, 4, 1, 1), np.float32)
    assert np.shares_memory(fold(query, query, query).problem.query, query)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"query": np.zeros((3, 1), np.float32)},
            r"query: got shape \(3, 1\), expected batch dimensions \(\)",
        ),
        (
            {"key": np.zeros((6, 4, 1, 1), np.float32)},
            r"key: got shape .* batch dimensions \(2, 3\) and 3 axes",
        ),
        ({"value": np.zeros((1, 3, 4, 1, 1), np.float32)}, "value: got shape"),
        (
            {"bias": np.zeros((3, 1, 3, 4), np.float32)},
            r"bias: got shape \(3, 1, 3, 4\), .* dimensions \(2, 3\), each of which may be 1, and 3 axes",
        ),
        ({"attention_mask": np.ones((2, 2, 1, 3, 4), bool)}, "attention_mask: got shape"),
        (
            {"q_segment_ids": np.zeros((1, 3, 3), int), "kv_segment_ids": np.zeros((2, 3, 4), int)},
            "q_segment_ids: got shape",
        ),
        ({"q_positions": np.zeros((6, 3), int)}, "q_positions: got shape"),
        ({"q_offset": np.zeros(6, int)}, r"q_offset: got shape \(6,\), expected batch dimensions \(2, 3\)"),
    ],
)
def test_refusals(changed: dict[str, np.ndarray], message: str) -> None:
    arrays = {"query": np.zeros((2, 3, 3, 1, 1), np.float32), "key": np.zeros((2, 3, 4, 1, 1), np.float32)}
    arrays["value"] = arrays["key"]
    with pytest.raises(ValueError, match=message):
        fold(**arrays | changed)


def test_cotangents_are_refused() -> None:
    query = np.zeros((2, 3, 4, 1, 1), np.float32)
    folded = fold(query, query, query)
    with pytest.raises(ValueError, match=r"cotangents.out: got shape \(6, 4, 1, 1\)"):
        folded.cotangents(np.zeros((6, 4, 1, 1)))
    with pytest.raises(ValueError, match=r"cotangents.lse: got shape \(6, 1, 4\)"):
        folded.cotangents(query, np.zeros((6, 1, 4)))
    assert isinstance(folded.cotangents(query), Cotangents)


def test_what_is_no_array_is_refused_as_by_the_problem() -> None:
    query = np.zeros((3, 1, 1), np.float32)
    with pytest.raises(TypeError, match="q_positions: got list"):
        fold(query, query, query, q_positions=[0, 1, 2])
