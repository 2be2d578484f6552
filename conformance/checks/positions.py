"""Positions: a part of a call, with its tokens' positions and its origin, gives that part of the whole (S23).

Some batch entries, some heads and some query rows of a case are called by themselves. The results of each
part must agree with the oracle's answer to that call, and those of the whole with its answer to the whole.
Dropout must keep the same weights in both, which one-hot values show. A part gets the positions of its rows
and keys. If the subject declares only `q_offset`, it gets an offset for each of its sequences instead, which
is enough because every part has all keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.conformance.cases.build import Built
from attest.conformance.checks import Check, Finding, held_to_oracle
from attest.conformance.judging.execute import execute
from attest.conformance.judging.kept_weights import showing
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import TRANSFORMED
from attest.conformance.record import Verdict
from attest.conformance.subject import Subject
from attest.reference.oracle import Cotangents
from attest.reference.problem import Problem
from attest.reference.visibility import key_positions, row_positions

Array = NDArray[Any]
_DEFAULT_ORIGIN = (0, 0, 0, 0)

# A call with one-hot values shows what dropout does to as many keys as a value has elements.
_PATTERN_CALLS = 4

# The axis of a pair [batch, head, row, key] along which each cut is made.
_AXES = ("batch", "heads", "rows")


@dataclass(frozen=True)
class Part(Trial):
    """A trial of some of the arrays of its case."""

    given: Built

    @cached_property
    def built(self) -> Built:
        """The arrays."""
        return self.given


def placed(problem: Problem, subject: Subject) -> Problem:
    """Return the same problem with explicit positions of all tokens, or explicit offsets of all sequences."""
    alignment = subject.semantics.causal if problem.causal else subject.semantics.window
    if "positions" not in subject.features:
        return replace(problem, q_offset=_offsets(problem, alignment))
    entries = range(problem.batch)
    rows = [row_positions(problem, alignment, batch) for batch in entries]
    keys = [key_positions(problem, batch) for batch in entries]
    stacked = (np.stack(positions).astype(np.int32) for positions in (rows, keys))
    return replace(problem, q_offset=None, **dict(zip(("q_positions", "kv_positions"), stacked, strict=True)))


def _offsets(problem: Problem, alignment: str) -> Array:
    """Return the position of the first row of each sequence, 0 for one without rows: int32 [sequences]."""
    positions = [row_positions(problem, alignment, batch) for batch in range(problem.batch)]
    if problem.cum_seqlens_q is not None and problem.batch == 1:
        first = [positions[0][start : start + 1] for start in problem.cum_seqlens_q[:-1]]
    else:
        first = [rows[:1] for rows in positions]
    return np.array([rows[0] if len(rows) else 0 for rows in first], np.int32)


def middle(problem: Problem, axis: str, multiple: int = 1) -> slice | None:
    """Return the middle third of the batch entries, heads or rows; the second of two; None if there is one.

    The first ones need no origin, and the last rows are at their default positions. Heads are cut between
    key heads if there are several, and rows at multiples of `multiple`.
    """
    size = {"batch": problem.batch, "heads": problem.q_heads, "rows": problem.q_len}[axis]
    unit = {"batch": 1, "heads": problem.group if problem.kv_heads > 1 else 1, "rows": multiple}[axis]
    count = size // unit
    before = max(count // 3, 1)
    stop = count - before if count > 2 else count
    return slice(before * unit, stop * unit) if count > 1 else None


def cut(built: Built, axis: str, here: slice) -> Built:
    """Return some of the batch entries, query heads or rows of a `placed` call, with their origin.

    Positions are cut with the rows, and offsets are moved.
    """
    problem = built.problem
    place = _AXES.index(axis)
    changes: dict[str, Any] = {}

    def keep(name: str, along: int, chosen: slice = here) -> None:
        array = getattr(problem, name)
        if array is not None and array.shape[along] > 1:
            changes[name] = array[(slice(None),) * along + (chosen,)]

    for name in ("attention_mask", "bias"):
        keep(name, place)
    if axis == "batch":
        for name in (
            "query",
            "key",
            "value",
            "q_segment_ids",
            "kv_segment_ids",
            "q_positions",
            "kv_positions",
            "kv_start",
            "kv_end",
            "alibi_slopes",
        ):
            keep(name, 0)
    elif axis == "heads":
        keep("query", 2)
        keep("alibi_slopes", 1)
        group = problem.group
        shared = slice(here.start // group, -(-here.stop // group))
        for name in ("key", "value"):
            keep(name, 2, shared)
        if problem.softmax_aux is not None:
            one = problem.softmax_aux[None] if problem.softmax_aux.ndim == 1 else problem.softmax_aux
            changes["softmax_aux"] = one if len(one) == 1 else one[here]
    else:
        for name in ("query", "q_segment_ids", "q_positions", "kv_start", "kv_end"):
            keep(name, 1)
    changes |= _lengths(problem, axis, here) | _moved(problem, axis, here)
    origin = list(problem.origin)
    origin[place] += here.start
    part = replace(problem, **changes, origin=tuple(origin))
    out, lse = built.cotangents.out, built.cotangents.lse
    assert lse is not None
    out_axis, lse_axis = ((0, 0), (2, 1), (1, 2))[place]
    cotangents = Cotangents(
        out[(slice(None),) * out_axis + (here,)], lse[(slice(None),) * lse_axis + (here,)]
    )
    return Built(part, cotangents)


def _moved(problem: Problem, axis: str, here: slice) -> dict[str, Array]:
    """Return the offsets of the sequences of a part: a sequence whose first rows are cut off begins later."""
    if not isinstance(problem.q_offset, np.ndarray) or axis == "heads":
        return {}
    if axis == "batch":
        return {"q_offset": problem.q_offset[here]}
    cum = problem.cum_seqlens_q
    starts = 0 if cum is None or problem.batch > 1 else cum[:-1]
    return {"q_offset": (problem.q_offset + np.maximum(here.start - starts, 0)).astype(np.int32)}


def _lengths(problem: Problem, axis: str, here: slice) -> dict[str, Array]:
    cum_q, cum_k = problem.cum_seqlens_q, problem.cum_seqlens_k
    if cum_q is None or cum_k is None or axis == "heads":
        return {}
    if axis == "batch":
        return {
            name: np.concatenate([[0], np.cumsum(np.diff(cum)[here])]).astype(np.int32)
            for name, cum in (("cum_seqlens_q", cum_q), ("cum_seqlens_k", cum_k))
        }
    if problem.batch == 1:
        return {"cum_seqlens_q": (np.clip(cum_q, here.start, here.stop) - here.start).astype(np.int32)}
    lengths = np.clip(np.diff(cum_q) - here.start, 0, here.stop - here.start)
    return {"cum_seqlens_q": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)}


def kept(trial: Trial, keys: slice) -> Array:
    """Return which weights of some keys dropout keeps, by one-hot values: bool [B, Sq, Hq, keys]."""
    built = showing(trial.built, keys)
    out = execute(trial.subject, built, trial.case.tiling, gradients=False)["out"]
    return out[..., : keys.stop - keys.start].astype(np.float64) != 0


def pattern_keys(problem: Problem) -> Iterator[slice]:
    """Yield the keys of a few calls that show them, as many as a value has channels."""
    for start in range(0, problem.kv_len, problem.value_dim)[:_PATTERN_CALLS]:
        yield slice(start, min(start + problem.value_dim, problem.kv_len))


def _run(trial: Trial) -> Finding:
    subject, problem = trial.subject, placed(trial.built.problem, trial.subject)
    whole = replace(trial.built, problem=problem, integer_mask=None)
    finding = held_to_oracle(trial, trial.outputs, sorted(trial.outputs))
    measurements = finding.measurements
    if finding.verdict is Verdict.FAIL:
        return replace(finding, message=f"the whole is {finding.message}")
    cuts = 0
    for axis in _AXES:
        here = middle(problem, axis, subject.limits.length_multiple)
        if here is None or _lacks_packed(trial, axis, here):
            continue
        cuts += 1
        part = Part(subject, trial.case, _as_declared(cut(whole, axis, here), subject))
        finding = held_to_oracle(part, part.outputs, sorted(part.outputs))
        measurements += finding.measurements
        if finding.verdict is Verdict.FAIL:
            return replace(finding, message=f"{axis} {here.start} to {here.stop} alone: {finding.message}")
        out_axis = (0, 2, 1)[_AXES.index(axis)]
        for keys in pattern_keys(problem) if problem.dropout_prob else ():
            want = kept(trial, keys)[(slice(None),) * out_axis + (here,)]
            if not np.array_equal(kept(part, keys), want):
                message = f"{axis} {here.start} to {here.stop} alone: dropout keeps other weights"
                return Finding(Verdict.FAIL, measurements, message, ("S12",))
    if not cuts:
        return Finding(Verdict.INCONCLUSIVE, message="one batch entry, one head and one row: nothing to cut")
    return Finding(Verdict.PASS, measurements)


def _as_declared(part: Built, subject: Subject) -> Built:
    """Remove the origin of a part if the subject does not declare it. Only dropout reads an origin."""
    if "origin" in subject.features:
        return part
    return replace(part, problem=replace(part.problem, origin=_DEFAULT_ORIGIN))


def _lacks_packed(trial: Trial, axis: str, here: slice) -> bool:
    """Return whether one batch entry with a length remains: a packed call, unsupported by the subject."""
    padded = trial.case.lengths is not None and trial.case.batch > 1
    return (
        padded and axis == "batch" and here.stop - here.start == 1 and "packed" not in trial.subject.features
    )


def _clauses(trial: Trial) -> tuple[str, ...]:
    return ("S23", "S12") if trial.case.dropout else ("S23",)


def _applies(subject: Subject) -> str | None:
    features = subject.features
    missing = ["origin"] if "dropout" in features and "origin" not in features else []
    missing += [] if features & {"q_offset", "positions"} else ["q_offset or positions"]
    if missing:
        return f"does not declare {' and '.join(missing)}"
    differ = subject.semantics.causal != subject.semantics.window
    return "aligns causal order and windows differently, which positions cannot express" if differ else None


CHECKS = (Check("positions.shard", kind=TRANSFORMED, clauses=_clauses, run=_run, applies=_applies),)
