"""The functions of jax.lax that the kernel uses, as loops of Python over NumPy arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def fori_loop(start: Any, stop: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """Call body(i, state) for each i."""
    for i in range(int(start), int(stop)):
        state = body(np.int32(i), state)
    return state


def map(function: Callable[[Any], Any], places: Any) -> Any:
    """Return function(place) of each place, stacked."""
    return _stacked([function(place) for place in places])


def scan(body: Callable[[Any, Any], tuple[Any, Any]], state: Any, places: Any) -> tuple[Any, Any]:
    """Return the state carried along the places, and what each gives, stacked."""
    given: list[Any] = []
    for place in places:
        state, each = body(state, place)
        given.append(each)
    return state, _stacked(given)


def dynamic_slice(array: Any, starts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return a slice, at starts that are moved into the array as JAX moves them."""
    return array[_window(array, starts, sizes)]


def dynamic_update_slice(array: Any, update: Any, starts: Sequence[Any]) -> Any:
    """Return a copy of the array with a slice replaced."""
    changed = array.copy()
    changed[_window(array, starts, update.shape)] = update
    return changed


def optimization_barrier(x: Any) -> Any:
    """Return x: nothing is optimized here."""
    return x


def _window(array: Any, starts: Sequence[Any], sizes: Sequence[int]) -> tuple[slice, ...]:
    moved = [
        min(max(int(start), 0), length - size)
        for start, size, length in zip(starts, sizes, array.shape, strict=True)
    ]
    return tuple(slice(start, start + size) for start, size in zip(moved, sizes, strict=True))


def _stacked(given: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *given)
