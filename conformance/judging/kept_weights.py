"""The weights that a subject's dropout keeps, found by calls with one-hot values and one-hot cotangents.

Queries and keys are zero in these calls, so that no weight is too small to show.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from attest.conformance.cases.build import Built
from attest.conformance.judging.execute import execute
from attest.conformance.subject import Subject
from attest.reference.oracle import Cotangents, attention
from attest.reference.problem import Problem

Kept = NDArray[np.bool_]
Floats = NDArray[np.float64]


def flat(problem: Problem) -> Problem:
    """Return the problem with logits of 0 wherever they are finite, so that all visible weights are alike."""
    bias, aux, slopes = problem.bias, problem.softmax_aux, problem.alibi_slopes
    if bias is not None:
        bias = np.where(np.isneginf(bias.astype(np.float64)), bias, np.zeros_like(bias))
    return replace(
        problem,
        query=np.zeros_like(problem.query),
        key=np.zeros_like(problem.key),
        bias=bias,
        softmax_aux=None if aux is None else np.zeros_like(aux),
        alibi_slopes=None if slopes is None else np.zeros_like(slopes),
    )


def showing(built: Built, keys: slice) -> Built:
    """Return a call whose out shows which of some keys each row sees and keeps: one for each channel."""
    problem = flat(built.problem)
    value = np.zeros_like(problem.value)
    columns = np.arange(keys.start, keys.stop)
    value[:, columns, :, columns - keys.start] = 1
    return replace(built, problem=replace(problem, value=value))


def undropped(subject: Subject, built: Built) -> Floats:
    """Return the weights of the flat problem without dropout: float64 [B, Hq, Sq, Sk]."""
    problem = replace(flat(built.problem), dropout_prob=0.0, dropout_seed=None, dropout_shared=None)
    ones = np.broadcast_to(np.eye(problem.kv_len, dtype=problem.value.dtype)[:, None], _every_key(problem))
    return attention(replace(problem, value=ones), subject.semantics).out.transpose(0, 2, 1, 3)


def _every_key(problem: Problem) -> tuple[int, int, int, int]:
    return problem.batch, problem.kv_len, problem.kv_heads, problem.kv_len


def kept_forward(subject: Subject, built: Built, tiling: int, gradients: bool = True) -> Kept:
    """Return the weights that the forward pass keeps, by one-hot values: bool [B, Hq, Sq, Sk].

    gradients: whether the calls are differentiated, as those are whose results are judged.
    Pairs without a weight count as kept. Raises SubjectError.
    """
    problem = built.problem
    weights = undropped(subject, built)
    shown = np.zeros(weights.shape)
    for start in range(0, problem.kv_len, problem.value_dim):
        keys = slice(start, min(start + problem.value_dim, problem.kv_len))
        out = execute(subject, showing(built, keys), tiling, gradients)["out"].astype(np.float64)
        shown[..., keys] = out[..., : keys.stop - start].transpose(0, 2, 1, 3)
    return _kept(shown, weights)


def kept_backward(subject: Subject, built: Built, tiling: int) -> Kept:
    """Return the weights that the gradient of the values keeps, by one-hot cotangents: bool [B, Hq, Sq, Sk].

    Each call has the cotangents of a few rows of one head of each group. Raises SubjectError.
    """
    problem = flat(built.problem)
    weights = undropped(subject, built)
    shown = np.zeros(weights.shape)
    silent = np.zeros((problem.batch, problem.q_heads, problem.q_len), np.float32)
    for first in range(problem.group):
        for start in range(0, problem.q_len, problem.value_dim):
            rows = np.arange(start, min(start + problem.value_dim, problem.q_len))
            d_out = np.zeros_like(built.cotangents.out)
            d_out[:, rows, first :: problem.group, rows - start] = 1
            call = replace(built, problem=problem, cotangents=Cotangents(d_out, silent))
            d_value = execute(subject, call, tiling)["dvalue"].astype(np.float64)
            shown[:, first :: problem.group, rows] = d_value[..., : len(rows)].transpose(0, 2, 3, 1)
    return _kept(shown, weights)


def _kept(shown: Floats, weights: Floats) -> Kept:
    return ~(weights > 0) | (shown > weights / 2)
