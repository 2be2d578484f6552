"""A picture of which keys each query row sees, as a kernel computes it and as the clauses define it.

The weights of a kernel are its out for one-hot values. The query is 0, so that every visible key has a weight
that is far from 0, and nothing is dropped.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from attest.conformance.judging.execute import execute
from attest.conformance.judging.trial import Trial
from attest.reference.problem import Problem
from attest.reference.semantics import Semantics
from attest.reference.visibility import allowed, pick

# The most rows and keys that are shown.
_ROWS, _KEYS = 40, 72
# By whether a key should be visible, and is.
_SIGNS = {(True, True): "#", (False, False): ".", (False, True): "!", (True, False): "?"}
_LEGEND = "# visible, . hidden, ! visible but should be hidden, ? hidden but should be visible"


def picture(trial: Trial) -> str:
    """Return a picture of the first head in which the kernel differs from the clauses, or of the first head.

    Raises SubjectError.
    """
    problem = _plain(trial.built.problem)
    got = _seen(trial, problem)
    want = _expected(problem, trial.subject.semantics)
    wrong = got != want
    batch, head = (int(place) for place in np.unravel_index(wrong.any(axis=(2, 3)).argmax(), wrong.shape[:2]))
    count = int(wrong[batch, head].sum())
    title = f"batch entry {batch}, head {head}: rows down, keys across; {count} of {wrong[0, 0].size} differ"
    return "\n".join([title, *_drawn(got[batch, head], want[batch, head]), _LEGEND])


def _plain(problem: Problem) -> Problem:
    return replace(problem, query=np.zeros_like(problem.query), dropout_prob=0.0, dropout_seed=None)


def _seen(trial: Trial, problem: Problem) -> NDArray[np.bool_]:
    """Return where the kernel gives weight to a key: bool [B, Hq, Sq, Sk]."""
    width = problem.value.shape[-1]
    parts: list[NDArray[np.bool_]] = []
    for start in range(0, problem.kv_len, width):
        value = np.zeros_like(problem.value)
        for channel, key in enumerate(range(start, min(start + width, problem.kv_len))):
            value[:, key, :, channel] = 1
        built = replace(trial.built, problem=replace(problem, value=value))
        out = execute(trial.subject, built, trial.case.tiling, gradients=False)["out"]
        parts.append(out.transpose(0, 2, 1, 3).astype(np.float64) != 0)
    return np.concatenate(parts, axis=-1)[..., : problem.kv_len]


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


def _drawn(got: NDArray[np.bool_], want: NDArray[np.bool_]) -> list[str]:
    """Return one line a row, of the part around the first difference where all of it has no room."""
    rows, keys = np.nonzero(got != want)
    row, key = (int(rows[0]), int(keys[0])) if len(rows) else (0, 0)
    first_row = max(0, min(row - _ROWS // 2, got.shape[0] - _ROWS))
    first_key = max(0, min(key - _KEYS // 2, got.shape[1] - _KEYS))
    width = len(str(got.shape[0]))
    lines = [f"{'':{width}} key {first_key}"]
    for i in range(first_row, min(first_row + _ROWS, got.shape[0])):
        pairs = zip(
            want[i, first_key : first_key + _KEYS], got[i, first_key : first_key + _KEYS], strict=True
        )
        lines.append(f"{i:{width}} " + "".join(_SIGNS[bool(w), bool(g)] for w, g in pairs))
    return lines
