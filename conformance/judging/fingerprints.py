"""Fingerprints: what the wrong values of an output have in common, which points to a mistake.

A fingerprint that misleads is worse than none: each needs so many elements that do not depend on each other,
or such unlikely values, that it does not appear by chance.
`docs/evidence/fingerprints.md` shows which ones planted defects have.
"""

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attest.conformance.cases.case import Case
from attest.conformance.judging.places import sequence_axis

Wrong = NDArray[np.bool_]

# A shift, and a factor without a name, need so many elements that do not depend on each other; a factor with
# a name needs fewer, and zeros, which no other value comes near, need two.
_FEW, _NAMED, _ZEROS = 4, 3, 2
# A value is the right one times a factor, or that of another row, within so many bounds of a correct kernel.
_BOUNDS = 2
# An element shows a factor if these bounds are at most this part of the factor, and of its distance from 1.
_OF_FACTOR, _OF_DISTANCE = 0.05, 0.1
# A factor that is nearer to the number of a name has it.
_EQUAL = 2e-3
# Elements that are looked at to count those that do not depend on each other.
_LOOKED_AT = 4096
# A float16 is a number of bfloat16 once in eight.
_FEW_HALVES = 8
# Of right values, at most this part are numbers of bfloat16.
_BY_CHANCE = 0.05
# Outputs of which each element is a sum of its own. In others, the elements of a row share weights.
_SEPARATE = ("lse", "dbias")
# Truncated values are on average half a unit in the last place nearer to 0, at the lower and at the upper end
# of the numbers between two powers of 2; a factor that looks so at one end does not at the other.
_AT_EITHER_END = 300
_HALF_UNIT, _ENDS_ALIKE = (0.4, 0.6), 0.08


def fingerprints(
    output: str,
    got: NDArray[Any],
    want: NDArray[np.float64],
    wrong: Wrong,
    bound: NDArray[np.float64],
    case: Case,
) -> tuple[str, ...]:
    """Return what the wrong elements of an output have in common, in words; empty if nothing is known.

    wrong: the elements outside their bound, of an output that breaks some judgement. got, want, wrong and
    bound have the shape of the output.
    """
    # Values of wrong kernels may be NaN, infinite or overflow.
    with np.errstate(all="ignore"):
        if not wrong.any():
            return tuple(_truncated(got, want))
        values, exact = got[wrong].astype(np.float64), want[wrong]
        nonfinite = [*_nonfinite(values, exact)]
        if nonfinite:
            return tuple(nonfinite)
        if not np.isfinite(exact).all():
            return ()
        found = [*_zeros(output, got, want, wrong), *_bfloat16(got, want)]
        found = found or [*_factor(output, got, want, wrong, bound, case)]
        found = found or [*_shift(output, got, want, wrong, bound)]
        return tuple(found or _truncated(got, want))


