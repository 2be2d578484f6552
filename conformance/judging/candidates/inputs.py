"""The inputs of a judgement: a call with its floats drawn anew, as a Problem of the reference."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.reference.problem import Problem, make_problem

Array = NDArray[Any]

FLOATS = ("query", "key", "value", "bias", "softmax_aux")
# What must be left at its default, since no arithmetic is declared for anything else.
_FIXED = ("precision", "logits_dtype")
# The logits of one draw in three are this many times larger: a few keys then have all the weight.
_LARGE = 4.0
# So many numbers are drawn by one thread at a time, from a stream of their own.
_PIECE = 1 << 22


class NotJudgedError(Exception):
    """A call that cannot be judged; the message is one sentence."""


@dataclass(frozen=True)
class Drawn:
    """A call on inputs of its own.

    arguments: the arguments of a kernel, arrays in NumPy. problem: the same for the oracle.
    """

    arguments: Mapping[str, Any]
    problem: Problem

    def floats(self) -> dict[str, Array]:
        """Return the float arrays of the call by name, which have gradients."""
        return {name: self.arguments[name] for name in FLOATS if self.arguments.get(name) is not None}


def draw_inputs(arguments: Mapping[str, Any], seed: int) -> Drawn:
    """Return a call with normal numbers in place of its float arrays.

    arguments: those of `attest.flash_attention`, with one batch dimension.

    Raises: NotJudgedError for a call whose arithmetic is not declared, or that the oracle does not support.
    """
    for name in _FIXED:
        if arguments.get(name) is not None:
            raise NotJudgedError(f"{name}: nobody declares the arithmetic of {arguments[name]!r}")
    stream = np.random.default_rng(seed)
    drawn: dict[str, Any] = {}
    for name, x in arguments.items():
        if x is None or name in _FIXED:
            continue
        if name in FLOATS:
            scale = _LARGE if name == "query" and stream.integers(3) == 0 else 1.0
            drawn[name] = _normal(stream, scale, x.shape, x.dtype)
        else:
            drawn[name] = np.asarray(x) if hasattr(x, "shape") else x
    return Drawn(drawn, _problem(drawn))


def _normal(stream: np.random.Generator, scale: float, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return normal numbers times scale. Production calls have hundreds of millions, so all cores draw."""
    drawn = np.empty(math.prod(shape), dtype)
    pieces = [drawn[start : start + _PIECE] for start in range(0, len(drawn), _PIECE)]

    def fill(piece: Array, own: np.random.Generator) -> None:
        piece[:] = own.standard_normal(len(piece), np.float32) * np.float32(scale)

    with ThreadPoolExecutor() as threads:
        list(threads.map(fill, pieces, stream.spawn(len(pieces))))
    return drawn.reshape(shape)


def _problem(arguments: Mapping[str, Any]) -> Problem:
    given = dict(arguments)
    offset = given.get("q_offset")
    if isinstance(offset, np.ndarray) and offset.shape == (1,):
        given["q_offset"] = int(offset[0])
    for name, x in given.items():
        if isinstance(x, np.ndarray) and x.dtype == np.int64 and name.startswith("cum_seqlens"):
            given[name] = x.astype(np.int32)
    if "origin" in given:
        given["origin"] = tuple(int(x) for x in given["origin"])
    try:
        return make_problem(given.pop("query"), given.pop("key"), given.pop("value"), **given)
    except (TypeError, ValueError) as error:
        raise NotJudgedError(f"the oracle does not take the call: {error}") from error
