"""How the errors of a cast add up: equal values err together, distant ones apart."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.reference.coherence import (
    NO_PARTS,
    Cast,
    Parts,
    Shares,
    cast_error_of_sums,
    common_variance,
    largest_share,
)
from attest.reference.numerics import ROUNDING_VARIANCE

UNIT = 2.0**-8
EQUAL = np.full((2, 5), 0.3)
APART = np.tile(2.0 ** -np.arange(5.0), (2, 1))


def values(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((5, 3))


def deviations(sizes: Any, seed: int = 0) -> Any:
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], sizes.shape)
    return signs * np.sqrt(ROUNDING_VARIANCE) * UNIT * sizes


@given(st.integers(0, 2**32 - 1))
def test_errors_add_up_to_something_between_independent_and_equal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = 1 + rng.integers(0, 6, (2, 5)) * UNIT * rng.choice([0.1, 1.0, 30.0])
    cast, factors = Cast(sizes, deviations(sizes, seed), UNIT), values(seed)
    error = cast_error_of_sums(cast, factors)
    assert (error.variance >= (1 - 1e-12) * (cast.deviations**2 @ factors**2)).all()
    assert (error.variance <= (1 + 1e-12) * (np.abs(cast.deviations) @ np.abs(factors)) ** 2).all()


def test_the_errors_of_equal_values_add_up() -> None:
    cast = Cast(EQUAL, deviations(EQUAL), UNIT)
    error = cast_error_of_sums(cast, np.ones((5, 1)), factor=-3.0)
    together = 9 * cast.deviations.sum(axis=1) ** 2
    apart = 9 * (cast.deviations**2).sum(axis=1)
    np.testing.assert_allclose(error.variance[:, 0], np.maximum(together, apart))
    # All of them may meet the largest error there is, which is a unit.
    largest = (1 / ROUNDING_VARIANCE) * error.variance
    np.testing.assert_allclose(error.variance + error.extra, largest)


def test_nearly_equal_values_are_held_together_whatever_their_place() -> None:
    for place in np.linspace(0.5, 0.51, 50):
        sizes = np.array([[place, place * (1 + 0.2 * UNIT)]])
        cast = Cast(sizes, np.ones((1, 2)), UNIT)
        assert cast_error_of_sums(cast, np.ones((2, 1))).variance[0, 0] == 4.0


def test_the_errors_of_distant_values_are_independent() -> None:
    cast, factors = Cast(APART, deviations(APART), UNIT), values(1)
    np.testing.assert_allclose(cast_error_of_sums(cast, factors).variance, cast.deviations**2 @ factors**2)


def test_values_below_the_floor_are_flushed_together() -> None:
    sizes = np.array([[1e-9, 3e-9, 1e-12]])
    cast = Cast(sizes, np.ones((1, 3)), UNIT, floor=1e-8)
    assert cast_error_of_sums(cast, np.ones((3, 1))).variance[0, 0] == 9.0


def test_a_fine_format_repeats_no_rounding() -> None:
    cast = Cast(EQUAL, deviations(EQUAL), 2.0**-24)
    error = cast_error_of_sums(cast, np.ones((5, 1)))
    np.testing.assert_allclose(error.variance[:, 0], (cast.deviations**2).sum(axis=1))
    assert not error.extra.any()
    assert common_variance([cast], [np.ones((2, 5))]) == 0


def test_a_cell_that_holds_everything_holds_the_whole_variance() -> None:
    cast = Cast(EQUAL, np.ones((2, 5)), UNIT)
    error = cast_error_of_sums(cast, np.ones((5, 1)))
    assert largest_share([error.shares]) == pytest.approx(error.variance.sum())
    assert largest_share([]) == 0
    two = Shares(np.array([1, 2]), np.array([3.0, 4.0]))
    assert largest_share([two]) == pytest.approx(5.0)


def test_rows_that_round_alike_err_together() -> None:
    alike = Cast(EQUAL, np.ones((2, 5)), UNIT)
    assert common_variance([alike], [np.ones((2, 5))]) == pytest.approx(100 / ROUNDING_VARIANCE)
    assert common_variance([], []) == 0


def test_parts_are_counted_over_all_rows() -> None:
    parts = NO_PARTS.plus(np.array([3.0]), np.array([4.0])).joined(Parts(11.0, 9.0))
    assert parts == Parts(36.0, 9.0)
    assert NO_PARTS.plus(np.empty(0)) == NO_PARTS
