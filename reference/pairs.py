"""How logits keep more than 53 bits: unevaluated sums of two float64 arrays.

A logit of 1e4 rounded to float64 is off by 1e-12, and so, relatively, is its exponential. A pair
(high, low) carries the rounding error along. Dot products are made exact by slicing the operands so that
the leading slices multiply and add without any rounding (Ozaki, Ogita, Oishi, Rump 2012); scale and bias
go through the classic error-free transformations (Dekker 1971, Knuth).
"""

from fractions import Fraction
from math import frexp

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Pair = tuple[Floats, Floats]

_SPLITTER = 134217729.0  # 2**27 + 1 splits a float64 into two halves of 26 bits
_MANTISSA = 53


def inverse_sqrt(n: int) -> tuple[float, float]:
    """1 / sqrt(n) to twice the precision: a float64 and what its rounding lost."""
    high = float(n) ** -0.5
    exact = Fraction(high)
    return high, float((Fraction(1, n) - exact * exact) / (2 * exact))


def dot(left: Floats, right: Floats) -> Pair:
    """left @ right.T for [R, D] and [C, D]; the high part is exact, the low part the small rest."""
    depth = left.shape[1]
    bits = (_MANTISSA - max(depth - 1, 1).bit_length()) // 2
    left_high, left_low = _slice(left, bits)
    right_high, right_low = _slice(right, bits)
    return left_high @ right_high.T, left_high @ right_low.T + left_low @ right.T


def times(pair: Pair, factor: tuple[float, float]) -> Pair:
    """A pair times a scalar pair."""
    high, low = pair
    product = high * factor[0]
    high_a, high_b = _halves(high)
    factor_a, factor_b = _halves(np.float64(factor[0]))
    error = ((high_a * factor_a - product) + high_a * factor_b + high_b * factor_a) + high_b * factor_b
    return product, error + (low * factor[0] + high * factor[1])


def plus(pair: Pair, addend: Floats) -> Pair:
    """A pair plus an array."""
    high, low = pair
    total = high + addend
    shadow = total - high
    return total, ((high - (total - shadow)) + (addend - shadow)) + low


def minus_column(pair: Pair, column: Pair) -> Floats:
    """A pair [R, C] minus a pair [R], rounded once to float64."""
    return (pair[0] - column[0][:, None]) + (pair[1] - column[1][:, None])


def _slice(rows: Floats, bits: int) -> Pair:
    """Split each row into multiples of a power of two that fit into `bits` bits, and the rest."""
    largest = np.max(np.abs(rows), axis=1, initial=0.0)
    exponents = np.array([frexp(x)[1] if np.isfinite(x) else 0 for x in largest], np.int64)
    shift = np.ldexp(1.5, exponents - bits + _MANTISSA - 1)[:, None]
    high = (rows + shift) - shift
    return high, rows - high


def _halves(x: Floats | np.float64) -> tuple[Floats | np.float64, Floats | np.float64]:
    shifted = x * _SPLITTER
    high = shifted - (shifted - x)
    return high, x - high
