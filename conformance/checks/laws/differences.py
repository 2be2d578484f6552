"""The law of directional differences: the gradient along a direction is the slope of the outputs.

For each differentiated argument x, with a direction u of elements 1 and -1 and a step h,

    sum(dx * u)  =  sum(d_out * (out(x + h u) - out(x - h u))) / 2h, and the same of lse with d_lse,

up to the bounds of the error model for all three calls and h^2 / 6 times the third derivative. The elements
of x are rounded to multiples of h first, so that x + h u is exact in float32.

The third derivative is bounded by the arguments alone. Along u, the logits a_j of a row are linear, and out
and lse are cumulants under the softmax. With the ranges R_a of a_j and R_v of the values over the keys,

    abs(d^3 out)  <=  abs(E[v a^3]) + 3 abs(E[v a]) E[a^2]  <=  (1/4 + 3/16) R_v R_a^3
    abs(d^3 lse)  =   abs(E[a^3])                           <=  1/4 R_a^3

where v and a are taken from their means: E[a^2] <= R_a^2 / 4, and by Cauchy and Schwarz. The ranges contain
0, for sinks and for dropped values. Along the values, out is linear.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from attest.conformance.cases.build import Built
from attest.conformance.checks.laws.calls import difference_reach
from attest.conformance.checks.laws.law import Array, Called, Equation, Outputs, Rewrite, changed
from attest.conformance.judging.execute import call_of, differentiated
from attest.conformance.judging.trial import Trial
from attest.conformance.subject import Subject
from attest.reference.oracle import Cotangents
from attest.reference.problem import Problem
from attest.reference.rows import dot_scale
from attest.reference.semantics import Semantics

Floats = NDArray[np.float64]

_OUT_THIRD, _LSE_THIRD = 7 / 16, 1 / 4
# Elements above so many steps stay as they are: float32 would round their sum with a step.
_EXACT_STEPS = 2.0**22


def differences(trial: Trial) -> Rewrite:
    """Call with each differentiated argument moved by a step in both directions."""
    subject, semantics, problem = trial.subject, trial.subject.semantics, trial.built.problem
    stream = np.random.default_rng(trial.case.seed)
    directions: dict[str, Floats] = {}
    steps: dict[str, float] = {}
    rounded: dict[str, Array] = {}
    for name in differentiated(subject, call_of(trial.built)):
        array = getattr(problem, name)
        u = stream.choice([-1.0, 1.0], array.shape)
        reach = float(_reach(problem, semantics, name, u).max(initial=0.0)) or 1.0
        steps[name] = step = 2.0 ** np.floor(np.log2(difference_reach() / reach))
        movable = np.abs(array) < _EXACT_STEPS * step
        directions[name] = np.where(movable, u, 0.0)
        multiples = np.rint(np.where(movable, array, 0) / step) * step
        rounded[name] = np.where(movable, multiples, array).astype(array.dtype)
    given = trial.built.cotangents
    lse = np.asarray(given.lse) if semantics.lse_gradient else np.zeros_like(np.asarray(given.lse))
    built = replace(changed(trial.built, **rounded), cotangents=Cotangents(given.out, lse))
    calls, equations = [Called(built)], list[Equation]()
    for name, u in directions.items():
        equations.append(_equation(built, semantics, name, u, steps[name], len(calls)))
        array = getattr(built.problem, name)
        for sign in (1, -1):
            moved = (array.astype(np.float64) + sign * steps[name] * u).astype(array.dtype)
            calls.append(Called(changed(built, **{name: moved})))
    return Rewrite(tuple(calls), tuple(equations))


def why_not(subject: Subject) -> str | None:
    """Return why a subject has no gradients whose differences are sharp; None if it has."""
    if "float32" not in subject.dtypes:
        return "does not declare float32, in which differences are sharp"
    return None if subject.semantics.gradients else "declares no gradients"


def _equation(built: Built, semantics: Semantics, name: str, u: Floats, step: float, first: int) -> Equation:
    """Return the equation of the gradient along u with the difference of calls `first` and the next one."""
    problem = built.problem
    d_out, d_lse = built.cotangents.out.astype(np.float64), np.asarray(built.cotangents.lse, np.float64)
    axes = _summed_axes(problem, name)

    def left(calls: Sequence[Outputs], size: object) -> Array:
        along = np.abs(u) if size is np.abs else u
        return (calls[0][f"d{name}"] * along).sum(axis=axes, keepdims=True)

    def right(calls: Sequence[Outputs], _size: object) -> Array:
        up, down = calls[first], calls[first + 1]
        rows = _rows(d_out * (up["out"] - down["out"]))
        if "lse" in up:
            # A row that sees no key has an lse of -inf in both.
            empty = np.isneginf(up["lse"]) & np.isneginf(down["lse"])
            rows = rows + d_lse * np.where(empty, 0.0, up["lse"] - np.where(empty, 0.0, down["lse"]))
        return _owned(problem, name, rows / (2 * step))

    def right_bound(_values: Sequence[Outputs], bounds: Sequence[Outputs]) -> Array:
        up, down = bounds[first], bounds[first + 1]
        rows = _rows(np.abs(d_out) * (up["out"] + down["out"]))
        if "lse" in up:
            rows = rows + np.abs(d_lse) * (up["lse"] + down["lse"])
        third = _third(problem, semantics, name, u, np.abs(d_out), np.abs(d_lse))
        return _owned(problem, name, rows / (2 * step) + step**2 / 6 * third)

    return Equation(f"d{name}", left, right, source="out", right_bound=right_bound)


def _rows(products: Floats) -> Floats:
    """Return the sums [B, Hq, Sq] of products [B, Sq, Hq, Dv] over channels."""
    return products.sum(axis=3).transpose(0, 2, 1)


def _third(
    problem: Problem, semantics: Semantics, name: str, u: Floats, d_out: Floats, d_lse: Floats
) -> Floats:
    """Return the bound of the third derivative of each row's share of the loss: [B, Hq, Sq]."""
    value = problem.value.astype(np.float64) / (1 - problem.dropout_prob)
    values = _by_query_head(problem, _range(value, axis=1)[:, None])
    logits = _reach(problem, semantics, name, u)
    return logits**3 * (_OUT_THIRD * _rows(d_out * values) + _LSE_THIRD * d_lse)


