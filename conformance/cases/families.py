"""Families of values for queries, keys and values, each made to expose one kind of error.

All randomness is integers from Philox and exact arithmetic on them, so that the values are the same bit for
bit on every machine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Stream:
    """One reproducible stream of numbers, named by a seed of 64 bits and a number."""

    def __init__(self, seed: int, number: int) -> None:
        self._bits = np.random.Philox(key=np.array([seed, number], np.uint64))

    def uniform(self, shape: tuple[int, ...]) -> Floats:
        """Return float64 in [0, 1), multiples of 2^-53."""
        raw = self._bits.random_raw(int(np.prod(shape))).astype(np.uint64)
        return (raw >> np.uint64(11)).astype(np.float64).reshape(shape) * 2.0**-53

    def normal(self, shape: tuple[int, ...]) -> Floats:
        """Return float64 of mean 0 and variance 1, sums of twelve uniform numbers of 16 bits (within +-6)."""
        words = self._bits.random_raw(3 * int(np.prod(shape))).astype("<u8").view("<u2")
        return words.reshape(*shape, 12).astype(np.int64).sum(axis=-1) / 65536.0 - (6.0 - 6.0 / 65536.0)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Return int64 in [low, high)."""
        return low + np.floor(self.uniform(shape) * (high - low)).astype(np.int64)


@dataclass(frozen=True)
class Wanted:
    """The wanted arrays of a family: shapes [B, S, H, D], the scale and the cap that the logits will meet."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    scale: float
    soft_cap: float | None


Triple = tuple[Floats, Floats, Floats]

# The most negative logits stay above what float16 products of a head dim of 256 can hold.
_LOW_LOGIT = -120.0
_LARGEST_CAP_FACTOR = 64.0


def _normal(wanted: Wanted, q: Stream, k: Stream, v: Stream) -> Triple:
    return q.normal(wanted.query), k.normal(wanted.key), v.normal(wanted.value)


def _uniform(wanted: Wanted, q: Stream, k: Stream, v: Stream) -> Triple:
    """Return positive values everywhere, so that one key too many or too few shifts every output."""
    return q.uniform(wanted.query), k.uniform(wanted.key), v.uniform(wanted.value)


def _peaked(wanted: Wanted, q: Stream, k: Stream, v: Stream) -> Triple:
    """Return large logits: a few keys take all the weight."""
    query, key, value = _normal(wanted, q, k, v)
    return 8.0 * query, key, value


def _offset(wanted: Wanted, q: Stream, k: Stream, v: Stream) -> Triple:
    """Return a constant in V, which exposes an error of the normaliser and the accumulator's rounding."""
    query, key, value = _normal(wanted, q, k, v)
    return query, key, value + 64.0


def _outlier(wanted: Wanted, q: Stream, k: Stream, v: Stream) -> Triple:
    """Return one channel much larger than the others, as trained models have it."""
    query, key, value = _normal(wanted, q, k, v)
    query[..., 0] *= 8.0
    key[..., 0] *= 8.0
    value[..., 0] *= 32.0
    return query, key, value


def _integers(wanted: Wanted, q: Stream, k: Stream, v: Stream) -> Triple:
    """Return sparse small integers: every product and every sum of q.k is exact in every dtype."""

    def sparse(stream: Stream, shape: tuple[int, ...]) -> Floats:
        digits = stream.integers(-2, 3, shape).astype(np.float64)
        return np.where(stream.uniform(shape) < 0.5, digits, 0.0)

    return sparse(q, wanted.query), sparse(k, wanted.key), sparse(v, wanted.value)


def _ramp(wanted: Wanted, q: Stream, k: Stream, v: Stream, rising: bool) -> Triple:
    query, key, value = _normal(wanted, q, k, v)
    length = wanted.key[1]
    ramp = np.arange(length) / max(length, 1)
    along = ramp if rising else ramp[::-1]
    return 1.0 + 0.25 * query, 0.25 * key + 4.0 * along[None, :, None, None], value


def _growing(wanted: Wanted, q: Stream, k: Stream, v: Stream) -> Triple:
    """Return logits that grow along the keys: every block moves the row maximum."""
    return _ramp(wanted, q, k, v, rising=True)


def _shrinking(wanted: Wanted, q: Stream, k: Stream, v: Stream) -> Triple:
    """Return logits that shrink along the keys: the first block holds the row maximum."""
    return _ramp(wanted, q, k, v, rising=False)


def _low_lse(wanted: Wanted, q: Stream, k: Stream, v: Stream) -> Triple:
    """Return every logit below -88, where exp underflows in float32 unless the maximum is subtracted."""
    size = _LOW_LOGIT / (wanted.query[3] * abs(wanted.scale or 1.0))
    query = 1.0 + 0.25 * q.uniform(wanted.query)
    key = size * (1.0 + 0.25 * k.uniform(wanted.key))
    return query if wanted.scale > 0 else -query, key, v.normal(wanted.value)


def _huge(wanted: Wanted, q: Stream, k: Stream, v: Stream) -> Triple:
    """Return logits of hundreds in the first rows, below one in the last: row maxima may not be shared."""
    query, key, value = _normal(wanted, q, k, v)
    length = wanted.query[1]
    exponents = 7 - np.arange(length) * 10 // max(length, 1)
    return query * np.exp2(exponents)[None, :, None, None], key, value


def _cap_scaled(wanted: Wanted, q: Stream, k: Stream, v: Stream) -> Triple:
    """Return logits of the size of the soft cap, where tanh bends most."""
    query, key, value = _normal(wanted, q, k, v)
    return query * min(1.5 * (wanted.soft_cap or 1.0), _LARGEST_CAP_FACTOR), key, value


Family = Callable[[Wanted, Stream, Stream, Stream], Triple]

FAMILIES: dict[str, Family] = {
    "normal": _normal,
    "uniform": _uniform,
    "peaked": _peaked,
    "offset": _offset,
    "outlier": _outlier,
    "integers": _integers,
    "growing": _growing,
    "shrinking": _shrinking,
    "low_lse": _low_lse,
    "cap_scaled": _cap_scaled,
    "huge": _huge,
}


def usual_largest_logit(family: str, head_dim: int, scale: float) -> float:
    """Return the approximate largest logit of a row, before bias and cap."""
    spread = abs(scale) * sqrt(head_dim)
    along = {
        "peaked": 16.0 * spread,
        "outlier": 64.0 * abs(scale),
        "growing": max(4.0 * scale * head_dim, 0.0),
        "shrinking": max(4.0 * scale * head_dim, 0.0),
        "low_lse": 1.25 * _LOW_LOGIT if scale else 0.0,
        "cap_scaled": _LARGEST_CAP_FACTOR * spread,
    }
    return along.get(family, 2.0 * spread)
