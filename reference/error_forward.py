"""The predicted errors of the weights, out and lse of one block of query rows.

Symbols as in docs/explanation/error-model.md: t a logit after cap and bias, m the row's maximum, L its lse,
p = exp(t - L) a weight, o = sum p v a row of out, u a unit roundoff.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attest.reference.coherence import NO_PARTS, Cast, Shares, cast_error_of_sums
from attest.reference.numerics import ROUNDING_VARIANCE, SMALLEST_NORMAL, Floats, Numerics, format_of
from attest.reference.problem import Problem
from attest.reference.rows import RowBlock
from attest.reference.semantics import Semantics
from attest.reference.spread import Spread, at_least_bound, cast_error, finite, flushed_squares, rounding

# exp(80) is far past anything that a bound says something about, and far from overflow.
_LARGEST_EXPONENT = 80.0

# Errors of ln p up to this are first-order errors of p.
_SMALL = 0.5


# Integers up to here are float32 numbers.
_EXACT_INTEGERS = 2.0**24

# A device function that errs by at most eps errs by eps / 3 in the mean square.
FUNCTION_VARIANCE = 1 / 9


@dataclass(frozen=True)
class ForwardError:
    """The errors behind one RowBlock; R rows, N keys.

    key [N, D], value [N, Dv]: non-finite elements as 0, since those that count make the answer itself
    non-finite. keep: [R, N] or 1.
    uncapped [R, N]: of the logits before the cap.
    weight [R, N]: of ln p before it is normalised. operands [R, N]: the part of its variance that rounding
    the operands of the dots makes. sinks [R, n]: of ln of the sinks' weights.
    absolute [R, N]: bound of the error of p itself, but for what is common to the row. cast [R, N]: the
    cast of P before P V. rounded: its errors' deviations, dropout applied. shares: of the variance of out.
    unresolved [R]: rows in which the error of some ln p is not small, so that squares of small errors say
    nothing, and variances are those of the bounds. repeats: whether repeated roundings count.
    count [R]: keys that are weighed. out [R, Dv]: before the factor of an output that is not normalised and
    before it is rounded. lse: as returned. row [R]: of what is common to the weights of a row once they are
    normalised, beyond the sum of p times the error of ln p. factor [R]: of ln of the factor exp(L - m) of an
    output that is not normalised; 0 for one that is.
    """

    key: Floats
    value: Floats
    keep: Floats
    uncapped: Spread
    weight: Spread
    operands: Floats
    sinks: Spread
    absolute: Floats
    cast: Spread
    rounded: Cast
    shares: Shares
    unresolved: NDArray[np.bool_]
    repeats: bool
    count: Floats
    out: Spread
    lse: Spread
    row: Spread
    factor: Spread


def lse_variance_of_sinks(block: RowBlock, sinks: Spread) -> Floats:
    """Return the variance [R] of lse that errors of ln of the sinks' weights make."""
    return (block.sink_weights**2 * sinks.variance).sum(axis=1)


def weight_growth(block: RowBlock, bound: Floats) -> Floats:
    """Return how much weights [R, N] can grow whose logarithms are off by up to a bound [R, N]."""
    p = finite(block.weights)
    # A weight that is 0 but for its last hundred digits may become the largest.
    logarithm = np.where(block.weighed, finite(block.logits - block.lse[:, None]), -np.inf)
    far = np.exp(np.minimum(logarithm + bound, _LARGEST_EXPONENT))
    small = p * np.expm1(np.minimum(bound, _LARGEST_EXPONENT))
    return np.where(bound > _LARGEST_EXPONENT, np.maximum(small, far), small)


