"""The implementations that compute a call the fastest, with and without gradients, by measured calls.

`choices.toml` has the times of our implementations on a device. A call is looked up among the measured ones
of the same features: the nearest one decides, if it is near enough on every axis. Without such a call the
order of `attest.kernels.implementations` holds, and so it does where the difference is small.
"""

import math
import tomllib
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from attest.kernels.arguments import AttentionArguments

TABLE = Path(__file__).parent / "choices.toml"


class Sizes(NamedTuple):
    """The sizes and features of a call, on which its time depends on a given device.

    bytes: of an element of query. heads: batch entries times query heads. queries: of an entry. keys: that a
    query may see by its window and chunk, at most. width: head dim of key and of value, added. group: query
    heads on a key head. features: the names of those that are on, in order.
    """

    bytes: int
    heads: int
    queries: int
    keys: int
    width: int
    group: float
    features: tuple[str, ...]


class Winners(NamedTuple):
    """The names of the implementations that run a call.

    alone: where no gradients are taken. followed: where they are.
    """

    alone: str
    followed: str


def sizes_of(given: AttentionArguments, dropout: bool) -> Sizes | None:
    """Return the sizes of a call with one batch dimension; None for a kind of call that was not measured.

    dropout: whether pairs are dropped. A malformed argument gives None, too: the call's checks refuse it.
    """
    query, key, value = map(_array, (given.query, given.key, given.value))
    if query is None or key is None or value is None or given.normalize_output is not True:
        return None
    spans = _spans(given)
    if spans is None or given.precision is not None or given.logits_dtype is not None:
        return None
    found = _features(given) | ({"dropout"} if dropout else set())
    batch, queries, q_heads, head_dim = query.shape
    keys, k_heads = key.shape[1:3]
    return Sizes(
        bytes=query.dtype.itemsize,
        heads=batch * q_heads,
        queries=queries,
        keys=min([keys, *spans]),
        width=head_dim + value.shape[3],
        group=q_heads / k_heads,
        features=tuple(sorted(found)),
    )


def _features(given: AttentionArguments) -> set[str]:
    """Return the names of the features that a call switches on."""
    segments = given.q_segment_ids is not None or given.kv_segment_ids is not None
    lengths = given.cum_seqlens_q is not None or given.cum_seqlens_k is not None
    positions = (given.q_offset, given.q_positions, given.kv_positions)
    switched = {
        "alibi": given.alibi_slopes is not None,
        "bias": given.bias is not None,
        "causal": given.causal is True,
        "chunk": given.chunk_size is not None,
        "dropout_shared": given.dropout_shared is not None,
        "lengths": lengths,
        "mask": given.attention_mask is not None,
        "positions": any(x is not None for x in positions),
        "ranges": given.kv_start is not None or given.kv_end is not None,
        "segments": segments,
        "sinks": given.softmax_aux is not None,
        "soft_cap": given.logits_soft_cap is not None,
        "window": given.sliding_window is not None,
    }
    return {name for name, on in switched.items() if on}


def _array(x: Any) -> jax.Array | np.ndarray[Any, Any] | None:
    """Return an array of four axes, none of them empty or symbolic; else None."""
    if not isinstance(x, jax.Array | np.ndarray) or x.ndim != 4:
        return None
    return x if all(isinstance(size, int) and size > 0 for size in x.shape) else None


def _spans(given: AttentionArguments) -> list[int] | None:
    """Return the number of keys that the window shows, and the chunk, if they bound it; None: malformed."""
    spans: list[int] = []
    window: Any = given.sliding_window
    chunk: Any = given.chunk_size
    sides: tuple[Any, ...] = window if isinstance(window, tuple) else (window, window)
    if len(sides) != 2 or not all(side is None or (isinstance(side, int) and side >= 0) for side in sides):
        return None
    if None not in sides:
        spans.append(sides[0] + sides[1] + 1)
    if chunk is not None:
        if not isinstance(chunk, int) or chunk < 1:
            return None
        spans.append(chunk)
    return spans


def winners(kind: str | None, sizes: Sizes, able: tuple[str, ...]) -> Winners:
    """Return the fastest implementations of a call on a kind of device, among those that are able to run it.

    kind: as JAX names it. able: their names in the default order, at least one.
    """
    default = Winners(able[0], able[0])
    return default if kind is None or len(able) == 1 else _looked_up(kind, sizes, able) or default


@lru_cache(maxsize=1 << 14)
def _looked_up(kind: str, sizes: Sizes, able: tuple[str, ...]) -> Winners | None:
    table = read(TABLE)
    rows = [row for row in table["calls"] if row["device"] == kind]
    distances = [_distance(sizes, row["sizes"], table["octaves"]) for row in rows]
    nearest = min(distances, default=math.inf)
    if nearest == math.inf:
        return None
    times = rows[distances.index(nearest)]["milliseconds"]
    by_direction = ({name: ms[i] for name, ms in times.items()} for i in range(2))
    return Winners(*(_winner(each, able, table["margin"]) for each in by_direction))


def _winner(times: Mapping[str, float], able: tuple[str, ...], margin: float) -> str:
    default = able[0]
    fastest = min((name for name in able if name in times), key=lambda name: times[name], default=default)
    if default not in times or times[fastest] > (1 - margin) * times[default]:
        return default
    return fastest


def _distance(sizes: Sizes, other: Sizes, octaves: Mapping[str, float]) -> float:
    """Return the distance of a call from a measured one; inf for other features, or too far on some axis."""
    if (sizes.features, sizes.bytes) != (other.features, other.bytes):
        return math.inf
    apart = [
        abs(math.log2(getattr(sizes, axis) / getattr(other, axis))) / limit for axis, limit in octaves.items()
    ]
    return math.inf if max(apart) > 1 else sum(x * x for x in apart)


@cache
def read(path: Path) -> dict[str, Any]:
    """Return the margin, the limits in octaves, and the measured calls with their `Sizes`."""
    table = tomllib.loads(path.read_text())
    for row in table["calls"]:
        sizes: dict[str, Any] = row["sizes"]
        sizes["features"] = tuple(sizes["features"])
        row["sizes"] = Sizes(**sizes)
    return table
