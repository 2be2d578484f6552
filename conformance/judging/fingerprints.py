"""Fingerprints: what the wrong values of an output have in common, which points to a mistake.

A fingerprint that misleads is worse than none: each needs so many elements, or such unlikely values, that
it does not appear by chance.
"""

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attest.conformance.cases.case import Case

# A factor, a shift and zeros need so many wrong elements.
_FEW = 4
# Factors are equal if they differ by less than this.
_EQUAL = 2e-3
# Smaller relative errors are no trace of a factor or a shift: any noise would do.
_LARGE = 4 * _EQUAL
# A float16 is a number of bfloat16 once in eight.
_FEW_HALVES = 8
# Of right values, at most this part are numbers of bfloat16.
_BY_CHANCE = 0.05
# The axis of queries or keys.
_SEQUENCE_AXIS = {"out": 1, "lse": 2, "dquery": 1, "dkey": 1, "dvalue": 1}


def fingerprints(
    output: str, got: NDArray[Any], want: NDArray[np.float64], wrong: NDArray[np.bool_], case: Case
) -> tuple[str, ...]:
    """Return what the wrong elements of an output have in common, in words; empty if nothing is known.

    wrong: the elements outside their bound. got, want and wrong have the shape of the output.
    """
    if not wrong.any():
        return ()
    values, exact = got[wrong].astype(np.float64), want[wrong]
    if np.isnan(values).all():
        return ("every wrong value is NaN",)
    if not np.isfinite(values).all() or not np.isfinite(exact).all():
        return ()
    # Right elements may be infinite, and factors may overflow.
    with np.errstate(all="ignore"):
        found = [*_zeros(values, exact), *_bfloat16(got, want)]
        return tuple(found or _factor(values, exact, case) or _shift(output, got, want, wrong))


def _zeros(values: NDArray[Any], exact: NDArray[Any]) -> Iterator[str]:
    if len(values) >= _FEW and not values.any() and exact.all():
        yield "every wrong value is 0"


def _bfloat16(got: NDArray[Any], want: NDArray[np.float64]) -> Iterator[str]:
    """Yield a text if an output in a finer dtype holds only numbers of bfloat16, and should not."""
    if got.dtype.name not in ("float32", "float16"):
        return
    right = want.astype(got.dtype)
    counted = right != 0
    coarse = (
        counted.any()
        and got[counted].any()
        and bool(_in_bfloat16(got[counted]).all())
        and _in_bfloat16(right[counted]).mean() <= _BY_CHANCE
    )
    if coarse and (got.dtype.name == "float32" or got.size >= _FEW_HALVES):
        yield "every value is a number of bfloat16"


def _in_bfloat16(array: NDArray[Any]) -> NDArray[np.bool_]:
    return array.astype(np.float64) == array.astype(ml_dtypes.bfloat16).astype(np.float64)


def _factor(values: NDArray[Any], exact: NDArray[Any], case: Case) -> list[str]:
    """Return a text if there is one factor between all wrong values and the right ones."""
    if len(values) < _FEW or not exact.all():
        return []
    factors = values / exact
    factor = float(np.median(factors))
    if not np.all(np.abs(factors - factor) <= _EQUAL * abs(factor)) or factor == 0:
        return []
    if abs(factor - 1) <= _LARGE:
        return []
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    named = {
        "the scale": scale,
        "log 2": math.log(2),
        "the number of query heads that share a KV head": case.q_heads / case.kv_heads,
    }
    for name, number in named.items():
        for words, expected in ((name, number), (f"1 / {name}", 1 / number if number else math.nan)):
            if abs(number - 1) > _EQUAL and abs(factor - expected) <= _EQUAL * abs(expected):
                return [f"every wrong value is the right one times {words}, {factor:.4g}"]
    return [f"every wrong value is the right one times {factor:.4g}"]


def _shift(output: str, got: NDArray[Any], want: NDArray[Any], wrong: NDArray[np.bool_]) -> list[str]:
    """Return a text if the values belong one place before or after."""
    axis = _SEQUENCE_AXIS.get(output)
    if axis is None or got.ndim <= axis or np.count_nonzero(wrong) < _FEW:
        return []
    word = "key" if output in ("dkey", "dvalue") else "query"
    large = np.abs(got.astype(np.float64) - want) > _LARGE * np.abs(want)
    for step, where in ((1, "before"), (-1, "after")):
        moved = np.roll(want, step, axis)
        near = np.abs(got.astype(np.float64) - moved) <= _EQUAL * np.abs(moved)
        inside = wrong.copy()
        # The first or the last place has no neighbour.
        inside[(slice(None),) * axis + (0 if step == 1 else -1,)] = False
        if np.count_nonzero(inside) >= _FEW and near[inside].all() and large[inside].mean() > 0.5:
            return [f"every wrong value is the right one of the {word} {where} it"]
    return []
