"""Calls with any number of batch dimensions, as calls with one (S27).

`fold` turns the arrays [..., S, H, D] of a call into a four-dimensional Problem; what it returns turns
cotangents into those of the Problem, and answers back into the shapes of the call.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.reference.oracle import Answer, Cotangents
from attest.reference.problem import Problem, make_problem

Array = NDArray[Any]

# The axes of an argument beside its batch dimensions. Other arguments have no batch dimensions.
BATCHED = {
    "query": 3,
    "key": 3,
    "value": 3,
    "attention_mask": 3,
    "bias": 3,
    "q_segment_ids": 1,
    "kv_segment_ids": 1,
    "q_positions": 1,
    "kv_positions": 1,
    "kv_start": 1,
    "kv_end": 1,
    "alibi_slopes": 1,
}
# Those whose batch dimensions may be 1 where the query's are not.
_BROADCAST = frozenset(
    {"attention_mask", "bias", "q_positions", "kv_positions", "kv_start", "kv_end", "alibi_slopes"}
)


@dataclass(frozen=True)
class Folded:
    """A call with one batch dimension, and the batch dimensions that it had.

    bias: the shape of the bias in the call, or None without one.
    """

    problem: Problem
    batch: tuple[int, ...]
    bias: tuple[int, ...] | None

    def cotangents(self, out: Array, lse: Array | None = None) -> Cotangents:
        """Return the Problem's cotangents for those of the call: out [..., Sq, Hq, Dv], lse [..., Hq, Sq].

        Raises ValueError if their batch dimensions are not the query's.
        """
        return Cotangents(
            _flat("cotangents.out", out, self.batch, 3),
            None if lse is None else _flat("cotangents.lse", lse, self.batch, 2),
        )

    def unfold(self, answer: Answer) -> Answer:
        """Return an answer to the Problem, or part of one, in the shapes of the call."""
        arrays = {
            name: array if name in ("dbias", "dsoftmax_aux") else array.reshape(*self.batch, *array.shape[1:])
            for name, array in answer.items().items()
        }
        if answer.dbias is not None and self.bias is not None:
            shared = len(answer.dbias) != prod(self.bias[:-3])
            d_bias = answer.dbias.reshape(
                *(self.batch if shared else self.bias[:-3]), *answer.dbias.shape[1:]
            )
            summed = tuple(axis for axis, size in enumerate(self.bias[:-3]) if shared and size == 1)
            arrays["dbias"] = d_bias.sum(axis=summed, keepdims=True)
        return replace(answer, **arrays)


def fold(query: Array, key: Array, value: Array, **options: Any) -> Folded:
    """Return the four-dimensional call that equals a call with any number of batch dimensions.

    query [..., Sq, Hq, D], key [..., Sk, Hkv, D], value [..., Sk, Hkv, Dv]: the dots are the batch
    dimensions, the same in all three, or none for a batch of one. attention_mask and bias [..., heads, rows,
    keys], positions and ranges [..., S] have as many, each of which may be 1; segment ids [..., S] have the
    same. A `q_offset` is an integer or has the shape of the batch dimensions; beside packed lengths, [n].
    `alibi_slopes` [..., Hq] may have none of the dimensions, or 1 for any of them.
    Other options are those of `make_problem`: lengths, and the first number of an origin, count batch
    entries in the order of the array's elements.

    Raises ValueError and TypeError as `make_problem` does.
    """
    batch = query.shape[:-3]
    given = {"query": query, "key": key, "value": value} | options
    folded = {
        name: _flat(name, array, batch, BATCHED[name])
        if name in BATCHED and isinstance(array, np.ndarray) and not _of_heads(name, array)
        else array
        for name, array in given.items()
    }
    offset = options.get("q_offset")
    if isinstance(offset, np.ndarray) and offset.ndim and options.get("cum_seqlens_q") is None:
        folded["q_offset"] = _flat("q_offset", offset, batch, 0)
    bias = options.get("bias")
    return Folded(make_problem(**folded), batch, None if bias is None else bias.shape)


def _of_heads(name: str, array: Array) -> bool:
    """Return whether an argument has an axis of heads and no batch dimensions."""
    return name == "alibi_slopes" and array.ndim == 1


def _flat(name: str, array: Array, batch: tuple[int, ...], axes: int) -> Array:
    """Return an array with its batch dimensions, which precede so many axes, made one."""
    own, rest = array.shape[: max(array.ndim - axes, 0)], array.shape[max(array.ndim - axes, 0) :]
    broadcast = name in _BROADCAST
    fits = array.ndim == len(batch) + axes and all(
        got == want or (broadcast and got == 1) for got, want in zip(own, batch, strict=True)
    )
    if not fits:
        expected = f"batch dimensions {batch}{', each of which may be 1,' * broadcast} and {axes} axes more"
        raise ValueError(f"{name}: got shape {array.shape}, expected {expected}")
    if prod(own) == 1:
        return array.reshape(1, *rest)
    return np.broadcast_to(array, (*batch, *rest)).reshape(prod(batch), *rest)
