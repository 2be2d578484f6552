"""Spreads: the bound and the variance of an error, and what rounding adds to them."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attest.reference.coherence import NO_PARTS, Parts, Shares
from attest.reference.numerics import ROUNDING_VARIANCE, SMALLEST_NORMAL, Floats, half_ulp

# What is larger is squared without overflow.
_LARGEST_BOUND = 1e150


@dataclass(frozen=True)
class Spread:
    """An error of each element of an array: what it cannot exceed, and its variance.

    extra: what is added to the variance where few different values meet the largest error of rounding.
    common: the standard deviation of the sum of all errors, each with the sign of the exact value and divided
        by its own deviation, as far as roundings repeat from row to row; 0 where they do not.
    shares: of the variance, that errors repeated from row to row have. parts: of it, that are independent.
    """

    bound: Floats
    variance: Floats
    extra: Floats | float = 0.0
    common: float = 0.0
    shares: tuple[Shares, ...] = ()
    parts: Parts = NO_PARTS


def finite(array: Floats) -> Floats:
    """Return non-finite elements as 0."""
    return np.where(np.isfinite(array), array, 0.0)


def flushed_squares(weights: Floats) -> Floats:
    """Return the squared errors of weights of which, below the normal numbers, flushing takes all."""
    return np.minimum(weights, SMALLEST_NORMAL) ** 2


def at_least_bound(spread: Spread, where: NDArray[np.bool_]) -> Spread:
    """Let variances be no smaller than squared bounds in some places."""
    squared = np.square(np.minimum(spread.bound, _LARGEST_BOUND))
    return replace(spread, variance=np.where(where, np.maximum(spread.variance, squared), spread.variance))


def cast_error(unit: float, x: Floats, half_subnormal: Floats | float) -> Spread:
    """Return the error of rounding x >= 0 to a unit roundoff; below half the smallest subnormal, to 0."""
    relative = unit * x
    bound = np.minimum(x, np.maximum(relative, half_subnormal))
    variance = np.maximum(ROUNDING_VARIANCE * relative**2, np.square(half_subnormal) / 3)
    return Spread(bound, np.minimum(x**2, variance))


def rounding(magnitude: Floats, spread: Spread, unit: float, half_subnormal: float) -> Spread:
    """Return an error that is then rounded to a unit roundoff; float32 may be flushed below its normals."""
    exists = spread.bound > 0
    furthest = np.maximum(half_ulp(magnitude + spread.bound, unit), half_subnormal * exists)
    usual = np.maximum(half_ulp(magnitude, unit), half_subnormal * (magnitude > 0))
    variance = spread.variance + usual**2 / 3 + SMALLEST_NORMAL**2 / 3 * exists
    parts = spread.parts.plus(usual**2 / 3)
    bound = spread.bound + furthest
    # Where all that can happen is flushing, its variances add up to more than can happen.
    return replace(spread, bound=bound, variance=np.minimum(variance, bound**2), parts=parts)
