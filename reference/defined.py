"""Where a call is defined (S1): scales, caps and logits with room in float32, in which kernels compute.

Beyond it a right kernel may overflow, or cancel two infinities to NaN although the exact logit is small.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.reference.oracle import effective
from attest.reference.problem import Problem
from attest.reference.rows import dot_scale
from attest.reference.semantics import STANDARD, Semantics
from attest.reference.visibility import allowed, pick

# The size of a scale that is not 0, and a soft cap; attest.kernels.options has the same.
SCALE_RANGE = (2.0**-100, 2.0**100)
CAP_RANGE = (2.0**-100, 2.0**100)
# Half of 2^128, where float32 ends: sums of rounded terms stay finite below it.
LARGEST_LOGIT = 2.0**127

_ROWS = 1024  # that are looked at together


def scale_in_range(scale: float) -> bool:
    """Return whether a scale is one that kernels must take."""
    return scale == 0 or SCALE_RANGE[0] <= abs(scale) <= SCALE_RANGE[1]


def cap_in_range(cap: float) -> bool:
    """Return whether a soft cap is one that kernels must take."""
    return CAP_RANGE[0] <= cap <= CAP_RANGE[1]


def logits_fit(problem: Problem, semantics: Semantics = STANDARD) -> bool:
    """Return whether max(1, |scale|) * sum_d |q_d k_d| + |bias| is below 2^127 for each visible pair.

    Where the scale is below 1, the sum counts as it is: most kernels scale it after they have computed it.
    Values that are not finite count for nothing, nor does ALiBi's term, which its own limits keep below 2^97.
    """
    problem = effective(problem, semantics)
    factor = max(1.0, abs(dot_scale(problem, semantics)))
    products = problem.head_dim * _largest(problem.query) * _largest(problem.key)
    offsets = 0.0 if problem.bias is None else _largest(problem.bias)
    if _sum(factor, products, offsets, semantics) < LARGEST_LOGIT:
        return True
    return all(
        _block_fits(problem, semantics, batch, head, rows, factor)
        for batch, head in np.ndindex(problem.batch, problem.q_heads)
        for rows in _blocks(problem.q_len)
    )


def _block_fits(
    problem: Problem, semantics: Semantics, batch: int, head: int, rows: NDArray[np.int64], factor: float
) -> bool:
    seen = allowed(problem, semantics, batch, head, rows)
    query = np.abs(problem.query[batch, rows, head].astype(np.float64))
    key = np.abs(problem.key[batch, :, head // problem.group].astype(np.float64))
    offsets = np.zeros((1, 1))
    with np.errstate(all="ignore"):
        if problem.bias is not None:
            offsets = np.abs(pick(problem.bias, batch, head, rows).astype(np.float64))
            seen = seen & np.isfinite(offsets)
        sizes = _sum(factor, query @ key.T, offsets, semantics)
        return not (seen & (sizes >= LARGEST_LOGIT) & np.isfinite(sizes)).any()


def _sum(factor: float, products: Any, offsets: Any, semantics: Semantics) -> Any:
    if semantics.bias == "before_scale":
        return factor * (products + offsets)
    return factor * products + offsets


def _blocks(length: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, max(length, 1), _ROWS):
        yield np.arange(start, min(start + _ROWS, length), dtype=np.int64)


def _largest(array: NDArray[Any]) -> float:
    """Return the largest size of the finite elements of an array; 0 if there are none."""
    sizes = np.abs(array.astype(np.float64))
    return float(sizes.max(initial=0.0, where=np.isfinite(sizes)))
