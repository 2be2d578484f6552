"""A picture of one head: which keys each query row sees, and how far off its weights are.

The weights of a kernel are its out for one-hot values. Nothing is dropped. To show which keys a row sees, the
query is 0, so that every visible key has a weight that is far from 0.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.conformance.judging.execute import execute
from attest.conformance.judging.trial import Trial
from attest.conformance.record import Picture
from attest.reference.error_model import predict
from attest.reference.oracle import attention
from attest.reference.problem import Problem
from attest.reference.semantics import Semantics
from attest.reference.visibility import allowed, pick

# The most rows and keys that are shown.
_ROWS, _KEYS = 40, 72
# By whether a key should be visible, and is.
_SIGNS = {(True, True): "#", (False, False): ".", (False, True): "!", (True, False): "?"}
_LEGEND = "# visible, . hidden, ! visible but should be hidden, ? hidden but should be visible"
# The errors of more weights are not drawn: the prediction for all of them would take long.
_MOST_WEIGHTS = 2**21
# A weight within its bound, one that is not finite, and the largest power of ten of err / bound.
_RIGHT, _NOT_FINITE, _LARGEST = ".", "x", 9
_ERROR_LEGEND = ". within the bound, 0 to 9 the power of ten of err/bound, x not finite"


class TooLateError(Exception):
    """Raised if a picture is not wanted any more."""


def picture(trial: Trial) -> str:
    """Return a picture of the first head in which the kernel differs from the clauses, or of the first head.

    Raises SubjectError.
    """
    return text_of(draw(trial))


def draw(trial: Trial, wanted: Callable[[], bool] = lambda: True) -> Picture:
    """Return the picture as data. Raises SubjectError, and TooLateError when `wanted` returns False."""
    plain = replace(trial.built.problem, dropout_prob=0.0, dropout_seed=None)
    blind = replace(plain, query=np.zeros_like(plain.query))
    got = np.concatenate([part != 0 for part in _weights(trial, blind, wanted)], axis=-1)
    want = _expected(blind, trial.subject.semantics)
    wrong = got != want
    ratios = _ratios(trial, plain, wanted) if got.size <= _MOST_WEIGHTS else np.zeros(got.shape, np.float32)
    head = _first(wrong) or _first(ratios > 1) or (0, 0)
    row, key = _first(wrong[head]) or _first(ratios[head] > 1) or (0, 0)
    rows, keys = _around(row, _ROWS, got.shape[2]), _around(key, _KEYS, got.shape[3])
    tiling = trial.subject.tilings[trial.case.tiling]
    return Picture(
        batch=head[0],
        head=head[1],
        rows=got.shape[2],
        keys=got.shape[3],
        first_row=rows.start,
        first_key=keys.start,
        query_block=tiling.query_block or 0,
        key_block=tiling.key_block or 0,
        differ=int(wrong[head].sum()),
        seen=tuple(
            "".join(
                _SIGNS[bool(w), bool(g)] for w, g in zip(want[head][i, keys], got[head][i, keys], strict=True)
            )
            for i in range(rows.start, rows.stop)
        ),
        errors=tuple(
            "".join(_digit(float(ratio)) for ratio in ratios[head][i, keys])
            for i in range(rows.start, rows.stop)
        ),
    )


def text_of(shown: Picture) -> str:
    """Return a picture as text; lines between blocks, if the kernel declares any."""
    count = f"{shown.differ} of {shown.rows * shown.keys} differ"
    title = f"batch entry {shown.batch}, head {shown.head}: rows down, keys across; {count}"
    lines = [title, *_grid(shown, shown.seen), _LEGEND]
    if shown.wrong_weights:
        lines += ["errors of the weights", *_grid(shown, shown.errors), _ERROR_LEGEND]
    return "\n".join(lines)


def _weights(trial: Trial, problem: Problem, wanted: Callable[[], bool]) -> Iterator[NDArray[Any]]:
    """Yield the weights that the kernel gives to some keys at a time: [B, Hq, Sq, keys]."""
    width = problem.value.shape[-1]
    yield np.zeros((problem.batch, problem.query.shape[2], problem.q_len, 0))
    for start in range(0, problem.kv_len, width):
        if not wanted():
            raise TooLateError
        keys = range(start, min(start + width, problem.kv_len))
        value = np.zeros_like(problem.value)
        value[:, keys, :, range(len(keys))] = 1
        built = replace(trial.built, problem=replace(problem, value=value))
        out = execute(trial.subject, built, trial.case.tiling, gradients=False)["out"]
        yield out.transpose(0, 2, 1, 3)[..., : len(keys)]


def _expected(problem: Problem, semantics: Semantics) -> NDArray[np.bool_]:
    """Return which keys the clauses make visible: bool [B, Hq, Sq, Sk]."""
    rows = np.arange(problem.q_len)
    heads = range(problem.query.shape[2])

    def visible(batch: int, head: int) -> NDArray[np.bool_]:
        seen = allowed(problem, semantics, batch, head, rows)
        if problem.bias is None:
            return seen
        return seen & (pick(problem.bias, batch, head, rows).astype(np.float64) != -np.inf)

    return np.stack([np.stack([visible(batch, head) for head in heads]) for batch in range(problem.batch)])


def _ratios(trial: Trial, problem: Problem, wanted: Callable[[], bool]) -> NDArray[np.float64]:
    """Return err / bound of the weights for the query of the case, inf if not finite: [B, Hq, Sq, Sk]."""
    got = np.concatenate([part.astype(np.float64) for part in _weights(trial, problem, wanted)], axis=-1)
    # One channel for each key: a bound depends on the values of its channel alone.
    one_hot = np.eye(problem.kv_len, dtype=problem.value.dtype)[None, :, None, :]
    value = np.broadcast_to(one_hot, (*problem.value.shape[:-1], problem.kv_len)).copy()
    whole = replace(problem, value=value)
    want = attention(whole, trial.subject.semantics).out.transpose(0, 2, 1, 3)
    predicted = predict(whole, trial.subject.semantics, trial.numerics, repeats=False)
    with np.errstate(all="ignore"):
        error = np.abs(got - want)
        ratio = np.where(error == 0, 0.0, error / predicted["out"].bound.transpose(0, 2, 1, 3))
    return np.where(np.isfinite(ratio), ratio, np.inf)


def _first(hit: NDArray[np.bool_]) -> Any:
    """Return the first place along the first two axes where anything is hit; None if nothing is."""
    places = np.argwhere(hit.any(axis=tuple(range(2, hit.ndim))))
    return tuple(int(place) for place in places[0]) if len(places) else None


def _around(place: int, shown: int, length: int) -> range:
    """Return the part of an axis to show: around a place, if all of it has no room."""
    first = max(0, min(place - shown // 2, length - shown))
    return range(first, min(first + shown, length))


def _digit(ratio: float) -> str:
    if ratio <= 1:
        return _RIGHT
    return _NOT_FINITE if math.isinf(ratio) else str(min(int(math.log10(ratio)), _LARGEST))


def _grid(shown: Picture, rows: tuple[str, ...]) -> list[str]:
    """Return one line a row, with lines between blocks."""
    width = len(str(shown.rows))
    lines = [f"{'':{width}} key {shown.first_key}"]
    for i, signs in enumerate(rows, shown.first_row):
        cells = [
            f"|{sign}" if j > shown.first_key and shown.key_block and j % shown.key_block == 0 else sign
            for j, sign in enumerate(signs, shown.first_key)
        ]
        line = f"{i:{width}} {''.join(cells)}"
        if i > shown.first_row and shown.query_block and i % shown.query_block == 0:
            lines.append(f"{'':{width}} {'-' * (len(line) - width - 1)}")
        lines.append(line)
    return lines
