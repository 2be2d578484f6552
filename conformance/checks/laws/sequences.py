"""Laws of sequences: packed, padded and single ones, parts of the keys, and the last row alone."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from attest.conformance.cases.build import Built
from attest.conformance.cases.case import Case
from attest.conformance.checks.laws.law import (
    Array,
    Called,
    Equation,
    Outputs,
    Rewrite,
    changed,
    mapped,
    output_of,
    total,
    with_cotangents,
)
from attest.conformance.checks.laws.options import pair
from attest.conformance.judging.trial import Trial
from attest.reference.oracle import Cotangents
from attest.reference.problem import Problem

_BY_ROWS, _BY_KEYS = ("out", "dquery"), ("dkey", "dvalue")


def two_packed(case: Case) -> Case:
    """Return the case with its tokens packed as two sequences, of about a third and the rest."""
    q, k = (max(length, 2) for length in (case.q_len, case.kv_len))
    lengths = ((max(q // 3, 1), max(k // 3, 1)), (q - max(q // 3, 1), k - max(k // 3, 1)))
    mask, bias = (axes and axes.replace("b", "1", 1) for axes in (case.mask, case.bias))
    return replace(case, batch=1, q_len=q, kv_len=k, lengths=lengths, mask=mask, bias=bias)


def equal_packed(case: Case) -> Case:
    """Return the same with as many queries as keys in each sequence."""
    return two_packed(replace(case, q_len=case.kv_len))


def packed_as_loop(trial: Trial) -> Rewrite:
    """Call each sequence of a packed call by itself."""
    parts = [Called(_sequence(trial.built, q, k)) for q, k in _spans(trial.built.problem)]

    def joined(name: str, axis: int) -> Equation:
        return Equation(
            name,
            output_of(name),
            lambda calls, _size: np.concatenate([call[name] for call in calls[1:]], axis=axis),
        )

    of_tokens = (joined(name, 1) for name in (*_BY_ROWS, *_BY_KEYS))
    equations = (*of_tokens, joined("lse", 2), *total("dsoftmax_aux"))
    return Rewrite((Called(trial.built), *parts), equations)


def _spans(problem: Problem) -> list[tuple[slice, slice]]:
    """Return the query and key tokens of each packed sequence."""
    assert problem.cum_seqlens_q is not None
    assert problem.cum_seqlens_k is not None
    ends = zip(problem.cum_seqlens_q.tolist(), problem.cum_seqlens_k.tolist(), strict=True)
    return [(slice(q, next_q), slice(k, next_k)) for (q, k), (next_q, next_k) in pairwise(ends)]


def _sequence(built: Built, rows: slice, keys: slice) -> Built:
    """Return the call of some rows and keys alone."""
    problem, given = built.problem, built.cotangents
    changes: dict[str, Any] = {"cum_seqlens_q": None, "cum_seqlens_k": None}
    for name, cuts in (
        ("query", {1: rows}),
        ("key", {1: keys}),
        ("value", {1: keys}),
        ("q_segment_ids", {1: rows}),
        ("kv_segment_ids", {1: keys}),
        ("kv_start", {1: rows}),
        ("kv_end", {1: rows}),
        ("attention_mask", {2: rows, 3: keys}),
        ("bias", {2: rows, 3: keys}),
    ):
        array = getattr(problem, name)
        if array is not None:
            changes[name] = _cut(array, cuts)
    assert given.lse is not None
    return Built(replace(problem, **changes), Cotangents(given.out[:, rows], given.lse[:, :, rows]))


def _cut(array: Array, cuts: dict[int, slice]) -> Array:
    """Return a part of an array along some axes; one of size 1 is shared and stays whole."""
    at = [slice(None)] * array.ndim
    for axis, cut in cuts.items():
        at[axis] = cut if array.shape[axis] > 1 else slice(None)
    return array[tuple(at)]


def packed_as_padded(trial: Trial) -> Rewrite:
    """Put the sequences of a packed call into the batch of a padded one."""
    problem, given = trial.built.problem, trial.built.cotangents
    spans = _spans(problem)
    q_room, k_room = (max(span[side].stop - span[side].start for span in spans) for side in (0, 1))
    assert given.lse is not None

    def spread(array: Array, side: int, room: int, axis: int = 1) -> Array:
        shape = [len(spans), *array.shape[1:]]
        shape[axis] = room
        padded = np.zeros_like(array, shape=tuple(shape))
        for entry, span in enumerate(spans):
            size = span[side].stop - span[side].start
            places = (slice(None),) * (axis - 1)
            padded[(entry, *places, slice(0, size))] = array[(0, *places, span[side])]
        return padded

    def packed(array: Array, side: int, axis: int = 1) -> Array:
        places = (slice(None),) * (axis - 1)
        parts = [
            array[(slice(entry, entry + 1), *places, slice(0, span[side].stop - span[side].start))]
            for entry, span in enumerate(spans)
        ]
        return np.concatenate(parts, axis=axis)

    other = Built(
        replace(
            problem,
            query=spread(problem.query, 0, q_room),
            key=spread(problem.key, 1, k_room),
            value=spread(problem.value, 1, k_room),
        ),
        Cotangents(spread(given.out, 0, q_room), spread(given.lse, 0, q_room, 2)),
    )

    def joined(name: str, side: int, axis: int = 1) -> Equation:
        return mapped(name, lambda array: packed(array, side, axis))

    by_rows = (joined(name, 0) for name in _BY_ROWS)
    return pair(trial.built, other, *by_rows, *(joined(name, 1) for name in _BY_KEYS), joined("lse", 0, 2))


def packed_as_segments(trial: Trial) -> Rewrite:
    """Replace the lengths of a packed call, with equal queries and keys, by segment ids."""
    problem = trial.built.problem
    ids = {}
    for name, side in (("q_segment_ids", 0), ("kv_segment_ids", 1)):
        sizes = [span[side].stop - span[side].start for span in _spans(problem)]
        ids[name] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)[None]
    return pair(trial.built, changed(trial.built, cum_seqlens_q=None, cum_seqlens_k=None, **ids))


def last_row(trial: Trial) -> Rewrite | str:
    """Call the last query row alone; in the whole call, the cotangents of all other rows are 0."""
    problem, given = trial.built.problem, trial.built.cotangents
    if problem.q_len == 1:
        return "one query row"
    last = slice(problem.q_len - 1, problem.q_len)
    out, lse = np.zeros_like(given.out), np.zeros_like(np.asarray(given.lse))
    assert given.lse is not None
    out[:, last], lse[:, :, last] = given.out[:, last], given.lse[:, :, last]
    whole = with_cotangents(trial.built, out, lse)
    alone = _sequence(trial.built, last, slice(0, problem.kv_len))

    def grown(name: str, axis: int) -> Equation:
        """Return the equation of the last row. The other rows count as equal."""

        def ending(calls: Sequence[Outputs], call: int) -> Array:
            whole_array = np.zeros_like(calls[0][name])
            at = (slice(None),) * axis + (slice(-1, None),)
            whole_array[at] = calls[call][name][at]
            return whole_array

        return Equation(name, lambda calls, _: ending(calls, 0), lambda calls, _: ending(calls, 1))

    return pair(whole, alone, grown("out", 1), grown("dquery", 1), grown("lse", 2), grown("dbias", 2))


def merged_halves(trial: Trial) -> Rewrite | str:
    """Call with each half of the keys, and merge both by lse."""
    problem = trial.built.problem
    if problem.kv_len == 1:
        return "one key"
    middle = problem.kv_len // 2
    rows = slice(0, problem.q_len)
    halves = [
        _sequence(trial.built, rows, keys) for keys in (slice(0, middle), slice(middle, problem.kv_len))
    ]

    def lse(calls: Sequence[Outputs]) -> Array:
        return np.logaddexp(calls[1]["lse"], calls[2]["lse"])

    def shares(calls: Sequence[Outputs]) -> list[Array]:
        """Return the share of each half in the merged rows [B, Sq, Hq, 1]."""
        joint = lse(calls)
        floor = np.where(np.isneginf(joint), 0.0, joint)
        return [np.exp(call["lse"] - floor).swapaxes(1, 2)[..., None] for call in calls[1:]]

    def out(calls: Sequence[Outputs], _size: Any) -> Array:
        parts = zip(shares(calls), calls[1:], strict=True)
        return np.sum([share * call["out"] for share, call in parts], axis=0)

    def lse_bound(_calls: Sequence[Outputs], bounds: Sequence[Outputs]) -> Array:
        return np.maximum(bounds[1]["lse"], bounds[2]["lse"])

    def out_bound(calls: Sequence[Outputs], bounds: Sequence[Outputs]) -> Array:
        """Return the bound of a sum of which each share is off by a factor, from the errors of both lse."""
        off = np.expm1(bounds[1]["lse"] + bounds[2]["lse"]).swapaxes(1, 2)[..., None]
        parts = zip(shares(calls), calls[1:], bounds[1:], strict=True)
        terms = [
            share * ((1 + off) * bound["out"] + off * np.abs(call["out"])) for share, call, bound in parts
        ]
        return np.sum(terms, axis=0)

    return Rewrite(
        (Called(trial.built), *map(Called, halves)),
        (
            Equation("lse", output_of("lse"), lambda calls, _size: lse(calls), right_bound=lse_bound),
            Equation("out", output_of("out"), out, source="lse", right_bound=out_bound),
        ),
    )
