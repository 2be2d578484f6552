"""Laws of independence: NaN in one batch entry, head or row reaches no other one."""

from typing import Any

import numpy as np

from attest.conformance.cases.build import Built
from attest.conformance.checks.laws.law import Array, Called, Equation, Rewrite, changed, selected
from attest.conformance.judging.trial import Trial

# The axis of batch entries, of heads and of rows in each array that has NaN put into it.
_BATCH = {"query": 0, "key": 0, "value": 0, "out": 0, "lse": 0}
_HEADS = {"query": 2, "key": 2, "value": 2, "out": 2, "lse": 1}
_ROWS = {"query": 1, "out": 1, "lse": 2}


def batch(trial: Trial) -> Rewrite | str:
    """Put NaN into the second batch entry."""
    if trial.case.batch == 1:
        return "one batch entry"
    return _spoilt(trial, _BATCH, 1, 1)


def heads(trial: Trial) -> Rewrite | str:
    """Put NaN into the second key head and the query heads that read it."""
    if trial.case.kv_heads == 1:
        return "one key head"
    return _spoilt(trial, _HEADS, 1, trial.built.problem.group)


def rows(trial: Trial) -> Rewrite | str:
    """Put NaN into the middle query row. The gradients of keys and values are sums over all rows."""
    if trial.case.q_len == 1:
        return "one query row"
    return _spoilt(trial, _ROWS, trial.case.q_len // 2, 1)


def _spoilt(trial: Trial, axes: dict[str, int], place: int, group: int) -> Rewrite:
    built = trial.built
    problem, given = built.problem, built.cotangents
    arrays: dict[str, Array] = {"query": problem.query, "key": problem.key, "value": problem.value}
    arrays |= {"out": given.out, "lse": np.asarray(given.lse)}
    spoilt: dict[str, Any] = {}
    equations: list[Equation] = []
    for name, axis in axes.items():
        count = 1 if name in ("key", "value") else group
        at = (slice(None),) * axis + (slice(place * count, (place + 1) * count),)
        spoilt[name] = arrays[name].copy()
        spoilt[name][at] = np.nan
        output = name if name in ("out", "lse") else f"d{name}"
        equations.append(selected(output, lambda array, at=at: _cleared(array, at)))
    cotangents = type(given)(spoilt.pop("out"), spoilt.pop("lse"))
    other = Built(changed(built, **spoilt).problem, cotangents)
    return Rewrite((Called(built), Called(other, clean=built)), tuple(equations))


def _cleared(array: Array, at: tuple[slice, ...]) -> Array:
    """Return an array with zeros in a place."""
    cleared = array.copy()
    cleared[at] = 0.0
    return cleared
