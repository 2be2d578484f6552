"""Contrast: whether a case is sensitive enough to show a defect.

For every feature that a case switches on there are neighbouring problems: the feature off, or shifted by
one. If the exact answer to a neighbour lies within a few bounds of the exact answer to the case, a kernel
with that defect would pass, and the case is inconclusive.
"""

import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attest.reference.error_model import Prediction
from attest.reference.oracle import Answer, Cotangents, attention
from attest.reference.problem import Array, Problem
from attest.reference.semantics import Semantics
from attest.reference.visibility import allowed, pick

Floats = NDArray[np.float64]

# A seed has two words of 32 bits; a kernel may ignore either.
_SEED_BITS = (1, 1 << 32)


def neighbours(problem: Problem, semantics: Semantics) -> Iterator[tuple[str, Problem]]:
    """Yield each feature of the problem by name, with problems that differ only in that feature."""
    if problem.causal:
        yield "causal", replace(problem, causal=False)
    if problem.sliding_window is not None:
        yield "window", replace(problem, sliding_window=None)
        for wider in _wider(problem, problem.sliding_window):
            # A side that ends beyond the keys hides nothing, one token longer or not.
            if not _see_alike(problem, wider, semantics):
                yield "window", wider
    if problem.attention_mask is not None:
        yield "mask", replace(problem, attention_mask=_rolled(problem.attention_mask))
    if problem.bias is not None:
        yield "bias", replace(problem, bias=_without_bias(problem.bias))
    if problem.q_segment_ids is not None and problem.kv_segment_ids is not None:
        yield "segments", replace(problem, q_segment_ids=None, kv_segment_ids=None)
    if problem.cum_seqlens_q is not None:
        yield "lengths", replace(problem, cum_seqlens_q=None, cum_seqlens_k=None)
    if problem.softmax_aux is not None:
        yield "sinks", replace(problem, softmax_aux=None)
    if problem.logits_soft_cap is not None:
        yield "soft_cap", replace(problem, logits_soft_cap=None)
    if problem.dropout_prob > 0 and problem.dropout_seed is not None:
        for bit in _SEED_BITS if problem.dropout_keep is None else ():
            yield "dropout", replace(problem, dropout_seed=problem.dropout_seed ^ bit)
        if problem.dropout_keep is not None:
            yield "dropout", replace(problem, dropout_keep=np.roll(problem.dropout_keep, 1, axis=3))
        if problem.dropout_shared is not None:
            yield "shared_dropout", replace(problem, dropout_shared=None)
            for less in _less_shared(problem):
                yield "shared_dropout", replace(problem, dropout_shared=less)
    if problem.softmax_scale is not None:
        yield "scale", replace(problem, softmax_scale=None)
    if problem.kv_heads > 1 and _sees_any_key(problem, semantics, range(problem.batch)):
        yield "a key head for each group", _with_keys(problem, np.s_[:, :, :1])
        if problem.group > 1:
            yield "gqa", _with_heads(problem, np.arange(problem.q_heads) % problem.kv_heads)
    if _sees_any_key(problem, semantics, range(1, problem.batch)):
        yield "keys for each batch row", _with_keys(problem, np.s_[:1])
    if problem.q_offset is not None:
        yield "q_offset", replace(problem, q_offset=None)
        first, *others = np.atleast_1d(problem.q_offset).tolist()
        if any(other != first for other in others):
            yield "q_offset", replace(problem, q_offset=first)
    if problem.q_positions is not None or problem.kv_positions is not None:
        yield "positions", replace(problem, q_positions=None, kv_positions=None)
    if problem.chunk_size is not None:
        yield "chunks", replace(problem, chunk_size=None)
        other = replace(problem, chunk_size=problem.chunk_size + 1)
        if not _see_alike(problem, other, semantics):
            yield "chunks", other
    if problem.kv_start is not None or problem.kv_end is not None:
        yield "ranges", replace(problem, kv_start=None, kv_end=None)
        for wider in _longer(problem):
            if not _see_alike(problem, wider, semantics):
                yield "ranges", wider
    if problem.alibi_slopes is not None:
        yield "alibi", replace(problem, alibi_slopes=None)
        rolled = np.roll(problem.alibi_slopes, 1, axis=1)
        if not np.array_equal(rolled, problem.alibi_slopes):
            yield "alibi", replace(problem, alibi_slopes=rolled)
    if any(problem.origin):
        yield "origin", replace(problem, origin=(0, 0, 0, 0))
    if not problem.normalize_output:
        yield "unnormalized", replace(problem, normalize_output=True)


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """The exact forward answers to a problem and to its neighbours; they depend on no arithmetic."""

    problem: Problem
    semantics: Semantics
    answer: Answer
    neighbours: tuple[tuple[str, Problem, Answer], ...]


def neighbourhood(problem: Problem, semantics: Semantics) -> Neighbourhood:
    """Compute the exact forward answers around a problem."""
    return Neighbourhood(
        problem,
        semantics,
        attention(problem, semantics),
        tuple((name, other, attention(other, semantics)) for name, other in neighbours(problem, semantics)),
    )


