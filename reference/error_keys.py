"""The predicted errors of gradients summed over query rows: key, value, bias and sinks.

Symbols as in docs/explanation/error-model.md: dP = dO V^T, D the row sum of dO * O less the cotangent of lse,
dS = p (dP - D) the gradient of the logits, g the slope of the cap.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import DTypeLike, NDArray

from attest.reference.coherence import NO_PARTS, Cast, Parts, Shares, cast_error_of_sums, common_variance
from attest.reference.error_backward import LogitsGradient
from attest.reference.error_forward import FUNCTION_VARIANCE, ForwardError
from attest.reference.numerics import ROUNDING_VARIANCE, SMALLEST_NORMAL, Floats, Numerics, format_of
from attest.reference.oracle import BackwardBlock, d_bias_block
from attest.reference.problem import Problem
from attest.reference.rows import RowBlock
from attest.reference.semantics import Semantics
from attest.reference.spread import Spread, at_least_bound, cast_error, finite, flushed_squares, rounding
from attest.reference.visibility import Ints


@dataclass(frozen=True)
class _Rounded:
    """The cast of what is summed into some keys, [keys, R], and the factors [R, D] of the sum.

    shared [R]: the variance of a relative error that all terms of a row have, that of its lse.
    """

    cast: Cast
    factors: Floats
    shared: Floats


def _of(cast: Cast, columns: Ints) -> Cast:
    """Return the cast of some columns."""
    return replace(cast, sizes=cast.sizes[:, columns], deviations=cast.deviations[:, columns])


class ByKeys:
    """Collects, block by block, the errors of the gradients that sum over query rows."""

    def __init__(
        self, problem: Problem, semantics: Semantics, numerics: Numerics, columns: Ints, sampled: bool
    ) -> None:
        self._problem, self._semantics, self._numerics = problem, semantics, numerics
        self._columns = columns
        shape = (problem.batch, len(columns), problem.kv_heads)
        self._key = Sum.zeros((*shape, problem.head_dim))
        self._value = Sum.zeros((*shape, problem.value_dim))
        self._bias = None if problem.bias is None or sampled else Sum.zeros(problem.bias.shape)
        self._casts: dict[str, dict[tuple[int, int], list[_Rounded]]] = {"dkey": {}, "dvalue": {}}
        self._parts: dict[str, Parts] = {}
        # Products may be flushed before they are scaled, or divided by the share that dropout keeps.
        self._flush = SMALLEST_NORMAL / (1 - problem.dropout_prob)
        self._sinks = None
        if problem.softmax_aux is not None and not sampled:
            self._sinks = Sum.zeros((problem.q_heads, problem.softmax_aux.shape[-1]))

    def add(
        self, block: RowBlock, backward: BackwardBlock, error: ForwardError, gradient: LogitsGradient
    ) -> None:
        """Add what the rows of a block contribute."""
        self._flush = max(self._flush, SMALLEST_NORMAL * abs(block.dot_scale))
        self._add_key(block, backward, error, gradient)
        self._add_value(block, backward, error, gradient)
        if self._bias is not None:
            self._add_bias(self._bias, block, backward, error, gradient)
        if self._sinks is not None:
            self._add_sinks(self._sinks, block, backward, error, gradient)

    def finish(self) -> dict[str, Spread]:
        """Return the errors by output, sums and their rounding included."""
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
        spreads: dict[str, Spread] = {}
        for name, total, dtype in sums:
            if total is None or name[1:] not in self._semantics.gradients:
                continue
            shares = self._add_casts(name, total) if name in self._casts else ()
            spread = total.spread(numerics, dtype, self._flush, self._parts.get(name, NO_PARTS))
            common = self._common(name, total, spread.variance) if name in self._casts else 0.0
            spreads[name] = replace(spread, common=common, shares=shares)
        return spreads

    def _round(self, output: str, block: RowBlock, cast: Cast, factors: Floats, shared: Floats) -> None:
        """Keep the cast of a block of rows; those of all rows of a key are summed together."""
        of_keys = replace(cast, sizes=cast.sizes.T, deviations=cast.deviations.T)
        self._casts[output].setdefault((block.batch, block.kv_head), []).append(
            _Rounded(of_keys, factors, shared)
        )

    def _add_casts(self, output: str, total: "Sum") -> tuple[Shares, ...]:
        """Add the errors of casts; returns how rows share them."""
        shares: list[Shares] = []
        for (batch, kv_head), parts in self._casts[output].items():
            joined = replace(
                parts[0].cast,
                sizes=np.concatenate([part.cast.sizes for part in parts], axis=1),
                deviations=np.concatenate([part.cast.deviations for part in parts], axis=1),
            )
            factors = np.concatenate([part.factors for part in parts])
            error = cast_error_of_sums(joined, factors)
            total.variance[batch, :, kv_head] += error.variance
            total.extra[batch, :, kv_head] += error.extra
            shares.append(error.shares)
        return tuple(shares)

    def _common(self, output: str, total: "Sum", variance: Floats) -> float:
        """Return the deviation of the sum of err * sign / std, where equal values round alike in all rows.

        The error of a row's lse moves all keys by what the row adds to them.
        """
        signs = np.sign(total.total) / np.sqrt(np.where(variance > 0, variance, np.inf))
        casts: list[Cast] = []
        weights: list[Floats] = []
        of_rows = 0.0
        for (batch, kv_head), parts in self._casts[output].items():
            for part in parts:
                weight = signs[batch, :, kv_head] @ part.factors.T
                terms = part.cast.sizes * np.sign(part.cast.deviations)
                of_rows += float((finite(part.shared) * (terms * weight).sum(axis=0) ** 2).sum())
                casts.append(part.cast)
                weights.append(weight)
        known = float((total.shift * signs).sum())
        return math.sqrt(common_variance(casts, weights) + of_rows + known**2)

    def _divide(self, output: str, error: ForwardError, pairs: Floats, rows: Floats) -> None:
        """Note the parts of the variance that pairs [R, C], and that whole rows [R], make."""
        if error.repeats:
            self._parts[output] = self._parts.get(output, NO_PARTS).plus(np.maximum(pairs, 0.0), rows)

    def _add_key(
        self, block: RowBlock, backward: BackwardBlock, error: ForwardError, gradient: LogitsGradient
    ) -> None:
        numerics, scale, at = self._numerics, abs(block.dot_scale), (block.batch, slice(None), block.kv_head)
        columns, query = self._columns, finite(block.query)
        d_logits = finite(backward.d_uncapped)[:, columns]
        slope = 1.0 if block.cap_slope is None else finite(block.cap_slope)[:, columns]
        seen = np.where(block.seen[:, columns], finite(block.weights)[:, columns], 0.0)
        leak = seen * slope
        through = gradient.row_dot.variance[:, None] * (leak**2 + seen**2 * gradient.slope[:, columns])
        shared = gradient.common[:, None] * d_logits**2 + through
        pairs = gradient.uncapped.variance[:, columns] - 2 * gradient.pull[:, columns] * d_logits**2
        variance = pairs + shared
        size = scale**2 * np.square(query).sum(axis=1)
        pairs = pairs + gradient.cast.variance[:, columns]
        self._divide("dkey", error, pairs * size[:, None], shared.sum(axis=1) * size)
        bound = gradient.uncapped.bound[:, columns] * (1 + numerics.weights) + gradient.cast.bound[:, columns]
        live = (gradient.own.bound[:, columns] > 0).sum(axis=0)[:, None]
        spread = at_least_bound(Spread(bound, variance), error.unresolved[:, None])
        self._key.add(at, scale * query, d_logits, spread, live, numerics)
        self._round("dkey", block, _of(gradient.rounded, columns), scale * query, gradient.common)
        self._key.shift[at] += (leak * gradient.shift[:, None]).T @ (scale * query)

    def _add_value(
        self, block: RowBlock, backward: BackwardBlock, error: ForwardError, gradient: LogitsGradient
    ) -> None:
        numerics, at = self._numerics, (block.batch, slice(None), block.kv_head)
        columns = self._columns
        keep = error.keep if error.keep.shape == (1, 1) else error.keep[:, columns]
        p = finite(block.weights)[:, columns]
        cast = cast_error(numerics.weights, p, numerics.half_subnormal)
        own = error.weight.variance[:, columns] - 2 * gradient.pull[:, columns]
        # dO comes times the factor of an output that is not normalised.
        shared = (keep * p) ** 2 * (gradient.common + error.factor.variance)[:, None]
        pairs = keep**2 * (p**2 * own + flushed_squares(p))
        variance = pairs + shared
        d_out = finite(backward.d_out)
        size = np.square(d_out).sum(axis=1)
        pairs = pairs + keep**2 * cast.variance
        self._divide("dvalue", error, pairs * size[:, None], shared.sum(axis=1) * size)
        rounded = Cast(p, np.sqrt(cast.variance) * keep, error.rounded.unit, numerics.half_subnormal)
        bound = keep * (gradient.weight[:, columns] * (1 + numerics.weights) + cast.bound)
        live = (block.weighed[:, columns] & (d_out != 0).any(axis=1)[:, None]).sum(axis=0)[:, None]
        spread = at_least_bound(Spread(bound, variance), error.unresolved[:, None])
        self._value.add(at, d_out, p * keep, spread, live, numerics)
        self._round("dvalue", block, rounded, d_out, gradient.common * keep.max(initial=0.0) ** 2)

    def _add_bias(
        self,
        total: "Sum",
        block: RowBlock,
        backward: BackwardBlock,
        error: ForwardError,
        gradient: LogitsGradient,
    ) -> None:
        d_bias = finite(d_bias_block(block, backward))
        after_cap = block.bias_place == "after_cap"
        spread = gradient.own if after_cap else gradient.uncapped
        factor = abs(block.dot_scale) if block.bias_place == "before_scale" else 1.0
        slope = 1.0 if after_cap or block.cap_slope is None else finite(block.cap_slope)
        seen = np.where(block.seen, finite(block.weights) * factor, 0.0)
        leak = seen * slope
        again = 0.0 if after_cap else seen**2 * gradient.slope
        shared = gradient.common[:, None] * d_bias**2
        shared = shared + gradient.row_dot.variance[:, None] * (leak**2 + again)
        pairs = spread.variance * factor**2 - 2 * gradient.pull * d_bias**2
        variance = pairs + shared
        live = gradient.own.bound > 0
        shift = leak * gradient.shift[:, None]
        off = at_least_bound(Spread(spread.bound * factor, variance), error.unresolved[:, None])
        if total.total.shape[3] == 1 < d_bias.shape[1]:
            whole_rows = np.sqrt(np.maximum(off.variance, 0.0)).sum(axis=1) ** 2
            self._divide("dbias", error, np.zeros((1, 1)), whole_rows)
        else:
            self._divide("dbias", error, pairs, shared.sum(axis=1))
        total.add_plane(block, d_bias, off, live, shift)

    def _add_sinks(
        self,
        total: "Sum",
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
        variance = at_least_bound(Spread(bound, variance), error.unresolved[:, None]).variance
        at = block.head
        total.count[at] += (d_row > 0).sum(axis=0)
        total.bound[at] += bound.sum(axis=0)
        total.variance[at] += variance.sum(axis=0)
        total.total[at] += finite(backward.d_sinks).sum(axis=0)
        total.magnitude[at] += np.abs(finite(backward.d_sinks)).sum(axis=0)
        total.squares[at] += (finite(backward.d_sinks) ** 2).sum(axis=0)
        total.shift[at] += (p * gradient.shift[:, None]).sum(axis=0)


@dataclass(frozen=True)
class Sum:
    """A gradient as the sum over query rows: what was summed, and the errors of the terms."""

    count: Floats
    total: Floats
    magnitude: Floats
    squares: Floats
    bound: Floats
    variance: Floats
    shift: Floats
    extra: Floats

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> "Sum":
        """Return an empty sum."""
        return cls(*(np.zeros(shape) for _ in range(8)))

    def over_heads(self, shape: tuple[int, ...]) -> "Sum":
        """Return the sum over the heads, which share sinks of this shape."""
        return Sum(*(array.sum(axis=0).reshape(shape) for array in vars(self).values()))

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
        """Add one block of the gradient of the bias; broadcast axes collect every row and key.

        The errors of rows are independent; those of a row's keys may be one error that all of them share.
        """
        shape = self.total.shape
        at = (block.batch if shape[0] > 1 else 0, block.head if shape[1] > 1 else 0)
        terms = (live, gradient, np.abs(gradient), gradient**2, spread.bound, spread.variance, shift)
        if shape[3] == 1 < gradient.shape[1]:
            variance = np.sqrt(np.maximum(spread.variance, 0.0)).sum(axis=1, keepdims=True) ** 2
            added = [np.asarray(term).sum(axis=1, keepdims=True) for term in terms]
            terms = (*added[:5], variance, added[6])
        for array, term in zip(vars(self).values(), terms, strict=False):
            if shape[2] > 1:
                array[at][block.rows] += term
            else:
                array[at][0] += term.sum(axis=0)

    def spread(self, numerics: Numerics, dtype: DTypeLike, flush: float, parts: Parts) -> Spread:
        """Return the error of the rounded sum."""
        u = numerics.accumulator
        blocks = np.minimum(self.count, 1.0) * numerics.splits
        bound = self.bound + (numerics.gamma(self.count + blocks) + 4 * u) * self.magnitude
        bound = bound + numerics.partials * (numerics.blocks(self.count) + blocks) * self.magnitude
        bound = bound + flush * self.count
        variance = (
            self.variance
            + self.shift**2
            # Kernels cut the rows into blocks of their own, or sum them all in sequence.
            + numerics.dot_variance(self.count, self.total, self.squares)
            + ROUNDING_VARIANCE
            * numerics.partials**2
            * numerics.blocks(self.count)
            * (self.total**2 / 3 + self.squares / 2)
            + (flush * self.count) ** 2
        )
        variance = variance + 2 * ROUNDING_VARIANCE * u**2 * self.total**2
        output = format_of(dtype)
        return rounding(
            np.abs(self.total),
            Spread(bound, variance, self.extra, parts=parts),
            output.unit,
            output.half_subnormal,
        )