def _independent(output: str, chosen: Wrong, want: NDArray[np.float64]) -> int:
    """Return how many of the chosen elements do not depend on each other: of rows with different values."""
    places = np.argwhere(chosen)
    places = places[:: max(1, len(places) // _LOOKED_AT)]
    rows = places if output in _SEPARATE else places[:, :-1]
    if not rows.size:
        return min(len(places), 1)
    _, first = np.unique(rows, axis=0, return_index=True)
    return len(np.unique(want[tuple(places[first].T)].astype(np.float32)))


def _nonfinite(values: NDArray[Any], exact: NDArray[Any]) -> Iterator[str]:
    """Yield a text if values are not finite and should be."""
    nonfinite = values[~np.isfinite(values) & np.isfinite(exact)]
    if not len(nonfinite):
        return
    kinds = {"NaN": np.isnan, "inf": np.isposinf, "-inf": np.isneginf}
    kind = next((kind for kind, of_kind in kinds.items() if of_kind(nonfinite).all()), "NaN or infinite")
    every = len(nonfinite) == len(values)
    yield (
        f"every wrong value is {kind}"
        if every
        else f"{len(nonfinite)} of {len(values)} wrong values are {kind}"
    )


def _zeros(output: str, got: NDArray[Any], want: NDArray[np.float64], wrong: Wrong) -> Iterator[str]:
    zeros = len(got[wrong]) >= _FEW and not got[wrong].any() and want[wrong].all()
    if zeros and _independent(output, wrong, want) >= _ZEROS:
        yield "every wrong value is 0"


def _bfloat16(got: NDArray[Any], want: NDArray[np.float64]) -> Iterator[str]:
    """Yield a text if an output in a finer dtype holds only numbers of bfloat16, and should not."""
    if got.dtype.name not in ("float32", "float16"):
        return
    right, normal = want.astype(got.dtype), ml_dtypes.finfo(got.dtype).smallest_normal
    # Smaller numbers have fewer bits.
    counted, large = (np.isfinite(array) & (np.abs(array) >= normal) for array in (right, got))
    coarse = (
        counted.any()
        and large[counted].any()
        and bool(_in_bfloat16(got[counted]).all())
        and _in_bfloat16(right[counted]).mean() <= _BY_CHANCE
    )
    few = 1 if got.dtype.name == "float32" else _FEW_HALVES
    if coarse and np.count_nonzero(large & counted) >= few:
        yield "every value is a number of bfloat16"


def _in_bfloat16(array: NDArray[Any]) -> Wrong:
    return array.astype(np.float64) == array.astype(ml_dtypes.bfloat16).astype(np.float64)


def _factor(
    output: str,
    got: NDArray[Any],
    want: NDArray[np.float64],
    wrong: Wrong,
    bound: NDArray[np.float64],
    case: Case,
) -> Iterator[str]:
    """Yield a text if there is one factor between all wrong values and the right ones."""
    factors = got.astype(np.float64) / want
    error = _BOUNDS * bound / np.abs(want)
    shows = wrong & (error <= _OF_FACTOR) & (error * np.abs(factors) <= _OF_DISTANCE * np.abs(factors - 1))
    shows &= got != 0
    if not shows.any():
        return
    factor = float(np.median(factors[shows]))
    near = np.abs(got.astype(np.float64) - factor * want) <= _BOUNDS * abs(factor) * bound
    if not near[wrong].all():
        return
    equal = max(_EQUAL, float(np.median(error[shows])))
    names = [name for name, number in _numbers(case) if abs(factor - number) <= equal * abs(number)]
    if _independent(output, shows, want) >= (_NAMED if names else _FEW):
        named = f"{' or '.join(names)}, " if names else ""
        yield f"every wrong value is the right one times {named}{factor:.4g}"


def _numbers(case: Case) -> Iterator[tuple[str, float]]:
    """Yield the numbers that a mistake may multiply by, other than 1, with their names."""
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    named = {
        "the scale": scale,
        "log 2": math.log(2),
        "the number of query heads that share a KV head": case.q_heads / case.kv_heads,
    }
    for name, number in named.items():
        if number and abs(number - 1) > _EQUAL:
            yield name, number
            yield f"1 / {name}", 1 / number


def _shift(
    output: str,
    got: NDArray[Any],
    want: NDArray[np.float64],
    wrong: Wrong,
    bound: NDArray[np.float64],
) -> Iterator[str]:
    """Yield a text if the values belong one place before or after."""
    along = sequence_axis(output)
    if along is None or got.ndim <= along[0]:
        return
    axis, word = along
    for step, where in ((1, "before"), (-1, "after")):
        moved, allowed = np.roll(want, step, axis), _BOUNDS * np.roll(bound, step, axis)
        near = np.abs(got.astype(np.float64) - moved) <= allowed
        inside = wrong.copy()
        # The first or the last place has no neighbour.
        inside[(slice(None),) * axis + (0 if step == 1 else -1,)] = False
        # Where rows are nearly alike, a small error looks like a shift.
        error = np.abs(got.astype(np.float64) - want)
        shows = inside & (allowed <= _OF_FACTOR * np.abs(moved)) & (allowed <= _OF_DISTANCE * error)
        if near[inside].all() and _independent(output, shows, moved) >= _FEW:
            yield f"every wrong value is the right one of the {word} {where} it"
            return


def _truncated(got: NDArray[Any], want: NDArray[np.float64]) -> Iterator[str]:
    """Yield a text if an output of 16 bits is rounded to 0, not to the nearest number."""
    if got.dtype.itemsize != 2:
        return
    form = ml_dtypes.finfo(got.dtype)
    size, right = np.abs(got.astype(np.float64)), np.abs(want)
    normal = (right >= 2 * float(form.smallest_normal)) & np.isfinite(size) & np.isfinite(right)
    fraction, exponent = np.frexp(right[normal])
    nearer = (right - size)[normal] / np.ldexp(float(form.eps), exponent - 1)
    ends = [nearer[fraction < 0.75], nearer[fraction >= 0.75]]
    if min(map(len, ends)) < _AT_EITHER_END:
        return
    low, high = (float(np.median(end)) for end in ends)
    least, most = _HALF_UNIT
    if least <= low <= most and least <= high <= most and abs(low - high) <= _ENDS_ALIKE:
        yield "values are truncated, not rounded"
