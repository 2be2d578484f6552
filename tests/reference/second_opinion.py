"""Attention in 50 digits, one scalar at a time, from docs/reference/semantics.md: a check of the oracle.

Nothing is shared with `reference` but the fields of Problem and Semantics. No backward formula is written
down here: every scalar operation is recorded on a tape and differentiated by the chain rule. Constant under
differentiation are what a kernel does not differentiate either: visibility, sentinels, dropout's mask, and,
unless its dialect says otherwise, the row maximum of an output that is not normalised.

Beside each number goes its gauge, the same number computed with every term taken by its magnitude: p |v|
summed for out, |cotangent| |partial derivative| summed over every path for a gradient. An error of 1e-13 of
the gauge is what float64 sums can promise; of the sum itself nothing can be promised, since it may cancel.
The gauge of lse is max(1, |lse|).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from mpmath import mp, mpf

from attest.reference.problem import Problem
from attest.reference.semantics import Semantics
from tests.reference.second_pairs import (
    alibi_at,
    bias_at,
    broadcast_index,
    is_padding,
    kept,
    permitted,
)

mp.dps = 50

INPUTS = ("query", "key", "value", "bias", "softmax_aux")
Place = tuple[str, tuple[int, ...]]
Row = tuple[int, int, int]
NEGATIVE_INFINITY = mpf("-inf")

# What float64 cannot hold at all: results this small may be anything between 0 and themselves.
UNDERFLOW = mpf("1e-290")

# What is this close to the row maximum ties with it, docs/reference/semantics.md says.
TIE = mpf("1e-20")


@dataclass
class Opinion:
    """Arrays of mpf by name (out, lse, dquery, ...), their gauges, and the row maxima that were used."""

    values: dict[str, np.ndarray]
    gauges: dict[str, np.ndarray]
    maxima: dict[Row, mpf]


def worst_error(got: np.ndarray, opinion: Opinion, name: str) -> float:
    """The largest |got - opinion| / gauge over an array; infinite where one is finite and the other not."""
    want, gauge = opinion.values[name], opinion.gauges[name]
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    worst = mpf(0)
    for index in np.ndindex(want.shape):
        here, there = mpf(float(got[index])), want[index]
        if mp.isnan(there) or mp.isinf(there):
            same = mp.isnan(here) if mp.isnan(there) else here == there
            worst = max(worst, mpf(0) if same else mp.inf)
        elif not mp.isfinite(here):
            return float("inf")
        elif abs(here - there) > UNDERFLOW:
            worst = max(worst, abs(here - there) / gauge[index] if gauge[index] else mp.inf)
    return float(worst)


class Number:
    """A scalar on the tape: its value, its gauge (`size`), and what it was made from."""

    __slots__ = ("adjoint", "gauge", "parents", "size", "value")

    def __init__(self, value: mpf, size: mpf, parents: Sequence[tuple["Number", mpf, mpf]] = ()) -> None:
        self.value, self.size, self.parents = value, size, parents
        self.adjoint, self.gauge = mpf(0), mpf(0)

    def seed(self, cotangent: mpf) -> None:
        self.adjoint += cotangent
        self.gauge += abs(cotangent)


class Tape:
    """Records operations in order; `pull_back` sends the adjoints of the results to the inputs."""

    def __init__(self) -> None:
        self.numbers: list[Number] = []

    def _record(self, value: mpf, size: mpf, parents: Sequence[tuple[Number, mpf, mpf]]) -> Number:
        number = Number(value, size, parents)
        self.numbers.append(number)
        return number

    def inner(self, xs: Sequence[Number], ys: Sequence[Number]) -> Number:
        value = mp.fdot((x.value, y.value) for x, y in zip(xs, ys, strict=True))
        size = mp.fdot((x.size, y.size) for x, y in zip(xs, ys, strict=True))
        parents = [(x, y.value, y.size) for x, y in zip(xs, ys, strict=True)]
        return self._record(
            value, size, parents + [(y, x.value, x.size) for x, y in zip(xs, ys, strict=True)]
        )

    def total(self, xs: Sequence[Number]) -> Number:
        one = mpf(1)
        return self._record(
            mp.fsum(x.value for x in xs), mp.fsum(x.size for x in xs), [(x, one, one) for x in xs]
        )

    def times(self, x: Number, factor: mpf) -> Number:
        return self._record(x.value * factor, x.size * abs(factor), [(x, factor, abs(factor))])

    def exp(self, x: Number) -> Number:
        value = mp.exp(x.value)
        return self._record(value, value, [(x, value, value)])

    def log(self, x: Number) -> Number:
        value, partial = mp.log(x.value), 1 / x.value
        return self._record(value, abs(value), [(x, partial, partial)])

    def tanh(self, x: Number) -> Number:
        value, partial = mp.tanh(x.value), mp.sech(x.value) ** 2
        return self._record(value, abs(value), [(x, partial, partial)])

    def ratio(self, top: Number, bottom: Number) -> Number:
        inverse = 1 / bottom.value
        value, size = top.value * inverse, top.size * inverse
        return self._record(
            value, size, [(top, inverse, inverse), (bottom, -value * inverse, size * inverse)]
        )

    def pull_back(self) -> None:
        for number in reversed(self.numbers):
            if number.gauge:
                for parent, partial, size in number.parents:
                    parent.adjoint += number.adjoint * partial
                    parent.gauge += number.gauge * size


def second_opinion(
    problem: Problem,
    semantics: Semantics,
    d_out: np.ndarray | None = None,
    d_lse: np.ndarray | None = None,
    moved: Mapping[Place, mpf] | None = None,
    maxima: Mapping[Row, mpf] | None = None,
) -> Opinion:
    """Answer a problem; with gradients where `d_out` is given.

    moved: values that replace stored ones, to take differences. maxima: the row maxima to hold constant.
    """
    problem = without_ignored(problem, semantics)
    inputs = _Inputs(problem, moved or {})
    batch, q_len, heads, _ = problem.query.shape
    out_shape, lse_shape = (batch, q_len, heads, problem.value.shape[3]), (batch, heads, q_len)
    values = {"out": _zeros(out_shape), "lse": _zeros(lse_shape)}
    gauges = {"out": _zeros(out_shape), "lse": _zeros(lse_shape)}
    used: dict[Row, mpf] = {}
    for b in range(batch):
        for h in range(heads):
            for i in range(q_len):
                tape = Tape()
                outs, lse = _row(problem, semantics, inputs, tape, (b, h, i), maxima or {}, used)
                for d, number in enumerate(outs):
                    values["out"][b, i, h, d], gauges["out"][b, i, h, d] = number.value, number.size
                    if d_out is not None and number.parents:
                        number.seed(mpf(float(d_out[b, i, h, d])))
                values["lse"][b, h, i] = lse.value
                gauges["lse"][b, h, i] = max(mpf(1), abs(lse.value))
                if d_lse is not None and semantics.lse_gradient and lse.parents:
                    lse.seed(mpf(float(d_lse[b, h, i])))
                tape.pull_back()
    if d_out is not None:
        for name in INPUTS:
            if getattr(problem, name) is not None and name in semantics.gradients:
                values["d" + name], gauges["d" + name] = inputs.gradient(name)
    return Opinion(values, gauges, used)


def objective(opinion: Opinion, semantics: Semantics, d_out: np.ndarray, d_lse: np.ndarray | None) -> mpf:
    """The scalar whose gradients are asked for: cotangents times results, summed."""
    total = mpf(0)
    for index in np.ndindex(d_out.shape):
        total += mpf(float(d_out[index])) * opinion.values["out"][index]
    if d_lse is not None and semantics.lse_gradient:
        for index in np.ndindex(d_lse.shape):
            if mp.isfinite(opinion.values["lse"][index]):
                total += mpf(float(d_lse[index])) * opinion.values["lse"][index]
    return total


def without_ignored(problem: Problem, semantics: Semantics) -> Problem:
    """S20's dialect: the arguments that are silently dropped."""
    off = {"dropout_prob": 0.0, "causal": False, "normalize_output": True, "origin": (0, 0, 0, 0)}
    return replace(problem, **{name: off.get(name) for name in semantics.ignored_arguments})


