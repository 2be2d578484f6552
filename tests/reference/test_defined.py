"""A call is defined where nothing that a kernel must compute for a visible pair overflows float32 (S1)."""

from typing import Any

import numpy as np
import pytest

from attest.reference.defined import cap_in_range, logits_fit, scale_in_range
from attest.reference.problem import Problem, make_problem
from attest.reference.semantics import Semantics

D = 4
LOWEST = float(np.finfo(np.float32).min)


def problem(query: float = 1.0, key: float = 1.0, heads: int = 1, **options: Any) -> Problem:
    """Three rows and three keys; the signs of query and key make each exact product 0."""
    q = np.full((1, 3, heads, D), query, np.float32) * np.array([1, -1, 1, -1], np.float32)
    k = np.full((1, 3, heads, D), key, np.float32)
    return make_problem(q, k, np.ones((1, 3, heads, D), np.float32), **options)


def plane(values: list[float]) -> np.ndarray:
    return np.array(values, np.float32).reshape(1, 1, 1, 3)


@pytest.mark.found_outside
@pytest.mark.parametrize(
    ("query", "key", "options", "fits"),
    [
        (1e18, 1e18, {}, True),
        (1e30, 1e30, {}, False),
        # Each of the 4 channels adds 2^124, and the default scale, 0.5, does not count.
        (2.0**62, 2.0**62, {}, True),
        (2.0**62, 2.0**63, {}, False),
        (2.0**62, 2.0**62, {"softmax_scale": 1.9}, True),
        (2.0**62, 2.0**62, {"softmax_scale": -2.0}, False),
        # Kernels scale what they have summed.
        (1e30, 1e30, {"softmax_scale": 1e-30}, False),
        (0.0, 1e30, {"softmax_scale": 1e30}, True),
        (1.0, 1.0, {"softmax_scale": 0.0}, True),
        (1.0, 1.0, {"bias": plane([0.0, 2.0**127, 0.0])}, False),
        (1.0, 1.0, {"bias": plane([0.0, 1.7e38, 0.0])}, True),
        (2.0**61, 2.0**61, {"bias": plane([0.0, 1.7e38, 0.0])}, False),
        # The lowest finite number, by which many callers hide a pair.
        (2.0**49, 2.0**50, {"bias": plane([0.0, LOWEST, 0.0])}, True),
        (2.0**50, 2.0**51, {"bias": plane([0.0, LOWEST, 0.0])}, False),
    ],
)
def test_what_fits(query, key, options, fits):
    assert logits_fit(problem(query, key, **options)) is fits


@pytest.mark.parametrize(
    "options",
    [
        {"attention_mask": np.array([True, False, True]).reshape(1, 1, 1, 3)},
        {"bias": plane([0.0, -np.inf, 1.0])},
        {"kv_start": np.full((1, 3), 2, np.int32)},
    ],
)
def test_only_visible_pairs_count(options):
    """Whatever is stored in a hidden key."""
    for stored in (1e38, np.inf, np.nan):
        given = problem(2.0**60, 2.0**60, heads=2, **options)
        given.key[0, 1, 1] = stored
        assert logits_fit(given)
        given.key[0, 2, 1] = 1e38
        assert not logits_fit(given)


def test_what_is_not_finite_counts_for_nothing():
    assert logits_fit(problem(np.inf, 1.0))
    assert logits_fit(problem(1.0, 1.0, bias=plane([0.0, np.inf, np.nan])))
    assert logits_fit(make_problem(*(np.zeros((1, 0, 1, D), np.float32),) * 3))


def test_a_dialect_says_what_the_logit_is():
    before_scale = Semantics(bias="before_scale")
    large = problem(softmax_scale=2.0**40, bias=plane([0.0, 2.0**90, 0.0]))
    assert logits_fit(large)
    assert not logits_fit(large, before_scale)
    ignoring = Semantics(bias="before_scale", ignored_arguments=frozenset({"bias"}))
    assert logits_fit(large, ignoring)
    assert not logits_fit(problem(1e20, 1e20, softmax_scale=0.25), Semantics(default_scale="one"))


def test_rows_are_looked_at_in_parts():
    q = np.full((1, 2100, 1, 1), 1.0, np.float32)
    k = np.full((1, 1, 1, 1), 2.0**64, np.float32)
    assert logits_fit(make_problem(q, k, k))
    q[0, 2050] = 2.0**64
    assert not logits_fit(make_problem(q, k, k))
    assert logits_fit(make_problem(q, k, k, attention_mask=(q[:, :, :, 0] == 1)[:, None, :, 0, None]))


def test_ranges():
    assert [scale_in_range(x) for x in (0.0, -1e30, 1e-30, 2e30, -1e-31)] == [True, True, True, False, False]
    assert [cap_in_range(x) for x in (0.0, 1e30, 1e-30, 2e30)] == [False, True, True, False]
