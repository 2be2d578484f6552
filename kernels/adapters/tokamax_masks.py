"""The masks of tokamax as arguments of `attest.flash_attention`.

tokamax says who sees whom by a boolean mask, causal masks with an offset and a window, and the first and last
row of a key and key of a row. Order, windows and ranges stay such, so that kernels skip blocks; only what
differs between heads, or compares indices that are given, becomes a boolean mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.call.arrays import as_int32, between, check_is_array, is_integer
from attest.kernels.call.options import check_integer, refuse

_INT32 = np.iinfo(np.int32)
# Indices are less far from 0, and no two of them are as far apart as an offset may be. Sums fit into int32.
_FARTHEST = 2**29
_LARGEST_OFFSET = 2**30
_FIELDS = ("q_start", "q_end", "k_start", "k_end")


@dataclass(frozen=True)
class Band:
    """A causal mask: the row at i sees the keys at j with i + offset - window_size < j <= i + offset."""

    offset: Any = 0
    window_size: Any = None


@dataclass(frozen=True)
class Limit:
    """A bound of rows or keys, under the name that the caller gave it.

    `q_start`: the row at i sees the key with the bound x only if i >= x; `q_end`: i < x; x is [*#B, #H, #Sk].
    `k_start`: the row with the bound x sees the key at j only if j >= x; `k_end`: j < x; x is [*#B, #H, #Sq].
    """

    kind: str
    name: str
    bound: Any


@dataclass(frozen=True)
class Indices:
    """The indices of rows and of keys, [*#B, #H, Sq] and [*#B, #H, Sk]; None where they count from 0."""

    q: Any = None
    k: Any = None


def conditions_of(mask: Any) -> tuple[Any, list[Band], list[Limit]]:
    """Return the boolean mask, the causal masks and the limits of a mask of tokamax, or of an array.

    The objects `Mask` and `CausalMask` are told by their fields, so that tokamax need not be installed.

    Raises: ValueError for what is none of these.
    """
    if mask is None:
        return None, [], []
    if all(hasattr(mask, name) for name in ("bool_mask", "causal_mask", *_FIELDS)):
        bounds = [(name, getattr(mask, name)) for name in _FIELDS]
        bands = [] if mask.causal_mask is None else [_band(mask.causal_mask)]
        return (
            mask.bool_mask,
            bands,
            [Limit(x, f"mask.{x}", bound) for x, bound in bounds if bound is not None],
        )
    if hasattr(mask, "offset") and hasattr(mask, "window_size"):
        return None, [_band(mask)], []
    if not isinstance(mask, jax.Array | np.ndarray):
        refuse("mask", f"a {type(mask).__name__}", "an array, a Mask or a CausalMask", "Convert it with jnp.")
    return mask, [], []


def arguments(
    query: Any, key: Any, mask: Any, bands: Sequence[Band], limits: Sequence[Limit], indices: Indices
) -> dict[str, Any]:
    """Return the arguments of `attest.flash_attention` that show the pairs which all conditions show.

    query [*B, Sq, Hq, D]; key [*B, Sk, Hkv, D]; mask [*#B, #Hq, #Sq, #Sk] bool. Every axis marked with # may
    be 1, and the first ones may be left out.

    Raises: ValueError naming the argument that does not fit.
    """
    grid = _grid(query, key)
    q, k = (
        grid.indices("q_indices", indices.q, grid.q_length),
        grid.indices("k_indices", indices.k, grid.k_length),
    )
    given: dict[str, Any] = {}
    pairs: list[jax.Array] = [] if mask is None else [grid.pairs("mask", mask)]
    ranges = _Ranges(grid)
    for limit in limits:
        bound = grid.bound(limit)
        if limit.kind in ("k_start", "k_end") and k is None and bound.shape[-2] == 1:
            ranges.limit(limit.kind, bound[..., 0, :])
            continue
        if limit.kind in ("q_start", "q_end"):
            seen = _compare(limit.kind, grid.rows(q), bound[..., None, :])
            if seen.shape[-3] == seen.shape[-1] == 1:
                ranges.hide_rows(seen[..., 0, :, 0])
                continue
        else:
            seen = _compare(limit.kind, grid.keys(k), bound[..., None])
        pairs.append(seen)
    if bands:
        given |= _order(grid, bands, q, k, pairs, ranges)
    if pairs:
        given["attention_mask"] = reduce(jnp.logical_and, pairs)
    return given | ranges.arguments()


def all_axes(name: str, mask: Any, query: Any, key: Any) -> jax.Array:
    """Return a boolean mask [*#B, #Hq, #Sq, #Sk] of a call with all its axes; the first may be left out.

    Raises: ValueError naming the mask.
    """
    return _grid(query, key).pairs(name, mask)


def _grid(query: Any, key: Any) -> "_Grid":
    return _Grid(tuple(query.shape[:-3]), query.shape[-2], query.shape[-3], key.shape[-3])


@dataclass(frozen=True)
class _Grid:
    """The sizes of a call. Masks are brought to them: all axes are there, and each is full or 1."""

    leading: tuple[int, ...]
    heads: int
    q_length: int
    k_length: int

    def pairs(self, name: str, x: Any) -> jax.Array:
        """Return a boolean mask with all axes."""
        check_is_array(name, x)
        if x.dtype != np.bool_:
            refuse(name, f"dtype {x.dtype}", "bool", "Pass mask != 0.")
        return self._full(name, x, (self.heads, self.q_length, self.k_length))

    def bound(self, limit: Limit) -> jax.Array:
        """Return a bound [*#B, #H, #length]; one that no index reaches is at the end of them."""
        length = self.k_length if limit.kind in ("q_start", "q_end") else self.q_length
        _check_integers(limit.name, limit.bound)
        bound = between(limit.bound, _INT32.min, _INT32.max)
        return self._full(limit.name, bound, (self.heads, length))

    def indices(self, name: str, x: Any, length: int) -> jax.Array | None:
        """Return indices [*#B, #H, length], or None."""
        if x is None:
            return None
        _check_integers(name, x)
        if not isinstance(x, Tracer):
            _check_near(name, np.asarray(x))
        x = self._full(name, between(x, -_FARTHEST, _FARTHEST), (self.heads, length))
        if x.shape[-1] != length:
            refuse(name, f"shape {x.shape}", f"{length} indices on the last axis", "Give every token one.")
        return x

    def rows(self, q: jax.Array | None) -> jax.Array:
        """Return the index of each row, [*#B, #H, Sq, 1]."""
        return self._counted(self.q_length)[..., None] if q is None else q[..., None]

    def keys(self, k: jax.Array | None) -> jax.Array:
        """Return the index of each key, [*#B, #H, 1, Sk]."""
        return (self._counted(self.k_length) if k is None else k)[..., None, :]

    def _counted(self, length: int) -> jax.Array:
        return jnp.arange(length, dtype=jnp.int32).reshape((1,) * (len(self.leading) + 1) + (length,))

    def _full(self, name: str, x: Any, behind: tuple[int, ...]) -> jax.Array:
        check_is_array(name, x)
        whole = (*self.leading, *behind)
        shape = (1,) * (len(whole) - x.ndim) + tuple(x.shape)
        if len(shape) > len(whole) or any(a not in (1, b) for a, b in zip(shape, whole, strict=True)):
            expected = f"{whole}, each axis full or 1, of which the first may be left out"
            refuse(name, f"shape {tuple(x.shape)}", expected, "Give it the batch dimensions of query.")
        return jnp.asarray(x).reshape(shape)


class _Ranges:
    """The first key and the key after the last one that each row sees, [*#B, Sq], as far as limited."""

    def __init__(self, grid: _Grid) -> None:
        self._grid = grid
        self._start: jax.Array | None = None
        self._end: jax.Array | None = None

    def limit(self, kind: str, bound: jax.Array) -> None:
        """Apply a `k_start` or a `k_end` [*#B, #Sq]."""
        bound = jnp.broadcast_to(bound, (*bound.shape[:-1], self._grid.q_length))
        if kind == "k_start":
            self._start = bound if self._start is None else jnp.maximum(self._start, bound)
        else:
            self._end = bound if self._end is None else jnp.minimum(self._end, bound)

    def hide_rows(self, seen: jax.Array) -> None:
        """Leave no key to the rows that are not seen, [*#B, Sq] bool."""
        self.limit("k_end", jnp.where(seen, jnp.int32(self._grid.k_length), jnp.int32(0)))

    def arguments(self) -> dict[str, Any]:
        given = {"kv_start": self._start, "kv_end": self._end}
        return {name: x for name, x in given.items() if x is not None}


def _order(
    grid: _Grid,
    bands: Sequence[Band],
    q: jax.Array | None,
    k: jax.Array | None,
    pairs: list[jax.Array],
    ranges: _Ranges,
) -> dict[str, Any]:
    """Return causal order and window of several causal masks; what has no such form is added to `pairs`."""
    offset, lowest = _together(bands)
    window = None if lowest is None else offset - lowest
    per_head = any(x is not None and x.shape[-2] != 1 for x in (q, k))
    if per_head or not (window is None or isinstance(window, int)):
        rows, keys = grid.rows(q), grid.keys(k)
        pairs.append(keys <= rows + offset)
        if lowest is not None:
            pairs.append(keys > rows + lowest)
        return {}
    given: dict[str, Any] = {"causal": True}
    if window is not None and window < 1:
        ranges.limit("k_end", jnp.zeros((1,) * (len(grid.leading) + 1), jnp.int32))
    elif window is not None:
        given["sliding_window"] = (window - 1, None)
    if q is None:
        given["q_offset"] = offset
    else:
        given["q_positions"] = q[..., 0, :] + offset
    if k is not None:
        given["kv_positions"] = k[..., 0, :]
    return given


def _together(bands: Sequence[Band]) -> tuple[Any, Any]:
    """Return the offset of all causal masks at once, and the highest of what the keys of each lie above.

    Both are limited to what the differences of indices reach.
    """
    offsets = [_limited(band.offset) for band in bands]
    lowest = [
        _limited(_minus(band.offset, band.window_size)) for band in bands if band.window_size is not None
    ]
    if all(isinstance(x, int) for x in offsets + lowest):
        return min(offsets), max(lowest, default=None)
    return reduce(jnp.minimum, offsets), reduce(jnp.maximum, lowest) if lowest else None


def _band(mask: Any) -> Band:
    """Return a causal mask whose numbers are Python ints, or int32 scalars of JAX where they are arrays."""
    numbers = {"offset": mask.offset, "window_size": mask.window_size}
    for name, x in numbers.items():
        if isinstance(x, jax.Array):
            if x.shape != ():
                refuse(f"mask.{name}", f"shape {x.shape}", "one integer", "Use k_start and k_end for rows.")
            if not is_integer(x.dtype):
                refuse(f"mask.{name}", f"dtype {x.dtype}", "an integer dtype", "Convert it with astype.")
            numbers[name] = as_int32(f"mask.{name}", "values", x, "Leave out what hides nothing.")
        elif x is not None or name == "offset":
            numbers[name] = check_integer(f"mask.{name}", x)
    return Band(**numbers)


def _limited(x: Any) -> Any:
    """Return an offset, as far as one makes a difference."""
    if isinstance(x, int):
        return max(-_LARGEST_OFFSET, min(x, _LARGEST_OFFSET))
    return jnp.clip(x, -_LARGEST_OFFSET, _LARGEST_OFFSET)


def _minus(x: Any, y: Any) -> Any:
    """Return x - y of ints, or of an int32 scalar of JAX and another or an int, limited to int32."""
    if isinstance(x, int) and isinstance(y, int):
        return x - y
    x, y = (jnp.int32(max(_INT32.min, min(n, _INT32.max))) if isinstance(n, int) else n for n in (x, y))
    limit = jnp.where(x < y, jnp.int32(_INT32.min), jnp.int32(_INT32.max))
    return jnp.where((x < y) == (x - y < 0), x - y, limit)


def _check_integers(name: str, x: Any) -> None:
    check_is_array(name, x)
    if not is_integer(x.dtype):
        refuse(name, f"dtype {x.dtype}", "an integer dtype", "Convert it with astype(jnp.int32).")


def _check_near(name: str, indices: np.ndarray) -> None:
    low, high = (int(indices.min()), int(indices.max())) if indices.size else (0, 0)
    if low < -_FARTHEST or high > _FARTHEST:
        refuse(name, f"values from {low} to {high}", "indices in [-2**29, 2**29]", "Count from nearer.")


def _compare(kind: str, index: jax.Array, bound: jax.Array) -> jax.Array:
    return index >= bound if kind.endswith("start") else index < bound
