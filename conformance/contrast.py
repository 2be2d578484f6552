"""Whether a case can tell right from wrong.

For every feature that a case switches on there are neighbouring problems: the feature off, or shifted by
one. If the exact answer to a neighbour lies within a few bounds of the exact answer to the case, a kernel
with that defect would pass, and the case is inconclusive.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from conformance.build import Built
from reference.error_model import Prediction
from reference.oracle import Answer, attention
from reference.problem import Array, Problem
from reference.semantics import Semantics


def neighbours(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Each feature of the problem by name, with a problem that differs in it alone."""
    if problem.causal:
        yield "causal", replace(problem, causal=False)
    if problem.sliding_window is not None:
        yield "window", replace(problem, sliding_window=None)
    if problem.attention_mask is not None:
        yield "mask", replace(problem, attention_mask=np.roll(problem.attention_mask, 1, axis=3))
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
        yield "dropout", replace(problem, dropout_seed=problem.dropout_seed ^ 1)
    if problem.softmax_scale is not None:
        yield "scale", replace(problem, softmax_scale=None)
    if problem.group > 1 and problem.kv_heads > 1:
        yield (
            "gqa",
            replace(problem, key=np.roll(problem.key, 1, axis=2), value=np.roll(problem.value, 1, axis=2)),
        )
    if not problem.normalize_output:
        yield "unnormalized", replace(problem, normalize_output=True)


def blind_spots(
    built: Built,
    semantics: Semantics,
    answer: Answer,
    predictions: Mapping[str, Prediction],
) -> tuple[str, ...]:
    """The features that the case cannot see: no output of their neighbour is far enough away."""
    contrast = _contrast_in_bounds()
    return tuple(
        name
        for name, problem in neighbours(built.problem)
        if not _differs(attention(problem, semantics, built.cotangents), answer, predictions, contrast)
    )


@cache
def _contrast_in_bounds() -> float:
    return tomllib.loads(Path(__file__).with_name("judge.toml").read_text())["contrast_in_bounds"]


def _differs(other: Answer, answer: Answer, predictions: Mapping[str, Prediction], contrast: float) -> bool:
    others = other.items()
    for name, want in answer.items().items():
        if name not in others or name not in predictions:
            continue
        with np.errstate(invalid="ignore"):
            distance = np.abs(others[name] - want)
        finite = np.isfinite(want)
        if (np.isfinite(others[name]) != finite).any():
            return True
        if (distance[finite] > contrast * predictions[name].bound[finite]).any():
            return True
    return False


def _without_bias(bias: Array) -> Array:
    """A bias that only hides what the given one hides, so that its finite values are what is compared."""
    hides = np.isneginf(bias.astype(np.float64))
    return np.where(hides, bias, np.zeros_like(bias))