def forward_error(
    problem: Problem, semantics: Semantics, numerics: Numerics, block: RowBlock, repeats: bool = True
) -> ForwardError:
    """Return the errors of the weights, out and lse of a block.

    repeats: whether nearly equal values of a cast share their rounding, or all roundings are independent.
    """
    u = numerics.accumulator
    key, value = finite(block.key), finite(block.value)
    keep = np.ones((1, 1)) if block.keep is None else block.keep
    p = finite(block.weights)
    row_max, natural_lse = finite(block.row_max), finite(block.lse)
    count = (p > 0).sum(axis=1, dtype=np.float64)
    alive, exists = count > 0, np.isfinite(block.lse)

    uncapped, logits, operands = _logits_error(problem, semantics, numerics, block, key)
    weight = _weight_error(numerics, block, logits, count)
    sinks = _sink_error(problem, semantics, numerics, block)
    growth = np.expm1(np.minimum(weight.bound, _LARGEST_EXPONENT))
    sink_growth = np.expm1(np.minimum(sinks.bound, _LARGEST_EXPONENT))
    shrunk = (p / (1 + growth)).sum(axis=1) + (block.sink_weights / (1 + sink_growth)).sum(axis=1)
    shrunk = np.where(shrunk > 0, shrunk, 1.0)
    lowest, highest = _lse_range(block, weight.bound, sinks.bound)
    grown = weight_growth(block, weight.bound)
    absolute = grown
    if problem.normalize_output:
        # However far its logit is off, a weight stays below the share that its largest value can have.
        share = np.exp(np.minimum(block.logits + weight.bound - lowest[:, None], 0.0))
        absolute = np.where(np.isnan(share), absolute, np.minimum(absolute, share * shrunk[:, None]))
    absolute = np.where(block.weighed, absolute + SMALLEST_NORMAL, 0.0)

    # lse: the exponents, the sum, its logarithm and what is added to it.
    terms = count + block.sink_weights.shape[1]
    log_sum = np.abs(np.log(np.where(exists, finite(block.normaliser), 1.0)))
    flushed = SMALLEST_NORMAL * terms / shrunk
    weights_off = grown.sum(axis=1) + (block.sink_weights * sink_growth).sum(axis=1)
    weights_off = np.minimum(weights_off / shrunk, np.maximum(highest - natural_lse, natural_lse - lowest))
    weights_off = np.where(exists, weights_off + flushed + 1e-15 * np.abs(natural_lse), 0.0)
    blocks = numerics.blocks(count) + numerics.splits - 1
    summed = numerics.gamma(terms + blocks) + 4 * u
    lse_bound = weights_off + summed + u * (2 * log_sum + 4 * np.abs(row_max) + np.abs(natural_lse))
    squares = (p**2).sum(axis=1) + (block.sink_weights**2).sum(axis=1)
    summed_variance = numerics.blocked_sum_variance(terms, np.ones(len(terms)), squares)
    own_variance = (p**2 * weight.variance).sum(axis=1) + lse_variance_of_sinks(block, sinks)
    shared = _shared_by_row(numerics, block, key)
    # The scale is rounded once for all keys: it moves lse by the mean logit.
    mean_logit = (p * finite(block.logits) * block.seen).sum(axis=1)
    added = ROUNDING_VARIANCE * u**2 * (1 + log_sum**2 + row_max**2 + mean_logit**2)
    base = np.log(2.0) if semantics.lse_base == "two" else 1.0
    lse = Spread(lse_bound / base, (own_variance + shared + summed_variance + added) / base**2)
    unresolved = (block.weighed & (weight.bound > _SMALL)).any(axis=1) | (sinks.bound > _SMALL).any(axis=1)
    lse = at_least_bound(lse, unresolved)
    lse = rounding(np.abs(natural_lse) / base, lse, numerics.lse, 0.0)
    lse = Spread(np.where(exists, lse.bound, 0.0), np.where(exists, lse.variance, 0.0))
    if numerics.materialised:
        row = Spread(weights_off + summed, summed_variance + 2 * ROUNDING_VARIANCE * u**2)
    else:
        row = Spread(lse.bound * base, np.maximum(lse.variance * base**2 - own_variance - shared, 0.0))

    # out: centred errors of the weights, the cast of P, the sums, the division.
    weights = p * keep
    out = weights @ value
    mass, mass_squares = weights @ np.abs(value), weights**2 @ value**2
    # Kernels cast a weight before or after they divide it by the normaliser, which is never below 1.
    cast = cast_error(numerics.weights, p, numerics.half_subnormal)
    # The sum may be flushed before it is divided by the share that dropout keeps.
    kept = 1 / (1 - problem.dropout_prob)
    # An output that is not normalised is a multiple of p relative to the row's maximum alone.
    centre = out if problem.normalize_output else np.zeros_like(out)
    largest = np.zeros(len(p)) if problem.normalize_output else weight.bound.max(axis=1, initial=0.0)
    scaled = 0.0 if problem.normalize_output else 1.0
    factor = Spread(
        scaled * (largest + lse_bound + numerics.exponential + 4 * u * log_sum),
        scaled
        * (
            lse.variance * base**2
            + weight.variance.max(axis=1, initial=0.0)
            + ROUNDING_VARIANCE * u**2 * (1 + 2 * log_sum**2)
            + FUNCTION_VARIANCE * numerics.exponential**2
        ),
    )
    unit = numerics.weights if repeats else 0.0
    # Flash kernels cast weights relative to the largest of their row, so that rows are rounded alike.
    sizes = p if numerics.materialised else p * np.exp(log_sum)[:, None]
    rounded = Cast(sizes, np.sqrt(cast.variance) * keep, unit, numerics.half_subnormal)
    repeated = cast_error_of_sums(rounded, value)
    stored = numerics.partials * (blocks + 1)
    moved = _centred(absolute, keep, value, centre) / shrunk[:, None]
    c = ROUNDING_VARIANCE
    v_in = numerics.input_rounding
    bound = (
        moved
        + (np.expm1(np.minimum(largest, _LARGEST_EXPONENT)) + summed)[:, None] * np.abs(out)
        + ((block.sink_weights * sink_growth).sum(axis=1) / shrunk)[:, None] * np.abs(centre)
        + (numerics.gamma(count + 2 * blocks) + v_in + 3 * u + stored)[:, None] * mass
        + (cast.bound * keep) @ np.abs(value) * (1 + v_in)
        + SMALLEST_NORMAL * (count + blocks)[:, None] * kept
    )
    own = p**2 * weight.variance + flushed_squares(p)
    common = lse_variance_of_sinks(block, sinks) * problem.normalize_output
    common = common + np.where(problem.normalize_output, 0.0, weight.variance.max(axis=1, initial=0.0))
    variance = (
        (own * keep**2) @ value**2
        - 2 * centre * ((own * keep) @ value)
        + centre**2 * own.sum(axis=1)[:, None]
        + repeated.variance
        + c * v_in**2 * mass_squares
        + numerics.blocked_dot_variance(count[:, None], out, mass_squares)
        + (summed_variance + common + 2 * c * u**2)[:, None] * out**2
    )
    variance = np.maximum(variance, 0.0) + (SMALLEST_NORMAL * kept * count[:, None]) ** 2
    if numerics.weights_from_lse and not numerics.materialised:
        bound = bound + np.expm1(np.minimum(lse.bound * base, _LARGEST_EXPONENT))[:, None] * np.abs(out)
        variance = variance + row.variance[:, None] * out**2
    variance = at_least_bound(Spread(bound, variance), unresolved[:, None]).variance
    parts = NO_PARTS
    if repeats:
        from_values = keep**2 * np.square(value).sum(axis=1)
        moving = from_values - 2 * keep * (centre @ value.T) + np.square(centre).sum(axis=1)[:, None]
        shared = (summed_variance + common) * np.square(out).sum(axis=1)
        parts = parts.plus(own * np.maximum(moving, 0.0), cast.variance * from_values, shared)
    live = alive[:, None]
    out_spread = Spread(bound * live, variance * live, repeated.extra * live, parts=parts)
    return ForwardError(
        key,
        value,
        keep,
        uncapped,
        weight,
        operands,
        sinks,
        absolute,
        cast,
        rounded,
        repeated.shares,
        unresolved,
        repeats,
        count,
        out_spread,
        lse,
        row,
        factor,
    )


