"""The range of defined calls (S1): scales, caps and logits with room in float32, in which kernels compute.

Beyond it a right kernel may overflow, or cancel two infinities to NaN although the exact logit is small.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.reference.oracle import effective
from attest.reference.problem import Problem
from attest.reference.rows import Floats, dot_scale
from attest.reference.semantics import STANDARD, Semantics
from attest.reference.visibility import Ints, allowed, pick

# The size of a scale that is not 0, and a soft cap; attest.kernels.call.options has the same.
SCALE_RANGE = (2.0**-100, 2.0**100)
CAP_RANGE = (2.0**-100, 2.0**100)
# Half of 2^128, where float32 ends: kernels in base 2 multiply a logit by 1.44.
LARGEST_LOGIT = 2.0**127
# From here on a sum is rounded to infinity. Below 0 it may come so near, as the lowest finite bias does.
INFINITE = 2.0**128 - 2.0**103

_ROWS = 1024  # that are looked at together


def scale_in_range(scale: float) -> bool:
    """Return whether a scale is one that kernels must take."""
    return scale == 0 or SCALE_RANGE[0] <= abs(scale) <= SCALE_RANGE[1]


def cap_in_range(cap: float) -> bool:
    """Return whether a soft cap is one that kernels must take."""
    return CAP_RANGE[0] <= cap <= CAP_RANGE[1]


def logits_fit(problem: Problem, semantics: Semantics = STANDARD) -> bool:
    """Return whether the logit of each visible pair, and the products in it, have room in float32.

    p = max(1, |scale|) * sum_d |q_d k_d| and p + bias are below 2^127, and p - bias rounds to no infinity.
    Where the scale is below 1, the sum counts as it is: most kernels scale it after they have computed it.
    Values that are not finite count for nothing, nor does ALiBi's term, which its own limits keep below 2^97.
    """
    problem = effective(problem, semantics)
    factor = max(1.0, abs(dot_scale(problem, semantics)))
    products = problem.head_dim * max(map(abs, _ends(problem.query))) * max(map(abs, _ends(problem.key)))
    biases = np.zeros(1) if problem.bias is None else np.array(_ends(problem.bias))
    if not _overflows(np.full(1, products), biases, factor, semantics).any():
        return True
    return not any(
        _block_overflows(problem, semantics, batch, head, rows, factor)
        for batch, head in np.ndindex(problem.batch, problem.q_heads)
        for rows in _blocks(problem.q_len)
    )


def _block_overflows(
    problem: Problem, semantics: Semantics, batch: int, head: int, rows: Ints, factor: float
) -> bool:
    query = np.abs(problem.query[batch, rows, head].astype(np.float64))
    key = np.abs(problem.key[batch, :, head // problem.group].astype(np.float64))
    bias = np.zeros((1, 1))
    if problem.bias is not None:
        bias = pick(problem.bias, batch, head, rows).astype(np.float64)
    with np.errstate(all="ignore"):  # of what hidden keys hold
        overflows = _overflows(query @ key.T, bias, factor, semantics)
    return bool((overflows & allowed(problem, semantics, batch, head, rows)).any())


def _overflows(products: Floats, bias: Floats, factor: float, semantics: Semantics) -> NDArray[np.bool_]:
    """Return where a logit does not fit, of those whose products and bias are finite."""
    scaled = factor * products
    added = factor * bias if semantics.bias == "before_scale" else bias
    beyond = (np.maximum(scaled, scaled + added) >= LARGEST_LOGIT) | (scaled - added >= INFINITE)
    return beyond & np.isfinite(products) & np.isfinite(bias)


def _blocks(length: int) -> Iterator[Ints]:
    for start in range(0, max(length, 1), _ROWS):
        yield np.arange(start, min(start + _ROWS, length), dtype=np.int64)


def _ends(array: NDArray[Any]) -> tuple[float, float]:
    """Return the least and the largest of the finite elements of an array and 0."""
    wide = array.astype(np.float64)
    finite = np.isfinite(wide)
    return float(wide.min(initial=0.0, where=finite)), float(wide.max(initial=0.0, where=finite))
