"""The predicted errors of the gradients of the logits and of the query.

Symbols as in docs/explanation/error-model.md: dP = dO V^T, D the row sum of dO * O less the cotangent of lse,
dS = p (dP - D) the gradient of the logits, g the slope of the cap.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from attest.reference.coherence import NO_PARTS, Cast, cast_error_of_sums
from attest.reference.error_forward import (
    FUNCTION_VARIANCE,
    ForwardError,
    lse_variance_of_sinks,
    weight_growth,
)
from attest.reference.error_row_max import row_max_error
from attest.reference.numerics import ROUNDING_VARIANCE, SMALLEST_NORMAL, Floats, Numerics, format_of
from attest.reference.oracle import BackwardBlock, Cotangents
from attest.reference.problem import Problem
from attest.reference.rows import RowBlock
from attest.reference.spread import Spread, at_least_bound, cast_error, finite, flushed_squares, rounding


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
    cast: of dS before it is multiplied by K or Q: what it cannot exceed, and rounded, its deviations.
    weight [R, N]: the error of p, recomputed. saturated [R, N]: what the largest error of tanh does to the
    derivative of the cap. Keys whose logits the cap has made equal share it.
    slope [R, N]: the variance of the derivative of the cap.
    sinks [R, n]: of what the row maximum adds to the gradient of the sinks.
    """

    own: Spread
    uncapped: Spread
    common: Floats
    pull: Floats
    repeated: Floats
    row_dot: Spread
    shift: Floats
    cast: Spread
    rounded: Cast
    weight: Floats
    saturated: Floats
    slope: Floats
    sinks: Spread


def logits_gradient_error(
    problem: Problem,
    numerics: Numerics,
    divisors: Floats,
    block: RowBlock,
    backward: BackwardBlock,
    error: ForwardError,
) -> LogitsGradient:
    """Return the error of the gradient of the logits; divisors [B] are those of `d_logits_divisors`."""
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

    d_row = finite(backward.d_lse) - finite(backward.row_dot)
    difference = np.where(block.seen, d_weights + d_row[:, None], 0.0)
    d_logits = finite(backward.d_logits)

    row = error.row
    off = weight_growth(block, error.weight.bound + (row.bound + error.factor.bound)[:, None])
    weight = np.where(block.weighed, off + SMALLEST_NORMAL, 0.0)
    if numerics.materialised and problem.normalize_output:
        # A weight that is kept lies between 0 and 1, but for the error of its normaliser.
        weight = np.minimum(weight, 1 + row.bound[:, None])
    # p = exp(t - L): the forward pass's error of t_j is in L, with the opposite sign and in the share p_j.
    # Where P is kept, it is the error of t_j itself. Where t_j is recomputed, operands are rounded as they
    # were, in whatever order they are summed; all else may be off by the same once more, or by other bits.
    own_sum = (p**2 * error.weight.variance).sum(axis=1)
    common = row.variance + own_sum + lse_variance_of_sinks(block, error.sinks)
    alike = error.weight.variance if numerics.materialised else error.operands
    pull = np.where(block.seen, p * alike, 0.0)
    repeated = np.where(block.seen, p * (error.weight.variance - alike), 0.0)
    recomputed = _Recomputed(weight, common)
    row_dot = _row_dot_error(
        problem, numerics, block, backward, error, Spread(dp_bound, dp_variance), recomputed
    )
    inner = np.where(block.seen, dp_bound + row_dot.bound[:, None], 0.0)
    bound = weight * (np.abs(difference) + inner) + p * inner + 6 * u * np.abs(d_logits)
    floor = _flush_floor(problem, block.dot_scale)
    bound = np.where(block.seen & live[:, None], bound + 4 * floor, 0.0)
    # Of a product below the normal numbers, flushing takes all.
    flushed = np.minimum(p * np.maximum(np.abs(d_weights), np.abs(d_row)[:, None]), 2 * floor) ** 2
    flushed = flushed + flushed_squares(p) * difference**2
    variance = p**2 * (error.weight.variance * difference**2 + dp_variance) + 3 * c * u**2 * d_logits**2
    variance = variance + flushed
    variance = np.where(block.seen, variance, 0.0)
    by_max = row_max_error(numerics, block, backward, error, weight, Spread(dp_bound, dp_variance))
    bound, variance = bound + by_max.keys.bound, variance + by_max.keys.variance
    own = uncapped = Spread(bound, variance)

    saturated, slope_variance = np.zeros_like(p), np.zeros_like(p)
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
            variance * (slope**2 + slope_variance) + np.where(block.seen, d_logits**2 * slope_variance, 0.0),
        )
        saturated = numerics.tanh * 2 * tanh**2 * d_logits
    shift = _row_dot_shift(problem, numerics, backward)
    d_uncapped = finite(backward.d_uncapped)
    floor = _cast_floor(numerics, block.dot_scale) * divisors[block.batch]
    cast = cast_error(numerics.weights, np.abs(d_uncapped), floor)
    deviations = np.sqrt(cast.variance) * np.sign(d_uncapped)
    rounded = Cast(np.abs(d_uncapped), deviations, error.rounded.unit, floor)
    return LogitsGradient(
        own=own,
        uncapped=uncapped,
        common=common,
        pull=pull,
        repeated=repeated,
        row_dot=row_dot,
        shift=shift,
        cast=cast,
        rounded=rounded,
        weight=weight,
        saturated=saturated,
        slope=slope_variance,
        sinks=by_max.sinks,
    )