def output_error(problem: Problem, numerics: Numerics, block: RowBlock, error: ForwardError) -> Spread:
    """Return the error of out [R, Dv] as returned."""
    factor = np.ones(len(block.lse))
    if not problem.normalize_output:
        factor = finite(block.normaliser)
    out = np.abs((finite(block.weights) * error.keep) @ error.value) * factor[:, None]
    squared = factor[:, None] ** 2
    spread = Spread(
        error.out.bound * factor[:, None],
        error.out.variance * squared,
        error.out.extra * squared,
        parts=error.out.parts,
    )
    dtype = format_of(numerics.output_dtype)
    return rounding(out, spread, dtype.unit, max(dtype.half_subnormal, 0.0))


def _lse_range(block: RowBlock, weights: Floats, sinks: Floats) -> tuple[Floats, Floats]:
    """Return the least and the largest lse [R] of logits [R, N] and sinks [R, n] that are off by so much."""

    def lse(sign: float) -> Floats:
        logits = np.where(block.weighed, block.logits + sign * weights, -np.inf)
        exponents = np.concatenate([logits, block.sink_logits + sign * sinks], axis=1)
        largest = finite(exponents.max(axis=1, initial=-np.inf))
        return largest + np.log(np.exp(exponents - largest[:, None]).sum(axis=1))

    return lse(-1.0), lse(1.0)


