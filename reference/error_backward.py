"""How far the five gradients may be from the truth.

Symbols as in docs/error-model.md: dP = dO V^T, D the row sum of dO * O less the cotangent of lse,
dS = p (dP - D) the gradient of the logits, g the slope of the cap.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from reference.error_forward import (
    FUNCTION_VARIANCE,
    ForwardError,
    Spread,
    cast_error,
    finite,
    lse_variance_of_sinks,
    rounding,
)
from reference.error_row_max import row_max_error
from reference.numerics import ROUNDING_VARIANCE, SMALLEST_NORMAL, Floats, Numerics, format_of
from reference.oracle import BackwardBlock, d_bias_block
from reference.problem import Problem
from reference.rows import RowBlock
from reference.semantics import Semantics
from reference.visibility import Ints


@dataclass(frozen=True)
class LogitsGradient:
    """The error of dS of a block; R rows, N keys.

    own [R, N]: before the cap's derivative is applied, what is independent from key to key; its bound is
    that of the whole error. uncapped [R, N]: the same after it.
    common [R]: the variance of a factor common to dS of the row. pull [R, N]: its covariance with the error
    of each key's own p, which it contains in the share p. repeated [R, N]: what is added to pull if the
    backward pass recomputes the logits to the same bits, which a correct kernel may or may not.
    row_dot [R]: the error of D. shift [R]: the part of it that is known beforehand, from rounding the exact
    O: sums over rows collect its sign.
    weight [R, N]: the error of p, recomputed. saturated [R, N]: what the largest error of tanh does to the
    derivative of the cap. Keys whose logits the cap has made equal share it.
    sinks [R, n]: of what the row maximum adds to the gradient of the sinks.
    """

    own: Spread
    uncapped: Spread
    common: Floats
    pull: Floats
    repeated: Floats
    row_dot: Spread
    shift: Floats
    weight: Floats
    saturated: Floats
    sinks: Spread


def logits_gradient_error(
    problem: Problem, numerics: Numerics, block: RowBlock, backward: BackwardBlock, error: ForwardError
) -> LogitsGradient:
    """The error of the gradient of the logits."""
    u, c = numerics.accumulator, ROUNDING_VARIANCE
    p, keep, value = finite(block.weights), error.keep, error.value
    d_out, d_weights = finite(backward.d_out), finite(backward.d_weights)
    live = (d_out != 0).any(axis=1) | (finite(backward.d_lse) != 0)

    # dP = dO V^T, with dropout.
    depth, v_in = problem.value_dim, numerics.input_rounding
    magnitude = np.where(block.weighed, keep * (np.abs(d_out) @ np.abs(value).T), 0.0)
    squares = np.where(block.weighed, keep**2 * (d_out**2 @ (value**2).T), 0.0)
    dp_bound = (numerics.gamma(depth) + 2 * v_in + v_in**2 + 2 * u) * magnitude
    stored = cast_error(
        numerics.d_weights, np.abs(d_weights), numerics.half_subnormal * (numerics.d_weights > 0)
    )
    dp_bound = dp_bound * (1 + numerics.d_weights) + stored.bound
    dp_variance = (
        numerics.dot_variance(depth, d_weights, squares)
        + c * (u**2 + 2 * v_in**2) * squares
        + c * u**2 * d_weights**2
        + stored.variance
        + error.factor.variance[:, None] * d_weights**2
    )
    factor_off = np.expm1(np.minimum(error.factor.bound, 80.0))[:, None]
    dp_bound = dp_bound + factor_off * (np.abs(d_weights) + dp_bound)

    row_dot = _row_dot_error(problem, numerics, block, backward, error, Spread(dp_bound, dp_variance))
    d_row = finite(backward.d_lse) - finite(backward.row_dot)
    difference = np.where(block.seen, d_weights + d_row[:, None], 0.0)
    d_logits = finite(backward.d_logits)

    row = error.row
    off = np.expm1(np.minimum(error.weight.bound + (row.bound + error.factor.bound)[:, None], 80.0))
    weight = np.where(block.weighed, p * off + SMALLEST_NORMAL, 0.0)
    # p = exp(t - L): the forward pass's error of t_j is in L, with the opposite sign and in the share p_j.
    # Where P is kept, it is the error of t_j itself. Where t_j is recomputed, operands are rounded as they
    # were, in whatever order they are summed; all else may be off by the same once more, or by other bits.
    own_sum = (p**2 * error.weight.variance).sum(axis=1)
    common = row.variance + own_sum + lse_variance_of_sinks(block, error.sinks)
    alike = error.weight.variance if numerics.materialised else error.operands
    pull = np.where(block.seen, p * alike, 0.0)
    repeated = np.where(block.seen, p * (error.weight.variance - alike), 0.0)
    inner = np.where(block.seen, dp_bound + row_dot.bound[:, None], 0.0)
    bound = weight * (np.abs(difference) + inner) + p * inner + 6 * u * np.abs(d_logits)
    bound = np.where(block.seen & live[:, None], bound + SMALLEST_NORMAL, 0.0)
    # Of a weight below the normal numbers, flushing takes all.
    flushed = np.minimum(p, SMALLEST_NORMAL) ** 2
    variance = p**2 * (error.weight.variance * difference**2 + dp_variance) + 3 * c * u**2 * d_logits**2
    variance = variance + flushed * difference**2
    variance = np.where(block.seen, variance, 0.0)
    by_max = row_max_error(numerics, block, backward, error, weight, Spread(dp_bound, dp_variance))
    bound, variance = bound + by_max.keys.bound, variance + by_max.keys.variance
    own = uncapped = Spread(bound, variance)

    saturated = np.zeros_like(p)
    if block.tanh is not None and block.cap_slope is not None and problem.logits_soft_cap is not None:
        cap, slope, tanh = problem.logits_soft_cap, block.cap_slope, np.abs(block.tanh)
        # 1 - tanh^2 inherits twice the absolute error of tanh.
        tanh_off = np.minimum(1.0, slope + 0.77 * error.uncapped.bound / cap) * error.uncapped.bound / cap
        tanh_off = tanh_off + tanh * numerics.tanh
        slope_off = np.minimum(2 * tanh * tanh_off + tanh_off**2 + 3 * u, 2.0)
        tanh_variance = slope**2 * error.uncapped.variance / cap**2
        tanh_variance = tanh_variance + FUNCTION_VARIANCE * (tanh * numerics.tanh) ** 2
        slope_variance = 4 * tanh**2 * tanh_variance + 2 * c * u**2
        uncapped = Spread(
            np.where(block.seen, bound * (slope + slope_off) + np.abs(d_logits) * slope_off, 0.0),
            variance * slope**2 + np.where(block.seen, d_logits**2 * slope_variance, 0.0),
        )
        saturated = numerics.tanh * 2 * tanh**2 * d_logits
    shift = _row_dot_shift(problem, numerics, backward)
    return LogitsGradient(
        own, uncapped, common, pull, repeated, row_dot, shift, weight, saturated, by_max.sinks
    )


def query_error(
    numerics: Numerics,
    block: RowBlock,
    backward: BackwardBlock,
    error: ForwardError,
    gradient: LogitsGradient,
) -> Spread:
    """The error of dquery [R, D] of a block."""
    u, v_in, c, scale = numerics.accumulator, numerics.input_rounding, ROUNDING_VARIANCE, abs(block.dot_scale)
    d_logits = finite(backward.d_uncapped)
    count = (block.seen & (gradient.own.bound > 0)).sum(axis=1, dtype=np.float64)[:, None]
    blocks = numerics.blocks(count)
    cast = cast_error(numerics.weights, np.abs(d_logits), _cast_floor(numerics, scale))
    total, magnitude = d_logits @ error.key, np.abs(d_logits) @ np.abs(error.key)
    squares = d_logits**2 @ error.key**2
    slope = 1.0 if block.cap_slope is None else finite(block.cap_slope)
    leak = np.where(block.seen, finite(block.weights) * slope, 0.0) @ error.key
    bound = scale * (
        (gradient.uncapped.bound * (1 + numerics.weights) + cast.bound) @ np.abs(error.key) * (1 + v_in)
        + (numerics.gamma(count + blocks) + 4 * u + v_in) * magnitude
    )
    bound = bound + SMALLEST_NORMAL * count
    variance = scale**2 * (
        (gradient.uncapped.variance + cast.variance) @ error.key**2
        + gradient.common[:, None] * total**2
        - 2 * total * ((gradient.pull * d_logits) @ error.key)
        - 2 * np.minimum(total * ((gradient.repeated * d_logits) @ error.key), 0.0)
        + gradient.row_dot.variance[:, None] * leak**2
        + FUNCTION_VARIANCE * (gradient.saturated @ error.key) ** 2
        + numerics.blocked_dot_variance(count, total, squares)
        + c * (v_in**2 * squares + 2 * u**2 * total**2)
    )
    # A sum of squares, computed as a difference: rounding may take it below 0.
    variance = np.maximum(variance, 0.0)
    dtype = format_of(numerics.output_dtype)
    return rounding(scale * np.abs(total), Spread(bound, variance), dtype.unit, dtype.half_subnormal)


class ByKeys:
    """Collects, block by block, the errors of the gradients that sum over query rows."""

    def __init__(
        self, problem: Problem, semantics: Semantics, numerics: Numerics, columns: Ints, sampled: bool
    ) -> None:
        self._problem, self._semantics, self._numerics = problem, semantics, numerics
        self._columns = columns
        shape = (problem.batch, len(columns), problem.kv_heads)
        self._key = _Sum.zeros((*shape, problem.head_dim))
        self._value = _Sum.zeros((*shape, problem.value_dim))
        self._bias = None if problem.bias is None or sampled else _Sum.zeros(problem.bias.shape)
        self._sinks = None
        if problem.softmax_aux is not None and not sampled:
            self._sinks = _Sum.zeros((problem.q_heads, problem.softmax_aux.shape[-1]))

    def add(
        self, block: RowBlock, backward: BackwardBlock, error: ForwardError, gradient: LogitsGradient
    ) -> None:
        """Add what the rows of a block contribute."""
        self._add_key(block, backward, gradient)
        self._add_value(block, backward, error, gradient)
        if self._bias is not None:
            self._add_bias(self._bias, block, backward, gradient)
        if self._sinks is not None:
            self._add_sinks(self._sinks, block, backward, error, gradient)

    def finish(self) -> dict[str, Spread]:
        """The errors by output, sums and their rounding included."""
        numerics, problem = self._numerics, self._problem
        sinks = self._sinks
        if sinks is not None and problem.softmax_aux is not None and problem.shares_sinks:
            sinks = sinks.over_heads(problem.softmax_aux.shape)
        bias_dtype = numerics.output_dtype if problem.bias is None else problem.bias.dtype
        sinks_dtype = numerics.output_dtype if problem.softmax_aux is None else problem.softmax_aux.dtype
        sums = (
            ("dkey", self._key, numerics.output_dtype),
            ("dvalue", self._value, numerics.output_dtype),
            ("dbias", self._bias, bias_dtype),
            ("dsoftmax_aux", sinks, sinks_dtype),
        )
        return {
            name: total.spread(numerics, dtype, problem.group)
            for name, total, dtype in sums
            if total is not None and name[1:] in self._semantics.gradients
        }

    def _add_key(self, block: RowBlock, backward: BackwardBlock, gradient: LogitsGradient) -> None:
        numerics, scale, at = self._numerics, abs(block.dot_scale), (block.batch, slice(None), block.kv_head)
        columns, query = self._columns, finite(block.query)
        d_logits = finite(backward.d_uncapped)[:, columns]
        cast = cast_error(numerics.weights, np.abs(d_logits), _cast_floor(numerics, scale))
        slope = 1.0 if block.cap_slope is None else finite(block.cap_slope)[:, columns]
        leak = np.where(block.seen[:, columns], finite(block.weights)[:, columns] * slope, 0.0)
        variance = (
            gradient.uncapped.variance[:, columns]
            + cast.variance
            + (gradient.common[:, None] - 2 * gradient.pull[:, columns]) * d_logits**2
            + gradient.row_dot.variance[:, None] * leak**2
        )
        bound = gradient.uncapped.bound[:, columns] * (1 + numerics.weights) + cast.bound
        live = (gradient.own.bound[:, columns] > 0).sum(axis=0)[:, None]
        self._key.add(at, scale * query, d_logits, Spread(bound, variance), live, numerics)
        self._key.shift[at] += (leak * gradient.shift[:, None]).T @ (scale * query)

    def _add_value(
        self, block: RowBlock, backward: BackwardBlock, error: ForwardError, gradient: LogitsGradient
    ) -> None:
        numerics, at = self._numerics, (block.batch, slice(None), block.kv_head)
        columns = self._columns
        keep = error.keep if error.keep.shape == (1, 1) else error.keep[:, columns]
        p = finite(block.weights)[:, columns]
        cast = cast_error(numerics.weights, p, numerics.half_subnormal)
        weight_variance = error.weight.variance[:, columns] + gradient.common[:, None]
        weight_variance = weight_variance - 2 * gradient.pull[:, columns]
        flushed = np.minimum(p, SMALLEST_NORMAL) ** 2
        variance = keep**2 * (p**2 * weight_variance + cast.variance + flushed)
        bound = keep * (gradient.weight[:, columns] * (1 + numerics.weights) + cast.bound)
        d_out = finite(backward.d_out)
        live = (block.weighed[:, columns] & (d_out != 0).any(axis=1)[:, None]).sum(axis=0)[:, None]
        self._value.add(at, d_out, p * keep, Spread(bound, variance), live, numerics)

    def _add_bias(
        self,
        total: "_Sum",
        block: RowBlock,
        backward: BackwardBlock,
        gradient: LogitsGradient,
    ) -> None:
        d_bias = finite(d_bias_block(self._semantics, block, backward))
        after_cap = self._semantics.bias == "after_cap"
        spread = gradient.own if after_cap else gradient.uncapped
        factor = abs(block.dot_scale) if self._semantics.bias == "before_scale" else 1.0
        slope = 1.0 if after_cap or block.cap_slope is None else finite(block.cap_slope)
        leak = np.where(block.seen, finite(block.weights) * slope * factor, 0.0)
        variance = (
            spread.variance * factor**2
            + (gradient.common[:, None] - 2 * gradient.pull) * d_bias**2
            + gradient.row_dot.variance[:, None] * leak**2
        )
        live = gradient.own.bound > 0
        shift = leak * gradient.shift[:, None]
        total.add_plane(block, d_bias, Spread(spread.bound * factor, variance), live, shift)

    def _add_sinks(
        self,
        total: "_Sum",
        block: RowBlock,
        backward: BackwardBlock,
        error: ForwardError,
        gradient: LogitsGradient,
    ) -> None:
        d_row = np.abs(finite(backward.d_lse) - finite(backward.row_dot))[:, None]
        p = block.sink_weights * np.abs(block.sink_slope)
        off = np.expm1(np.minimum(error.sinks.bound + error.row.bound[:, None], 80.0))
        slope_off = 0.0
        if self._semantics.sinks == "capped" and self._problem.logits_soft_cap is not None:
            slope_off = 2 * self._numerics.tanh + 6 * self._numerics.accumulator
        u, c = self._numerics.accumulator, ROUNDING_VARIANCE
        row_dot = gradient.row_dot.bound[:, None]
        bound = p * ((off + 4 * u) * (d_row + row_dot) + row_dot)
        bound = bound + block.sink_weights * (1 + off) * slope_off * (d_row + row_dot)
        bound = bound + SMALLEST_NORMAL * (d_row > 0)
        relative = error.sinks.variance + gradient.common[:, None] + 2 * c * u**2
        variance = p**2 * (d_row**2 * relative + gradient.row_dot.variance[:, None])
        variance = variance + (block.sink_weights * slope_off * d_row) ** 2 * FUNCTION_VARIANCE
        slope = np.abs(block.sink_slope)
        share = 0.0 if block.sink_max_share is None else block.sink_max_share
        through_max = share * np.abs(finite(backward.row_dot))[:, None]
        bound = bound + (slope + slope_off) * gradient.sinks.bound + slope_off * through_max
        variance = variance + slope**2 * gradient.sinks.variance
        at = block.head
        total.count[at] += (d_row > 0).sum(axis=0)
        total.bound[at] += bound.sum(axis=0)
        total.variance[at] += variance.sum(axis=0)
        total.total[at] += finite(backward.d_sinks).sum(axis=0)
        total.magnitude[at] += np.abs(finite(backward.d_sinks)).sum(axis=0)
        total.squares[at] += (finite(backward.d_sinks) ** 2).sum(axis=0)
        total.shift[at] += (p * gradient.shift[:, None]).sum(axis=0)


@dataclass(frozen=True)
class _Sum:
    """A gradient as the sum over query rows: what was summed, and the errors of the terms."""

    count: Floats
    total: Floats
    magnitude: Floats
    squares: Floats
    bound: Floats
    variance: Floats
    shift: Floats

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> "_Sum":
        return cls(*(np.zeros(shape) for _ in range(7)))

    def over_heads(self, shape: tuple[int, ...]) -> "_Sum":
        return _Sum(*(array.sum(axis=0).reshape(shape) for array in vars(self).values()))

    def add(
        self,
        at: tuple[int, slice, int],
        left: Floats,
        right: Floats,
        spread: Spread,
        live: NDArray[np.int64],
        numerics: Numerics,
    ) -> None:
        """Add right.T @ left, [R, C] and [R, D]; spread: the error of right; live: terms of each row."""
        v_in = numerics.input_rounding
        absolute, square = np.abs(left), left**2
        magnitude, squares = np.abs(right).T @ absolute, right.T**2 @ square
        self.count[at] += live
        self.total[at] += right.T @ left
        self.magnitude[at] += magnitude
        self.squares[at] += squares
        self.bound[at] += (spread.bound.T @ absolute) * (1 + v_in) + v_in * magnitude
        self.variance[at] += spread.variance.T @ square + ROUNDING_VARIANCE * v_in**2 * squares

    def add_plane(
        self, block: RowBlock, gradient: Floats, spread: Spread, live: NDArray[np.bool_], shift: Floats
    ) -> None:
        """Add one block of the gradient of the bias; broadcast axes collect every row."""
        shape = self.total.shape
        at = (block.batch if shape[0] > 1 else 0, block.head if shape[1] > 1 else 0)
        terms = (live, gradient, np.abs(gradient), gradient**2, spread.bound, spread.variance, shift)
        for array, term in zip(vars(self).values(), terms, strict=True):
            if shape[2] > 1:
                array[at][block.rows] += term
            else:
                array[at][0] += term.sum(axis=0)

    def spread(self, numerics: Numerics, dtype: DTypeLike, group: int) -> Spread:
        u = numerics.accumulator
        blocks = np.minimum(self.count, 1.0) * numerics.splits
        bound = self.bound + (numerics.gamma(self.count + blocks) + 4 * u) * self.magnitude
        bound = bound + SMALLEST_NORMAL * self.count
        variance = (
            self.variance
            + self.shift**2
            + numerics.blocked_dot_variance(self.count, self.total, self.squares, group)
        )
        variance = variance + 2 * ROUNDING_VARIANCE * u**2 * self.total**2
        output = format_of(dtype)
        return rounding(np.abs(self.total), Spread(bound, variance), output.unit, output.half_subnormal)


def _row_dot_shift(problem: Problem, numerics: Numerics, backward: BackwardBlock) -> Floats:
    """The error [R] of D that rounding the exact O makes."""
    if numerics.materialised or not numerics.rounded_out_in_delta or not problem.normalize_output:
        return np.zeros(len(backward.out))
    out = finite(backward.out)
    rounded = out.astype(format_of(numerics.output_dtype).dtype).astype(np.float64)
    return (finite(backward.d_out) * finite(rounded - out)).sum(axis=1)


def _cast_floor(numerics: Numerics, scale: float) -> float:
    """Half the smallest subnormal of dS, which kernels cast before or after the scale."""
    return numerics.half_subnormal * max(1.0, 1 / scale if scale else 1.0)


def _row_dot_error(
    problem: Problem,
    numerics: Numerics,
    block: RowBlock,
    backward: BackwardBlock,
    error: ForwardError,
    dp: Spread,
) -> Spread:
    """The error [R] of D."""
    u, c, depth = numerics.accumulator, ROUNDING_VARIANCE, problem.value_dim
    p, d_out, out = finite(block.weights), np.abs(finite(backward.d_out)), np.abs(finite(backward.out))
    d_weights, row_dot = finite(backward.d_weights), finite(backward.row_dot)
    d_row = np.abs(finite(backward.d_lse) - row_dot)
    if not problem.normalize_output:
        # What of D comes through out cancels what comes through the factor, so a kernel needs neither.
        return Spread(u * d_row, c * u**2 * d_row**2)
    own = p**2 * error.weight.variance * (d_weights - row_dot[:, None]) ** 2
    variance = own.sum(axis=1) + lse_variance_of_sinks(block, error.sinks) * row_dot**2 + c * u**2 * d_row**2
    # Rounding dO moves the dP of a row together, and D, which reads it as stored, does not follow.
    variance = variance + c * numerics.input_rounding**2 * (d_out**2 * out**2).sum(axis=1)
    bound = u * d_row + (numerics.gamma(depth) + 2 * u) * (d_out * out).sum(axis=1)
    if not numerics.materialised:
        rounded = Spread(error.out.bound, np.zeros_like(out))
        if numerics.rounded_out_in_delta:
            dtype = format_of(numerics.output_dtype)
            rounded = rounding(out, rounded, dtype.unit, dtype.half_subnormal)
        bound = bound + (d_out * rounded.bound).sum(axis=1)
        squares = (d_out**2 * out**2).sum(axis=1)
        # Each channel of O is a sum by itself; its normaliser is the same for all.
        channels = numerics.blocked_dot_variance(
            error.count[:, None], out, (p * error.keep) ** 2 @ error.value**2
        )
        normaliser = numerics.blocked_sum_variance(error.count, np.ones(len(p)), (p**2).sum(axis=1))
        variance = variance + (
            (error.cast.variance * np.where(p > 0, d_weights, 0.0) ** 2).sum(axis=1)
            + (d_out**2 * (rounded.variance + channels)).sum(axis=1)
            + numerics.dot_variance(depth, row_dot, squares)
            + (normaliser + 3 * c * u**2) * row_dot**2
        )
    else:
        magnitude = np.where(block.weighed, np.abs(d_weights), 0.0)
        bound = bound + (error.absolute * (magnitude + np.abs(row_dot)[:, None]) + p * dp.bound).sum(axis=1)
        bound = bound + (numerics.gamma(error.count) + 4 * u + error.row.bound) * (p * magnitude).sum(axis=1)
        variance = variance + (p**2 * dp.variance).sum(axis=1)
        variance = variance + numerics.blocked_dot_variance(
            error.count, row_dot, (p**2 * d_weights**2).sum(axis=1)
        )
    return Spread(bound, variance)