def query_error(
    numerics: Numerics,
    block: RowBlock,
    backward: BackwardBlock,
    error: ForwardError,
    gradient: LogitsGradient,
) -> Spread:
    """Return the error of dquery [R, D] of a block."""
    u, v_in, c, scale = numerics.accumulator, numerics.input_rounding, ROUNDING_VARIANCE, abs(block.dot_scale)
    d_logits = finite(backward.d_uncapped)
    count = (block.seen & (gradient.own.bound > 0)).sum(axis=1, dtype=np.float64)[:, None]
    blocks = numerics.blocks(count)
    repeated = cast_error_of_sums(gradient.rounded, error.key, scale)
    total, magnitude = d_logits @ error.key, np.abs(d_logits) @ np.abs(error.key)
    squares = d_logits**2 @ error.key**2
    slope = 1.0 if block.cap_slope is None else finite(block.cap_slope)
    seen = np.where(block.seen, finite(block.weights), 0.0)
    # What an error of D of 1 moves, squared: through the slope of the cap and through the error of the slope.
    moved = ((seen * slope) @ error.key) ** 2 + (seen**2 * gradient.slope) @ error.key**2
    bound = scale * (
        (gradient.uncapped.bound * (1 + numerics.weights) + gradient.cast.bound)
        @ np.abs(error.key)
        * (1 + v_in)
        + (numerics.gamma(count + blocks) + 4 * u + v_in + numerics.partials * blocks) * magnitude
    )
    flushed = SMALLEST_NORMAL * max(1.0, scale) * count
    bound = bound + flushed
    variance = flushed**2 + scale**2 * (
        gradient.uncapped.variance @ error.key**2
        + gradient.common[:, None] * total**2
        - 2 * total * ((gradient.pull * d_logits) @ error.key)
        - 2 * np.minimum(total * ((gradient.repeated * d_logits) @ error.key), 0.0)
        + gradient.row_dot.variance[:, None] * moved
        + FUNCTION_VARIANCE * (gradient.saturated @ error.key) ** 2
        + numerics.blocked_dot_variance(count, total, squares)
        + c * (v_in**2 * squares + 2 * u**2 * total**2)
    )
    # A sum of squares, computed as a difference: rounding may take it below 0.
    variance = np.maximum(variance, 0.0) + repeated.variance
    dtype = format_of(numerics.output_dtype)
    parts = NO_PARTS
    if error.repeats:
        shared = gradient.common[:, None] * total**2 + gradient.row_dot.variance[:, None] * moved
        pairs = (gradient.uncapped.variance + gradient.cast.variance) * np.square(error.key).sum(axis=1)
        parts = parts.plus(scale**2 * pairs, scale**2 * shared.sum(axis=1))
    extra = repeated.extra + scale**2 * np.asarray(gradient.row_dot.extra)[..., None] * moved
    variance = at_least_bound(Spread(bound, variance), error.unresolved[:, None]).variance
    spread = Spread(bound, variance, extra, shares=(repeated.shares,), parts=parts)
    return rounding(scale * np.abs(total), spread, dtype.unit, dtype.half_subnormal)


def _row_dot_shift(problem: Problem, numerics: Numerics, backward: BackwardBlock) -> Floats:
    """Return the error [R] of D that rounding the exact O makes."""
    from_out = numerics.rounded_out_in_delta and not numerics.delta_from_weights
    if numerics.materialised or not from_out or not problem.normalize_output:
        return np.zeros(len(backward.out))
    out = finite(backward.out)
    rounded = out.astype(format_of(numerics.output_dtype).dtype).astype(np.float64)
    return (finite(backward.d_out) * finite(rounded - out)).sum(axis=1)


def _flush_floor(problem: Problem, scale: float) -> float:
    """Return what may be flushed of dS: below the normals, its product or quotient with scale, cap, share."""
    cap, kept = problem.logits_soft_cap or 1.0, 1 / (1 - problem.dropout_prob)
    return SMALLEST_NORMAL * max(1.0, 1 / abs(scale) if scale else 1.0) * max(cap, 1 / cap) * kept


def _cast_floor(numerics: Numerics, scale: float) -> float:
    """Return half the smallest subnormal of dS, which kernels cast before or after the scale."""
    return numerics.half_subnormal * max(1.0, 1 / abs(scale) if scale else 1.0)