@dataclass(frozen=True)
class Gradients:
    """The exact answer with its gradients, and how far a correct kernel may be off."""

    cotangents: Cotangents
    answer: Answer
    predictions: Mapping[str, Prediction]


def blind_spots(
    near: Neighbourhood,
    predictions: Mapping[str, Prediction],
    gradients: Callable[[], Gradients],
    outputs: Collection[str],
) -> tuple[str, ...]:
    """Return the features with a neighbour that differs too little from the case in all of `outputs`.

    predictions: of out and lse. gradients: called only for a neighbour with the same forward results. Most
    have others, and the forward pass takes a third of the time.
    """
    forward = {name: array for name, array in near.answer.items().items() if name in outputs}
    blind: list[str] = []
    for name, problem, other in near.neighbours:
        if _differs(other, forward, predictions):
            continue
        whole = gradients()
        wanted = {name: array for name, array in whole.answer.items().items() if name in outputs}
        if not _differs(attention(problem, near.semantics, whole.cotangents), wanted, whole.predictions):
            blind.append(name)
    return tuple(dict.fromkeys(blind))


def _sees_any_key(problem: Problem, semantics: Semantics, batches: Iterable[int]) -> bool:
    """Return whether some row of these batch entries sees a key; otherwise any keys may be read."""
    rows = np.arange(problem.q_len, dtype=np.int64)
    return any(
        allowed(problem, semantics, batch, head, rows).any()
        for batch in batches
        for head in range(problem.q_heads)
    )


def has_empty_rows(problem: Problem, semantics: Semantics) -> bool:
    """Return whether some query row sees no key."""
    rows = np.arange(problem.q_len, dtype=np.int64)
    for batch, head in np.ndindex(problem.batch, problem.q_heads):
        seen = allowed(problem, semantics, batch, head, rows)
        if problem.bias is not None:
            seen &= ~np.isneginf(pick(problem.bias, batch, head, rows).astype(np.float64))
        if not seen.any(axis=1).all():
            return True
    return False


@cache
def _contrast_in_bounds() -> float:
    return tomllib.loads(Path(__file__).with_name("judge.toml").read_text())["contrast_in_bounds"]


def _differs(other: Answer, wanted: Mapping[str, Floats], predictions: Mapping[str, Prediction]) -> bool:
    others, contrast = other.items(), _contrast_in_bounds()
    for name, want in wanted.items():
        # Other heads have gradients of other shapes.
        if name not in others or name not in predictions or others[name].shape != want.shape:
            continue
        with np.errstate(invalid="ignore"):
            distance = np.abs(others[name] - want)
        finite = np.isfinite(want)
        if (np.isfinite(others[name]) != finite).any():
            return True
        if (distance[finite] > contrast * predictions[name].bound[finite]).any():
            return True
    return False


def _wider(problem: Problem, window: tuple[int | None, int | None]) -> Iterator[Problem]:
    """Yield the problem with each side of its window one token longer."""
    left, right = window
    if left is not None:
        yield replace(problem, sliding_window=(left + 1, right))
    if right is not None:
        yield replace(problem, sliding_window=(left, right + 1))


def _less_shared(problem: Problem) -> Iterator[str]:
    """Yield either part of "bh" alone, where the other part has a coordinate that is not 0 anyway."""
    if problem.dropout_shared == "bh":
        if problem.batch > 1 or problem.origin[0]:
            yield "h"
        if problem.q_heads > 1 or problem.origin[1]:
            yield "b"


def _rolled(mask: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    """Return a mask moved by one key, or by one row where keys share it; None where rows do, too."""
    axis = next((axis for axis in (3, 2) if mask.shape[axis] > 1), None)
    return None if axis is None else np.roll(mask, 1, axis=axis)


def _longer(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with each end of its ranges one key further."""
    if problem.kv_start is not None:
        yield replace(problem, kv_start=problem.kv_start - 1)
    if problem.kv_end is not None:
        yield replace(problem, kv_end=problem.kv_end + 1)


def _see_alike(problem: Problem, other: Problem, semantics: Semantics) -> bool:
    """Return whether the same keys are visible in both problems, without their masks."""
    rows = np.arange(problem.q_len, dtype=np.int64)
    first, second = (replace(p, attention_mask=None) for p in (problem, other))
    return all(
        np.array_equal(allowed(first, semantics, batch, 0, rows), allowed(second, semantics, batch, 0, rows))
        for batch in range(problem.batch)
    )


def _with_keys(problem: Problem, chosen: tuple[slice, ...] | slice) -> Problem:
    """Return the problem with some of its keys and values in place of all."""
    key, value = (np.broadcast_to(array[chosen], array.shape) for array in (problem.key, problem.value))
    return replace(problem, key=key, value=value)


def _with_heads(problem: Problem, heads: NDArray[np.int64]) -> Problem:
    """Return the problem in which each query head reads the key head that is listed for it."""
    return replace(problem, key=problem.key[:, :, heads], value=problem.value[:, :, heads])


def _without_bias(bias: Array) -> Array:
    """Return a bias that hides the same pairs and is 0 elsewhere, so that only finite values differ."""
    hides = np.isneginf(bias.astype(np.float64))
    return np.where(hides, bias, np.zeros_like(bias))
