"""Numerics: the arithmetic that a kernel declares, and the cost of one rounding of it.

A unit roundoff u is half a unit in the last place of 1: 2**-8 for bfloat16, 2**-11 for float16 and TF32,
2**-24 for float32.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

Floats = NDArray[np.float64]

# The mean square of a relative rounding error is this times u**2: the error is uniform within half a unit
# in the last place, and significands are log-uniform (Benford): E[1/x**2] = 3 / (8 ln 2), over 3.
ROUNDING_VARIANCE = 1 / (8 * math.log(2.0))

# How far the square of the largest rounding error, u**2, exceeds that mean square, relative to it.
WORST_EXCESS = 1 / ROUNDING_VARIANCE - 1

# A float32 result below this may be flushed to zero by the device.
SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Format:
    """A float format: unit roundoff, half its smallest subnormal, and where it rounds to infinity."""

    dtype: np.dtype[Any]
    unit: float
    half_subnormal: float
    overflow: float


def format_of(dtype: DTypeLike) -> Format:
    """Return the format of a dtype or of its name; to float64 a kernel rounds nothing further."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if kind == np.float64:
        return Format(kind, 0.0, 0.0, math.inf)
    info = ml_dtypes.finfo(kind)
    unit = float(info.eps) / 2
    return Format(kind, unit, float(info.smallest_subnormal) / 2, float(info.max) * (1 + unit / 2))


def half_ulp(magnitude: Floats, unit: float) -> Floats:
    """Return half a unit in the last place of numbers that have a unit roundoff, at any exponent; 0 for 0."""
    return np.ldexp(unit, np.frexp(magnitude)[1] - 1) * (magnitude > 0)