def _logits_error(
    problem: Problem, semantics: Semantics, numerics: Numerics, block: RowBlock, key: Floats
) -> tuple[Spread, Spread, Floats]:
    """Return the errors [R, N] of the logits before the cap and of those in the softmax; 0 where hidden.

    Then the part of the latter's variance that rounding the operands makes.
    """
    u, v_in, c = numerics.accumulator, numerics.input_rounding, ROUNDING_VARIANCE
    query, scale, depth = finite(block.query), abs(block.dot_scale), problem.head_dim
    magnitude = scale * (np.abs(query) @ np.abs(key).T)
    squares = scale**2 * (query**2 @ (key**2).T)
    signed = np.zeros((1, 1)) if block.bias is None else finite(block.bias)
    inside = block.dot_scale if semantics.bias == "before_scale" else float(semantics.bias == "before_cap")
    alibi, rounded = _alibi(block)
    bias, inner_bias = np.abs(signed), np.abs(signed * inside)
    s = finite(block.uncapped)
    product = s - (signed + alibi) * inside
    alibi, inner_alibi = np.abs(alibi), np.abs(alibi * inside)
    bound = (
        (numerics.gamma(depth) + 3 * u + 2 * v_in + v_in**2) * magnitude
        + (2 * u + numerics.logits) * np.abs(s)
        + 2 * u * inner_bias
        # One more for the sum with a bias, which may come first.
        + (rounded + 1) * u * inner_alibi
    )
    operands = np.where(block.seen, 2 * c * v_in**2 * squares, 0.0)
    variance = (
        numerics.dot_variance(depth, product, squares)
        + c * u**2 * (squares + product**2)
        + c * (u**2 * ((inner_bias > 0) * 1.0 + (inner_alibi > 0)) + numerics.logits**2) * s**2
        + c * u**2 * rounded * inner_alibi**2
        + operands
    )
    uncapped = Spread(np.where(block.seen, bound, 0.0), np.where(block.seen, variance, 0.0))
    if block.tanh is None or block.cap_slope is None or problem.logits_soft_cap is None:
        capped = uncapped
    else:
        cap, tanh = problem.logits_soft_cap, np.abs(block.tanh)
        # The slope is at most 1 and changes by at most 0.77 / cap.
        slope = np.minimum(1.0, block.cap_slope + 0.77 * uncapped.bound / cap)
        bound = slope * uncapped.bound + cap * tanh * (numerics.tanh + 3 * u)
        variance = block.cap_slope**2 * uncapped.variance + (cap * tanh) ** 2 * (
            FUNCTION_VARIANCE * numerics.tanh**2 + 2 * c * u**2
        )
        capped, operands = Spread(bound, variance), block.cap_slope**2 * operands
    if semantics.bias == "after_cap" and (block.bias is not None or block.distance is not None):
        t = np.abs(finite(block.logits))
        capped = Spread(
            capped.bound + u * (t + 2 * bias + (rounded + 1) * alibi),
            capped.variance
            + c * u**2 * (((bias > 0) * 1.0 + (alibi > 0)) * t**2 + bias**2 + rounded * alibi**2),
        )
    logits = Spread(np.where(block.seen, capped.bound, 0.0), np.where(block.seen, capped.variance, 0.0))
    return uncapped, logits, operands


def _alibi(block: RowBlock) -> tuple[Floats, Floats]:
    """Return what ALiBi adds to the logits [R, N], and how often that number is rounded in float32.

    The slope is turned into bits, the constant of which is rounded too, and multiplied by a distance, which
    is rounded itself where 24 bits do not hold it.
    """
    if block.distance is None:
        return np.zeros((1, 1)), np.zeros((1, 1))
    return -block.slope * block.distance, np.where(block.distance > _EXACT_INTEGERS, 4.0, 3.0)


