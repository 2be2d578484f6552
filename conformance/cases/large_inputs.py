"""Values for problems of production size: ordinary ones, a billion in a few seconds.

Sixteen bits from Philox choose each element from a table of 65,536 normal numbers, so that no array of a
wider type is ever made. The values are the same bit for bit on every machine.
"""

from functools import cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.conformance.cases.axes import MASK_AXES
from attest.conformance.cases.build import DTYPES, assemble
from attest.conformance.cases.case import Case
from attest.conformance.cases.families import Stream
from attest.reference.problem import Problem

Array = NDArray[Any]

# Far from the numbers of the streams of attest.conformance.cases.build.
_STREAMS = {"table": 1000, "query": 1001, "key": 1002, "value": 1003, "mask": 1004}
_VISIBLE_OF_256 = 192
_WORDS_AT_A_TIME = 1 << 22


def build_bulk(case: Case) -> Problem:
    """Return the problem of a case of the family normal. Raises ValueError for what only small cases have."""
    only_small = {
        "family": case.family != "normal",
        "bias": case.bias is not None,
        "mask": case.mask not in (None, *MASK_AXES),
        "integer_mask": case.integer_mask,
        "empty_rows": case.empty_rows,
        "poison": case.poison,
    }
    for name, got in only_small.items():
        if got:
            expected = f"{Case.__dataclass_fields__[name].default!r} at production size"
            raise ValueError(f"case field {name}: got {getattr(case, name)!r}, expected {expected}")
    rows, keys = (case.batch, case.q_len), (case.batch, case.kv_len)
    return assemble(
        case,
        _normal(case, "query", (*rows, case.q_heads, case.head_dim)),
        _normal(case, "key", (*keys, case.kv_heads, case.head_dim)),
        _normal(case, "value", (*keys, case.kv_heads, case.value_width)),
        _mask(case),
    )


def _normal(case: Case, name: str, shape: tuple[int, ...]) -> Array:
    table = _table(case.dtype)
    values = np.empty(prod(shape), table.dtype)
    bits = _bits(case, name)
    for start in range(0, len(values), 4 * _WORDS_AT_A_TIME):
        part = values[start : start + 4 * _WORDS_AT_A_TIME]
        part[:] = table[_raw(bits, len(part), "<u2")]
    return values.reshape(shape)


def _mask(case: Case) -> Array | None:
    if case.mask is None:
        return None
    batch, heads = ((1, case.batch), (1, case.q_heads))
    both = MASK_AXES.index(case.mask)
    shape = (batch[both >> 1], heads[both & 1], case.q_len, case.kv_len)
    mask = np.empty(prod(shape), bool)
    bits = _bits(case, "mask")
    for start in range(0, len(mask), 8 * _WORDS_AT_A_TIME):
        part = mask[start : start + 8 * _WORDS_AT_A_TIME]
        part[:] = _raw(bits, len(part), "u1") < _VISIBLE_OF_256
    return mask.reshape(shape)


@cache
def _table(dtype: str) -> Array:
    """Return one table for all seeds."""
    return Stream(0, _STREAMS["table"]).normal((1 << 16,)).astype(DTYPES[dtype])


def _bits(case: Case, name: str) -> np.random.Philox:
    return np.random.Philox(key=np.array([case.seed, _STREAMS[name]], np.uint64))


def _raw(bits: np.random.Philox, count: int, kind: str) -> Array:
    """Return the next numbers of a width, from as many 64-bit words as hold them."""
    words = bits.random_raw(-(-count * np.dtype(kind).itemsize // 8))
    return words.astype("<u8").view(kind)[:count]