def d_logits_divisors(problem: Problem, numerics: Numerics, cotangents: Cotangents) -> Floats:
    """Return the power of two [B] that dS of a batch entry is divided by before its cast, or twice that.

    cotangents: the `natural_cotangents`. |dP - D| is at most 2 |dO| |V| / (1 - rate) + |dlse|. Where out is
    not normalised, what multiplies dO is at most the number of its terms.
    """
    if math.isinf(numerics.d_logits_below):
        return np.ones(problem.batch)
    d_out, value = (
        np.linalg.norm(finite(x.astype(np.float64)), axis=-1).max(axis=(1, 2), initial=0.0)
        for x in (cotangents.out, problem.value)
    )
    sinks = 0 if problem.softmax_aux is None else problem.softmax_aux.shape[-1]
    terms = 1 if problem.normalize_output else problem.kv_len + sinks
    d_lse = np.zeros((1, 1, 1)) if cotangents.lse is None else np.abs(finite(cotangents.lse))
    most = 2 * terms * d_out * value / (1 - problem.dropout_prob) + d_lse.max(axis=(1, 2), initial=0.0)
    return np.ldexp(1.0, np.maximum(0, np.frexp(most / numerics.d_logits_below)[1]))


@dataclass(frozen=True)
class _Recomputed:
    """The error of P in the backward pass: its bound [R, N], the variance [R] of what a row shares."""

    weight: Floats
    common: Floats


def _row_dot_error(
    problem: Problem,
    numerics: Numerics,
    block: RowBlock,
    backward: BackwardBlock,
    error: ForwardError,
    dp: Spread,
    recomputed: _Recomputed,
) -> Spread:
    """Return the error [R] of D."""
    u, c, depth = numerics.accumulator, ROUNDING_VARIANCE, problem.value_dim
    p, d_out, out = finite(block.weights), np.abs(finite(backward.d_out)), np.abs(finite(backward.out))
    d_weights, row_dot = finite(backward.d_weights), finite(backward.row_dot)
    d_row = np.abs(finite(backward.d_lse) - row_dot)
    if not problem.normalize_output:
        # What of D comes through out cancels what comes through the factor, so a kernel needs neither.
        return Spread(u * d_row, c * u**2 * d_row**2)
    if numerics.delta_from_weights and not numerics.materialised:
        return _row_dot_of_weights(numerics, block, backward, error, dp, recomputed)
    own = (p**2 * error.weight.variance + flushed_squares(p)) * (d_weights - row_dot[:, None]) ** 2
    variance = own.sum(axis=1) + lse_variance_of_sinks(block, error.sinks) * row_dot**2 + c * u**2 * d_row**2
    # Rounding dO moves the dP of a row together, and D, which reads it as stored, does not follow.
    variance = variance + c * numerics.input_rounding**2 * (d_out**2 * out**2).sum(axis=1)
    bound = u * d_row + (numerics.gamma(depth) + 2 * u) * (d_out * out).sum(axis=1)
    extra: Floats | float = 0.0
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
        # The exact outputs are known, and so is how far rounding takes D with them.
        usual = (d_out**2 * rounded.variance).sum(axis=1)
        through = replace(
            error.rounded, deviations=np.sqrt(error.cast.variance) * np.where(p > 0, d_weights, 0.0)
        )
        moved = cast_error_of_sums(through, np.ones((p.shape[1], 1)))
        extra = np.maximum(_row_dot_shift(problem, numerics, backward) ** 2 - usual, 0.0) + moved.extra[:, 0]
        variance = variance + (
            moved.variance[:, 0]
            + usual
            + (d_out**2 * channels).sum(axis=1)
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
    return Spread(bound, variance, extra)


def _row_dot_of_weights(
    numerics: Numerics,
    block: RowBlock,
    backward: BackwardBlock,
    error: ForwardError,
    dp: Spread,
    recomputed: _Recomputed,
) -> Spread:
    """Return the error [R] of D where it is the sum of P * dP, with P recomputed from the returned lse."""
    u, c, p = numerics.accumulator, ROUNDING_VARIANCE, finite(block.weights)
    d_weights = np.where(block.weighed, finite(backward.d_weights), 0.0)
    size, row_dot = np.abs(d_weights), finite(backward.row_dot)
    d_row = np.abs(finite(backward.d_lse) - row_dot)
    bound = (recomputed.weight * (size + dp.bound) + p * dp.bound).sum(axis=1)
    bound = bound + (numerics.gamma(error.count) + 4 * u) * (p * size).sum(axis=1) + u * d_row
    variance = (p**2 * (error.weight.variance * size**2 + dp.variance)).sum(axis=1)
    variance = variance + recomputed.common * row_dot**2 + c * u**2 * (d_row**2 + 2 * row_dot**2)
    squares = (p**2 * size**2).sum(axis=1)
    return Spread(bound, variance + numerics.blocked_dot_variance(error.count, row_dot, squares))