def _reach(problem: Problem, semantics: Semantics, name: str, u: Floats) -> Floats:
    """Return the range of the changes of a row's logits, for a step of 1 along u: [B, Hq, Sq]."""
    shape = problem.batch, problem.q_heads, problem.q_len
    if name == "value":
        return np.zeros(shape)
    if name == "softmax_aux":
        return np.broadcast_to(_range(u, axis=-1).reshape(1, -1, 1), shape)
    if name == "bias":
        return np.broadcast_to(_range(u, axis=3), shape)
    query, key = (u if name == of else getattr(problem, of).astype(np.float64) for of in ("query", "key"))
    products = np.einsum("bihd,bjhd->bhij", query, _by_query_head(problem, key))
    return _range(dot_scale(problem, semantics) * products, axis=3)


def _range(array: Floats, axis: int) -> Floats:
    """Return the range of an array and 0 along an axis."""
    return array.max(axis=axis, initial=0.0) - array.min(axis=axis, initial=0.0)


def _by_query_head(problem: Problem, array: Floats) -> Floats:
    return np.repeat(array, problem.group, axis=2)


def _summed_axes(problem: Problem, name: str) -> tuple[int, ...]:
    """Return the axes of an argument whose elements move the same rows."""
    if name == "softmax_aux":
        return (-1,)
    return {"query": (3,), "bias": (3,)}.get(name, (1, 3))


def _owned(problem: Problem, name: str, rows: Floats) -> Array:
    """Return the sums of numbers [B, Hq, Sq] over the rows that an element moves, in the argument's axes."""
    if name == "query":
        return rows.transpose(0, 2, 1)[..., None]
    if name == "bias":
        assert problem.bias is not None
        shared = tuple(axis for axis in range(3) if problem.bias.shape[axis] == 1)
        return rows.sum(axis=shared, keepdims=True)[..., None]
    if name == "softmax_aux":
        assert problem.softmax_aux is not None
        heads = rows.sum(axis=(0, 2))
        heads = heads.sum(keepdims=True) if problem.shares_sinks else heads
        return heads if problem.softmax_aux.ndim == 1 else heads[:, None]
    grouped = rows.sum(axis=2).reshape(problem.batch, 1, problem.kv_heads, problem.group)
    return grouped.sum(axis=3)[..., None]
