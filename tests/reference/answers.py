"""Answers of the oracle in tests: how they are computed, compared, and held to the second opinion."""

import numpy as np

from attest.reference.oracle import Answer, Cotangents, Sample, attention
from attest.reference.problem import make_problem
from attest.reference.semantics import STANDARD
from tests.reference.second_opinion import (
    INPUTS,
    second_opinion,
    worst_error,
)
from tests.reference.strategies import Drawn

TOLERANCE = {"out": 1e-13, "lse": 1e-13} | dict.fromkeys(("d" + name for name in INPUTS), 1e-12)


def assert_agrees(drawn: Drawn) -> None:
    answer = attention(drawn.problem, drawn.semantics, Cotangents(drawn.d_out, drawn.d_lse))
    opinion = second_opinion(drawn.problem, drawn.semantics, drawn.d_out, drawn.d_lse)
    assert answer.items().keys() == opinion.values.keys()
    for name, array in answer.items().items():
        error = worst_error(array, opinion, name)
        assert error <= TOLERANCE[name], f"{name}: {error:.2e} of the gauge"


def assert_equal(got: Answer, want: Answer, tolerance: float = 0.0) -> None:
    """Every array alike, within a fraction of the largest element."""
    assert got.items().keys() == want.items().keys()
    for name, array in want.items().items():
        finite = array[np.isfinite(array)]
        atol = tolerance * np.max(np.abs(finite), initial=1.0)
        np.testing.assert_allclose(got.items()[name], array, rtol=0, atol=atol, err_msg=name)


def simple(
    q_len: int = 3,
    kv_len: int = 4,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    dims: tuple[int, int] = (4, 3),
    dtype: object = np.float32,
    amplitude: float = 1.0,
    seed: int = 0,
    **options: object,
) -> Drawn:
    """A problem of normal numbers with cotangents, by the standard."""
    rng = np.random.default_rng(seed)
    query, key, value, d_out = (
        rng.standard_normal(shape)
        for shape in (
            (batch, q_len, heads, dims[0]),
            (batch, kv_len, kv_heads, dims[0]),
            (batch, kv_len, kv_heads, dims[1]),
            (batch, q_len, heads, dims[1]),
        )
    )
    query, key = query * amplitude, key * amplitude
    problem = make_problem(query.astype(dtype), key.astype(dtype), value.astype(dtype), **options)
    d_lse = rng.standard_normal((batch, heads, q_len)).astype(np.float32)
    return Drawn(problem, STANDARD, d_out.astype(dtype), d_lse)


def answer_of(drawn: Drawn, sample: Sample | None = None) -> Answer:
    return attention(drawn.problem, drawn.semantics, Cotangents(drawn.d_out, drawn.d_lse), sample)
