"""Double-double arithmetic: unevaluated sums of two float64 arrays.

A logit of 1e4 rounded to float64 is off by 1e-12, and so, relatively, is its exponential. A pair
(high, low) carries the rounding error along. Dot products are made exact by slicing the operands so that
the leading slices multiply and add without any rounding (Ozaki, Ogita, Oishi, Rump 2012); scale and bias
go through the classic error-free transformations (Dekker 1971, Knuth); tanh starts from a table.
"""

from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Pair = tuple[Floats, Floats]

_SPLITTER = 134217729.0  # 2**27 + 1 splits a float64 into two halves of 26 bits
_MANTISSA = 53
_GRID = 256  # tanh is tabulated at multiples of 1 / 256 ...
_GRID_END = 8  # ... up to where what is left of tanh, below 2**-22, needs no more than float64


def inverse_sqrt(n: int) -> tuple[float, float]:
    """Return 1 / sqrt(n) to twice the precision: a float64 and what its rounding lost."""
    high = float(n) ** -0.5
    exact = Fraction(high)
    return high, float((Fraction(1, n) - exact * exact) / (2 * exact))


def dot(left: Floats, right: Floats) -> Pair:
    """Return left @ right.T for [R, D] and [C, D]; the high part is exact, the low part the small rest."""
    depth = left.shape[1]
    bits = (_MANTISSA - max(depth - 1, 1).bit_length()) // 2
    left_high, left_low = _slice(left, bits)
    right_high, right_low = _slice(right, bits)
    return left_high @ right_high.T, left_high @ right_low.T + left_low @ right.T


def times(pair: Pair, factor: tuple[float, float]) -> Pair:
    """Return a pair times a scalar pair."""
    high, low = pair
    product = high * factor[0]
    high_a, high_b = _halves(high)
    factor_a, factor_b = _halves(np.float64(factor[0]))
    error = ((high_a * factor_a - product) + high_a * factor_b + high_b * factor_a) + high_b * factor_b
    return product, error + (low * factor[0] + high * factor[1])


def plus(pair: Pair, addend: Floats) -> Pair:
    """Return a pair plus an array."""
    total, error = _two_sum(pair[0], addend)
    return total, error + pair[1]


def normalised(pair: Pair) -> Pair:
    """Return the same sum with the high part its float64 rounding, so that pairs compare part by part."""
    return _two_sum(*pair)


def soft_cap(pair: Pair, cap: float) -> Pair:
    """Return cap * tanh(pair / cap), normalised (S3).

    With a the nearest tabulated point and r the rest, tanh(a + r) exceeds tanh(a) by
    tanh(r) / cosh(a)^2 / (1 + tanh(a) tanh(r)), which is so small that float64 is enough for it.
    """
    high, low = pair
    quotient = high / cap
    product, error = times((quotient, np.zeros_like(quotient)), (cap, 0.0))
    lost = np.where(np.isfinite(quotient), ((high - product) - error + low) / cap, 0.0)
    tabulated_high, tabulated_low, slope = _tanh_table()
    # What is hidden may be NaN; it stays NaN through `rest`.
    step = np.rint(np.clip(np.nan_to_num(quotient), -_GRID_END, _GRID_END) * _GRID).astype(np.int64)
    sign, index = np.sign(step), np.abs(step)
    rest = np.tanh((quotient - step / _GRID) + lost)
    excess = rest * slope[index] / (1.0 + sign * tabulated_high[index] * rest)
    capped = times((sign * tabulated_high[index], sign * tabulated_low[index]), (cap, 0.0))
    return normalised(plus(capped, cap * excess))


def exp_difference(pair: Pair, column: Pair) -> Floats:
    """Return exp of a pair [R, C] minus a pair [R]; exactly 0 where the first is -inf."""
    high, low = plus(pair, -column[0][:, None])
    return np.where(np.isneginf(pair[0]), 0.0, np.exp(high + (low - column[1][:, None])))


@cache
def _tanh_table() -> tuple[Floats, Floats, Floats]:
    """Return tanh as a pair, and 1 / cosh^2, at 0, 1 / _GRID, ..., _GRID_END."""
    high = np.empty(_GRID_END * _GRID + 1)
    low, slope = np.empty_like(high), np.empty_like(high)
    with localcontext(prec=40):
        for index in range(len(high)):
            power = (Decimal(2 * index) / _GRID).exp()
            tanh = (power - 1) / (power + 1)
            high[index] = float(tanh)
            low[index] = float(tanh - Decimal(float(tanh)))
            slope[index] = float(4 * power / (power + 1) ** 2)
    return high, low, slope


def _two_sum(left: Floats, right: Floats) -> Pair:
    total = left + right
    shadow = total - left
    return total, (left - (total - shadow)) + (right - shadow)


def _slice(rows: Floats, bits: int) -> Pair:
    """Split each row into multiples of a power of two that fit into `bits` bits, and the rest."""
    largest = np.max(np.abs(rows), axis=1, initial=0.0)
    exponents = np.frexp(np.where(np.isfinite(largest), largest, 0.0))[1]
    shift = np.ldexp(1.5, exponents - bits + _MANTISSA - 1)[:, None]
    high = (rows + shift) - shift
    return high, rows - high


def _halves(x: Floats | np.float64) -> tuple[Floats | np.float64, Floats | np.float64]:
    shifted = x * _SPLITTER
    high = shifted - (shifted - x)
    return high, x - high
