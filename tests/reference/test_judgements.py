"""The four statistics of an output's errors, and their limits."""

import tomllib
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attest.reference import judgements
from attest.reference.error_model import Prediction
from attest.reference.judgements import Statistics, coarse_limit, exceeded, limits, measure


def predicted(bound: float, std: float, shape: tuple[int, ...]) -> Prediction:
    return Prediction(np.full(shape, bound), np.full(shape, std), np.full(shape, std))


def array(*values: float) -> NDArray[np.float64]:
    return np.array(values, np.float64)


@pytest.mark.parametrize(
    ("got", "want", "bound", "ratio"),
    [
        (1.5, 1.0, 1.0, 0.5),
        (1.0, 1.0, 0.0, 0.0),
        (1.0, 1.5, 0.0, np.inf),
        (np.nan, 1.0, 1.0, np.inf),
        (np.inf, 1.0, 1.0, np.inf),
        (1.0, np.nan, 1.0, np.inf),
        (np.nan, np.nan, 1.0, 0.0),
        (-np.inf, -np.inf, 0.0, 0.0),
        (np.inf, -np.inf, 1.0, np.inf),
        (0.0, -np.inf, 1.0, np.inf),
        (np.inf, 3.5e38, 1e30, 0.0),
        (-np.inf, 3.5e38, 1e30, np.inf),
        (np.inf, 3.4e38, 1e38, 0.0),
        (1.5, 1.0, np.nan, np.inf),
    ],
)
def test_what_one_element_may_be(got: float, want: float, bound: float, ratio: float) -> None:
    statistics = measure(np.array([got], np.float32), array(want), predicted(bound, 1.0, (1,)))
    assert statistics.worst_ratio == ratio


def test_the_worst_element_is_named() -> None:
    got, want = np.zeros((2, 3), np.float32), np.zeros((2, 3))
    want[1, 2] = 1
    assert measure(got, want, predicted(1.0, 1.0, (2, 3))).worst_index == (1, 2)


def test_the_statistics_of_known_errors() -> None:
    want = np.full((1, 2, 1, 2), -4.0)
    got = (want + np.array([[1.0, 3.0], [-1.0, -1.0]]).reshape(want.shape)).astype(np.float32)
    statistics = measure(got, want, predicted(10.0, 2.0, want.shape))
    assert statistics.elements == 4
    assert statistics.rms_ratio == pytest.approx(np.sqrt(3.0) / 2)
    assert statistics.largest_z == 1.5
    # Rows err by -2 and 1 deviations away from zero: the sum over the root of the sum of squares.
    assert statistics.bias_t == pytest.approx((-2 + 1) / np.sqrt(5))
    assert statistics.observations == 2


def test_rounding_the_truth_is_no_bias() -> None:
    want = np.full((1, 100, 1, 1), 1.001)
    got = want.astype(ml_dtypes.bfloat16)
    statistics = measure(got, want, predicted(1.0, 1e-3, want.shape))
    assert statistics.rms_ratio == pytest.approx(1.0, rel=1e-6)
    assert statistics.bias_t == 0


def test_elements_that_cannot_be_compared_count_for_nothing() -> None:
    want = array(1.0, np.nan, -np.inf, 2.0)
    got = np.array([1.0, np.nan, -np.inf, 3.0], np.float32)
    std = array(1.0, 1.0, 1.0, 0.0)
    prediction = Prediction(np.full(4, 4.0), std, std)
    statistics = measure(got, want, prediction)
    assert (statistics.elements, statistics.worst_ratio, statistics.rms_ratio) == (1, 0.25, 0.0)
    exact = measure(got[3:], want[3:], predicted(0.5, 0.0, (1,)))
    assert exact == Statistics(0, 2.0, (0,), 0.0, 0.0, 0.0)
    assert measure(np.empty((0, 2), np.float32), np.empty((0, 2)), predicted(1, 1, (0, 2))).elements == 0


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="expected"):
        measure(np.zeros((2, 1), np.float32), np.zeros((1, 2)), predicted(1.0, 1.0, (1, 2)))


# The limits.


def test_short_or_small_outputs_are_not_judged_by_their_sums() -> None:
    few = limits("out", 100, 4096, "bfloat16")
    short = limits("out", 100_000, 100, "bfloat16")
    enough = limits("out", 100_000, 1024, "bfloat16")
    for limit in (few, short):
        assert (limit.rms, limit.bias_t) == (np.inf, np.inf)
    assert 1 < enough.rms < 2
    assert enough.bias_t < np.inf == limits("lse", 100_000, 1024, "bfloat16").bias_t
    assert few.largest_z < short.largest_z == enough.largest_z


def test_families_that_deviations_do_not_describe_are_held_to_the_bound_alone() -> None:
    limit = limits("out", 100_000, 4096, "float16", "integers")
    assert exceeded(Statistics(100_000, 1.0, (0,), 50.0, 50.0, 50.0), limit) == ()
    assert exceeded(Statistics(100_000, 1.1, (0,), 0.0, 0.0, 0.0), limit) == ("worst_ratio",)


def test_each_statistic_is_held_to_its_limit() -> None:
    limit = limits("dquery", 100_000, 4096, "bfloat16")
    good = Statistics(100_000, 0.9, (0,), 1.0, 4.0, -30.0, observations=2500)
    assert exceeded(good, limit) == ()
    for field, value in (
        ("worst_ratio", np.inf),
        ("worst_ratio", np.nan),
        ("rms_ratio", 3.0),
        ("largest_z", 20.0),
        ("bias_t", -45.0),
    ):
        assert exceeded(replace(good, **{field: value}), limit) == (field,)


def test_limits_are_read_from_the_file_of_thresholds() -> None:
    thresholds = Path(judgements.__file__).with_name("thresholds.toml").read_text()
    assert coarse_limit() == tomllib.loads(thresholds)["coarse"]["z"]
