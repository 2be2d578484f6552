"""The places of wrong elements in words, one text an axis: "query 14 of 34", "keys 32-63 of 80"."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# The axes of each output: a word for one place and a word for several.
_BATCH = ("batch entry", "batch entries")
_QUERY, _KEY = ("query", "queries"), ("key", "keys")
_HEAD, _KV_HEAD = ("head", "heads"), ("KV head", "KV heads")
_CHANNEL, _SINK = ("channel", "channels"), ("sink", "sinks")
_AXES = {
    "out": (_BATCH, _QUERY, _HEAD, _CHANNEL),
    "lse": (_BATCH, _HEAD, _QUERY),
    "dquery": (_BATCH, _QUERY, _HEAD, _CHANNEL),
    "dkey": (_BATCH, _KEY, _KV_HEAD, _CHANNEL),
    "dvalue": (_BATCH, _KEY, _KV_HEAD, _CHANNEL),
    "dbias": (_BATCH, _HEAD, _QUERY, _KEY),
    "dsoftmax_aux": (_HEAD, _SINK),
}
# The axes along a sequence.
_SEQUENCE = (_QUERY, _KEY)
# More runs of neighbouring places than this are counted, not listed.
_MOST_RUNS = 3


def sequence_axis(output: str) -> tuple[int, str] | None:
    """Return the axis of an output along a sequence, and "query" or "key"; None if it has none, or two."""
    found = [(axis, names[0]) for axis, names in enumerate(_AXES.get(output, ())) if names in _SEQUENCE]
    return found[0] if len(found) == 1 else None


def places(output: str, wrong: NDArray[np.bool_]) -> tuple[str, ...]:
    """Return where an output is wrong, for each axis of which only some places are; empty if nothing is.

    wrong: of the shape of the output. Where an output is wrong all over, the one text is "everywhere".
    """
    if not wrong.any():
        return ()
    names = _AXES[output][-wrong.ndim :]
    found: list[str] = []
    for axis, (one, several) in enumerate(names):
        others = tuple(other for other in range(wrong.ndim) if other != axis)
        hit = np.flatnonzero(wrong.any(axis=others))
        if len(hit) < wrong.shape[axis]:
            found.append(f"{_listed(hit, one, several)} of {wrong.shape[axis]}")
    return tuple(found) or ("everywhere",)


def _listed(hit: NDArray[Any], one: str, several: str) -> str:
    """Return places in words: a few runs of neighbours, a regular step, or their number."""
    if len(hit) == 1:
        return f"{one} {hit[0]}"
    apart = np.diff(hit) > 1
    runs = list(zip(hit[np.append(True, apart)], hit[np.append(apart, True)], strict=True))
    if len(runs) <= _MOST_RUNS:
        return f"{several} {', '.join(str(a) if a == b else f'{a}-{b}' for a, b in runs)}"
    steps = set(np.diff(hit).tolist())
    if len(steps) == 1:
        return f"1 {one} in {steps.pop()}, from {hit[0]},"
    return f"{len(hit)} {several}, from {hit[0]} to {hit[-1]},"