@dataclass(frozen=True)
class Numerics:
    """The arithmetic that a kernel declares: it is held to no better, and to no worse.

    output_dtype: of out, dquery, dkey and dvalue: "float16", "bfloat16" or "float32".
    input_rounding: unit roundoff to which the dots round operands that the inputs store with more bits
        (2**-11 where float32 inputs go through TF32 units), 0 where they take them as stored.
    accumulator: of dots, sums and pointwise arithmetic; 2**-23 where the matrix unit truncates.
    truncated: products that such a unit adds at once before it truncates, or None where sums are rounded.
    dot_lanes, sum_lanes: how many partial sums a dot product, and a sum of a row, are made of (vector
        lanes, the tree inside a matrix unit): only the predicted standard deviation reads them.
    logits: a further rounding of the logits where they are stored in less than the accumulator, or 0.
    weights: the cast of P and dS before they are multiplied.
    half_subnormal: half the smallest subnormal of the dtype of that cast; what lies below becomes 0.
    d_logits_below: what a power of two keeps every dS of a batch entry below, as far as the norms of dO and
        V tell, before the cast; of an entry that it scales down, the cast takes as much more; inf: none.
    exponential, tanh: largest relative error of the device's functions.
    lse: the rounding of the returned lse.
    d_weights: a rounding of dP = dO V^T where it is stored, or 0.
    key_block: keys per step of the online softmax; None: all of them in one.
    dot_keys: keys over which one dot product sums, where that is more than key_block: of a kernel that
        takes small problems in one step and large ones in several. Only the predicted standard deviation
        reads it.
    splits: partial results (split-KV, ring) that are merged.
    materialised: P is divided by its sum before the cast and kept for the backward pass, in which D is the
        sum of P * dP; otherwise the backward pass recomputes P from the returned lse and D is the sum of
        dO * O, as in flash attention. rounded_out_in_delta: that O is the one returned, already rounded.
    delta_from_weights: D is the sum of P * dP although P is recomputed from the returned lse.
    weights_from_lse: the forward pass weighs the values by exp(t - lse) with the lse as returned, and does
        not divide by the sum of these weights.
    partials: the rounding of partial results, of one key block or split each, before they are added; or 0.
    """

    output_dtype: str
    input_rounding: float = 0.0
    accumulator: float = 2.0**-24
    truncated: int | None = None
    dot_lanes: int = 1
    sum_lanes: int = 8
    logits: float = 0.0
    weights: float = 2.0**-24
    half_subnormal: float = 0.0
    d_logits_below: float = math.inf
    exponential: float = 2.0**-22
    tanh: float = 2.0**-20
    lse: float = 2.0**-24
    d_weights: float = 0.0
    key_block: int | None = None
    dot_keys: int | None = None
    splits: int = 1
    materialised: bool = False
    rounded_out_in_delta: bool = True
    delta_from_weights: bool = False
    weights_from_lse: bool = False
    partials: float = 0.0

    def __post_init__(self) -> None:
        units = ("input_rounding", "accumulator", "logits", "weights", "half_subnormal", "partials")
        for name in (*units, "exponential", "tanh", "lse", "d_weights"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected a number in [0, 1)")
        if not self.d_logits_below > 0:
            raise ValueError(f"d_logits_below: got {self.d_logits_below!r}, expected a number above 0")
        for name in ("truncated", "dot_lanes", "sum_lanes", "splits", "key_block", "dot_keys"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name}: got {count!r}, expected at least 1")
        format_of(self.output_dtype)

    def gamma(self, n: Floats | int) -> Floats:
        """Return the largest relative error of a sum of n products in any order: n u / (1 - n u) (Higham)."""
        error = np.minimum(np.asarray(n, np.float64) * self.accumulator, 0.5)
        return error / (1 - error)

    def drift(self, n: int) -> float:
        """Return how far truncation usually pulls a dot product of n terms towards 0, relative to it.

        It is half a unit in the last place a step.
        """
        return 0.0 if self.truncated is None else self.accumulator / 2 * math.ceil(n / self.truncated)

    def blocks(self, keys: Floats | int) -> Floats:
        """Return the steps of the online softmax that see some of so many keys."""
        count = np.asarray(keys, np.float64)
        return np.minimum(count, 1.0) if self.key_block is None else np.ceil(count / self.key_block)

    def dot_variance(self, n: Floats | int, total: Floats, squares: Floats) -> Floats:
        """Return the variance of the rounding errors of a dot product of n terms within one block.

        total: the sum. squares: the sum of the squared terms. In sequence, the k-th partial sum has a mean
        square of (k/n)**2 total**2 + (k/n) squares and is rounded once; lanes shorten the sequence.
        """
        return self._sequence(n, self.dot_lanes, total, squares)

    def blocked_dot_variance(self, n: Floats, total: Floats, squares: Floats) -> Floats:
        """Return the same over keys, where each block is summed by itself, rescaled and added."""
        return self._blocked(n, self.dot_lanes, self.dot_keys, total, squares)

    def blocked_sum_variance(self, n: Floats, total: Floats, squares: Floats) -> Floats:
        """Return the same for a sum of a row, without a dot product."""
        return self._blocked(n, self.sum_lanes, None, total, squares)

    def _sequence(self, n: Floats | int, lanes: int, total: Floats, squares: Floats) -> Floats:
        length = np.asarray(n, np.float64) / lanes + math.log2(lanes)
        return ROUNDING_VARIANCE * self.accumulator**2 * length * (total**2 / 3 + squares / 2)

    def _blocked(self, n: Floats, lanes: int, at_once: int | None, total: Floats, squares: Floats) -> Floats:
        """Return the variance. at_once: terms that may be one sequence although of several blocks."""
        blocks = np.maximum(self.blocks(n), 1.0)
        sequences = blocks if at_once is None else np.minimum(blocks, np.ceil(np.maximum(n, 1.0) / at_once))
        inner = self._sequence(n / sequences, lanes, total / np.sqrt(sequences), squares)
        outer = 2 * (blocks + self.splits - 2) * self.accumulator**2
        outer = outer + (blocks + self.splits - 1) * self.partials**2
        return inner + ROUNDING_VARIANCE * outer * (total**2 / 3 + squares / 2)


def coarse(numerics: Numerics) -> Numerics:
    """Return the arithmetic of a kernel that computes all in bfloat16, or worse where it declares worse."""
    unit = format_of("bfloat16").unit
    units = ("input_rounding", "accumulator", "logits", "weights", "exponential", "tanh", "lse", "d_weights")
    rounded = {name: max(getattr(numerics, name), unit) for name in units}
    flushed = max(numerics.half_subnormal, format_of("float16").half_subnormal)
    return replace(numerics, output_dtype="bfloat16", half_subnormal=flushed, **rounded)