def _shared_by_row(numerics: Numerics, block: RowBlock, key: Floats) -> Floats:
    """Return the variance [R] of lse from what all logits of a row share; 0 where they share nothing.

    Rounding the query moves them together, and dot products that are truncated drift towards 0 together. The
    weights do not see it: what it adds to all logits alike, the normaliser takes away.
    """
    drift = numerics.drift(key.shape[1])
    if numerics.input_rounding == 0 and drift == 0:
        return np.zeros(len(block.query))
    slope = 1.0 if block.cap_slope is None else finite(block.cap_slope)
    mean_key = np.where(block.seen, finite(block.weights) * slope, 0.0) @ key
    terms = block.dot_scale * finite(block.query) * mean_key
    rounded = ROUNDING_VARIANCE * numerics.input_rounding**2 * (terms**2).sum(axis=1)
    return rounded + (drift * terms.sum(axis=1)) ** 2


def _weight_error(numerics: Numerics, block: RowBlock, logits: Spread, count: Floats) -> Spread:
    """Return the error [R, N] of ln p, but for what is common to the row."""
    u, exponential, c = numerics.accumulator, numerics.exponential, ROUNDING_VARIANCE
    t, row_max = finite(block.logits), np.abs(finite(block.row_max))[:, None]
    distance = np.abs(finite(block.lse)[:, None] - t)
    steps = (numerics.blocks(count) - 1 + numerics.splits - 1).clip(0)[:, None]
    bound = (
        logits.bound
        + u * (3 * distance + row_max + np.abs(t))
        + exponential
        + steps * (exponential + 2 * u)
        + (numerics.splits > 1) * 3 * u * row_max
    )
    variance = (
        logits.variance
        + c * u**2 * (2 * distance**2 + 1)
        + FUNCTION_VARIANCE * exponential**2 * (1 + np.log1p(steps))
    )
    return Spread(np.where(block.seen, bound, 0.0), np.where(block.seen, variance, 0.0))


def _sink_error(problem: Problem, semantics: Semantics, numerics: Numerics, block: RowBlock) -> Spread:
    """Return the error [R, n] of ln of the sinks' weights."""
    u, s = numerics.accumulator, np.abs(block.sink_logits)[None, :]
    row_max = np.abs(finite(block.row_max))[:, None]
    distance = np.abs(finite(block.lse)[:, None] - block.sink_logits[None, :])
    off, variance = 2 * u * s, ROUNDING_VARIANCE * u**2 * s**2
    if semantics.sinks == "capped" and problem.logits_soft_cap is not None:
        off = off + s * (numerics.tanh + 3 * u)
        variance = variance + s**2 * FUNCTION_VARIANCE * numerics.tanh**2
    bound = off + u * (3 * distance + row_max) + numerics.exponential
    variance = variance + ROUNDING_VARIANCE * u**2 * (2 * distance**2 + 1)
    return Spread(bound, variance + FUNCTION_VARIANCE * numerics.exponential**2)


def _centred(weights: Floats, keep: Floats, value: Floats, centre: Floats) -> Floats:
    """Return a bound of sum_j weights_j |keep_j v_j - centre|: [R, N], [R, N], [N, Dv], [R, Dv] to [R, Dv].

    The lesser of the triangle's and of Cauchy and Schwarz's, both of which are products of matrices.
    """
    mass, kept = weights.sum(axis=1)[:, None], weights * keep
    triangle = kept @ np.abs(value) + mass * np.abs(centre)
    shift = value.mean(axis=0) if keep.shape == (1, 1) and len(value) else np.zeros(value.shape[1])
    near, centre = value - shift, centre - shift
    second = (kept * keep) @ near**2 - 2 * centre * (kept @ near) + centre**2 * mass
    # The float64 rounding of the difference, so that what is returned stays an upper bound.
    slack = 1e-13 * ((kept * keep) @ near**2 + centre**2 * mass)
    return np.minimum(triangle, np.sqrt(mass * (np.maximum(second, 0.0) + slack)))