class _Inputs:
    """The elements of the inputs as tape numbers, made when first read; what is hidden is never read."""

    def __init__(self, problem: Problem, moved: Mapping[Place, mpf]) -> None:
        self._problem, self._moved = problem, moved
        self._numbers: dict[Place, Number] = {}

    def at(self, name: str, index: tuple[int, ...]) -> Number:
        place = (name, index)
        if place not in self._numbers:
            value = self._moved.get(place)
            if value is None:
                value = mpf(float(getattr(self._problem, name)[index]))
            self._numbers[place] = Number(value, abs(value))
        return self._numbers[place]

    def spoil(self, name: str, index: tuple[int, ...]) -> None:
        self.at(name, index).adjoint = mp.nan

    def gradient(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        shape = getattr(self._problem, name).shape
        gradient, gauge = _zeros(shape), _zeros(shape)
        for index in np.ndindex(shape):
            if (name, index) in self._numbers:
                number = self._numbers[name, index]
                gradient[index], gauge[index] = number.adjoint, number.gauge
        return gradient, gauge


def _row(
    problem: Problem,
    semantics: Semantics,
    inputs: _Inputs,
    tape: Tape,
    row: Row,
    maxima: Mapping[Row, mpf],
    used: dict[Row, mpf],
) -> tuple[list[Number], Number]:
    """The outputs and the lse of one row; numbers without parents are constants."""
    b, h, i = row
    keys, width = range(problem.key.shape[1]), problem.value.shape[3]
    kv_head = h // (problem.query.shape[2] // problem.key.shape[2])
    zeros = [Number(mpf(0), mpf(0)) for _ in range(width)]
    weighed = list(_weighed(problem, semantics, inputs, tape, row, kv_head))
    terms = [logit for _, logit in weighed] + _sink_logits(problem, semantics, inputs, tape, h)
    terms = [term for term in terms if term.value != NEGATIVE_INFINITY]

    if is_padding(problem, semantics, b, i):
        answers = bool(terms) and semantics.hidden == "sentinel"
        lse = mp.log(mp.fsum(mp.exp(term.value) for term in terms)) if answers else NEGATIVE_INFINITY
        if semantics.lse_base == "two" and answers:
            lse /= mp.log(2)
        return zeros, Number(lse, mpf(1))
    if not terms and semantics.empty_rows == "nan":
        for j in keys:
            for d in range(problem.query.shape[3]):
                inputs.spoil("query", (b, i, h, d))
                inputs.spoil("key", (b, j, kv_head, d))
            for d in range(width):
                inputs.spoil("value", (b, j, kv_head, d))
            if problem.bias is not None:
                inputs.spoil("bias", broadcast_index(problem.bias, b, h, i, j))
        return [Number(mp.nan, mpf(0)) for _ in range(width)], Number(mp.nan, mpf(1))
    if not terms:
        lse = Number(NEGATIVE_INFINITY, mpf(1))
        if semantics.empty_rows != "mean_of_values" or not len(keys):
            return zeros, lse
        shares = [Number(_dropped(problem, semantics, b, h, i, j) / len(keys), mpf(0)) for j in keys]
        for share in shares:
            share.size = share.value
        return [
            tape.inner(shares, [inputs.at("value", (b, j, kv_head, d)) for j in keys]) for d in range(width)
        ], lse

    exponentials = [tape.exp(term) for term in terms]
    normaliser = tape.total(exponentials)
    lse = tape.log(normaliser)
    if semantics.lse_base == "two":
        lse = tape.times(lse, 1 / mp.log(2))
    used[row] = maxima.get(row, max(term.value for term in terms))
    if not weighed:
        return zeros, lse
    outs = []
    for d in range(width):
        values = [inputs.at("value", (b, j, kv_head, d)) for j, _ in weighed]
        weights = exponentials[: len(weighed)]
        if problem.dropout_prob:
            factors = [_dropped(problem, semantics, b, h, i, j) for j, _ in weighed]
            weights = [tape.times(x, factor) for x, factor in zip(weights, factors, strict=True)]
        numerator = tape.inner(weights, values)
        if problem.normalize_output:
            outs.append(tape.ratio(numerator, normaliser))
        elif semantics.row_max_gradient == "differentiated":
            top = max(term.value for term in terms)
            tied = [term for term in terms if top - term.value <= TIE * max(1, abs(top))]
            row_max = tape.times(tape.total(tied), mpf(1) / len(tied))
            outs.append(tape.inner([numerator], [tape.exp(tape.times(row_max, mpf(-1)))]))
        else:
            outs.append(tape.times(numerator, mp.exp(-used[row])))
    return outs, lse


def _weighed(
    problem: Problem, semantics: Semantics, inputs: _Inputs, tape: Tape, row: Row, kv_head: int
) -> Iterator[tuple[int, Number]]:
    """The keys that have a weight in a row, with their logits (S1 to S4)."""
    b, h, i = row
    for j in range(problem.key.shape[1]):
        if not permitted(problem, semantics, b, h, i, j):
            if semantics.hidden == "sentinel":
                yield j, Number(mpf(semantics.sentinel), mpf(1))
        elif bias_at(problem, b, h, i, j) != float("-inf"):
            yield j, _logit(problem, semantics, inputs, tape, row, kv_head, j)


def _logit(
    problem: Problem, semantics: Semantics, inputs: _Inputs, tape: Tape, row: Row, kv_head: int, j: int
) -> Number:
    b, h, i = row
    depth = range(problem.query.shape[3])
    if problem.softmax_scale is not None:
        scale = mpf(float(problem.softmax_scale))
    else:
        scale = mpf(1) if semantics.default_scale == "one" else 1 / mp.sqrt(len(depth))
    added: list[Number] = []
    if problem.bias is not None:
        added.append(inputs.at("bias", broadcast_index(problem.bias, b, h, i, j)))
    if problem.alibi_slopes is not None:
        term = alibi_at(problem, semantics, b, h, i, j)
        added.append(Number(term, abs(term)))
    logit = tape.inner(
        [inputs.at("query", (b, i, h, d)) for d in depth],
        [inputs.at("key", (b, j, kv_head, d)) for d in depth],
    )
    if added and semantics.bias == "before_scale":
        logit = tape.total([logit, *added])
    logit = tape.times(logit, scale)
    if added and semantics.bias == "before_cap":
        logit = tape.total([logit, *added])
    logit = _capped(problem, tape, logit)
    if added and semantics.bias == "after_cap":
        logit = tape.total([logit, *added])
    return logit


def _sink_logits(problem: Problem, semantics: Semantics, inputs: _Inputs, tape: Tape, h: int) -> list[Number]:
    """S11: the sinks of a head; without an axis of heads, or with one of size 1, every head's."""
    aux = problem.softmax_aux
    if aux is None:
        return []
    own = () if aux.ndim == 1 else (h if aux.shape[0] > 1 else 0,)
    places = [(*own, n) for n in range(aux.shape[-1])]
    logits = [inputs.at("softmax_aux", place) for place in places]
    if semantics.sinks == "capped":
        return [_capped(problem, tape, logit) for logit in logits]
    return logits


def _capped(problem: Problem, tape: Tape, logit: Number) -> Number:
    if problem.logits_soft_cap is None:
        return logit
    cap = mpf(float(problem.logits_soft_cap))
    return tape.times(tape.tanh(tape.times(logit, 1 / cap)), cap)


def _dropped(problem: Problem, semantics: Semantics, b: int, h: int, i: int, j: int) -> mpf:
    """The factor of a weight under dropout."""
    if not problem.dropout_prob:
        return mpf(1)
    return int(kept(problem, semantics, b, h, i, j)) / (1 - mpf(problem.dropout_prob))


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    zeros = np.empty(shape, dtype=object)
    zeros.fill(mpf(0))
    return zeros
