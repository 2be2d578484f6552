"""Masks of tokamax for the tests of its adapter: strategies, and what they make visible."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

B, SQ, SK, HQ = 2, 5, 7, 4


@dataclass
class CausalMask:
    """The fields of tokamax's class of this name; tests/peer_suites runs the adapter on the real ones."""

    offset: Any = 0
    window_size: Any = None


@dataclass
class Mask:
    bool_mask: Any = None
    causal_mask: Any = None
    q_start: Any = None
    q_end: Any = None
    k_start: Any = None
    k_end: Any = None


def visible(mask: Mask, q_indices: Any = None, k_indices: Any = None) -> np.ndarray:
    """Who sees whom, [B, HQ, SQ, SK], by the words of tokamax's documentation."""
    q = np.arange(SQ) if q_indices is None else np.asarray(q_indices)
    k = np.arange(SK) if k_indices is None else np.asarray(k_indices)
    q, k = q[..., :, None], k[..., None, :]
    seen = np.ones((B, HQ, SQ, SK), bool)
    if mask.bool_mask is not None:
        seen = seen & np.asarray(mask.bool_mask)
    if mask.causal_mask is not None:
        offset, window = int(mask.causal_mask.offset), mask.causal_mask.window_size
        seen = seen & (k <= q + offset)
        if window is not None:
            seen = seen & (k > q + offset - int(window))
    for name, index, axis in (("q_start", q, -2), ("k_start", k, -1)):
        if getattr(mask, name) is not None:
            seen = seen & (index >= np.expand_dims(np.asarray(getattr(mask, name)), axis))
    for name, index, axis in (("q_end", q, -2), ("k_end", k, -1)):
        if getattr(mask, name) is not None:
            seen = seen & (index < np.expand_dims(np.asarray(getattr(mask, name)), axis))
    return seen


@st.composite
def arrays_of(draw: Any, sizes: tuple[int, ...], low: int, high: int, *, full_last: bool = False) -> Any:
    """Integers whose axes are full or 1, of which the first may be left out."""
    shape = [draw(st.sampled_from((size, 1))) for size in sizes]
    if full_last:
        shape[-1] = sizes[-1]
    shape = shape[draw(st.integers(0, len(sizes) - 1)) :]
    return np.random.default_rng(draw(st.integers(0, 2**32))).integers(low, high + 1, shape, np.int32)


@st.composite
def causal_masks(draw: Any) -> CausalMask:
    mask = CausalMask(draw(st.integers(-4, 8)), draw(st.none() | st.integers(0, 8)))
    if draw(st.booleans()):
        mask.offset = jnp.int32(mask.offset)
    if mask.window_size is not None and draw(st.booleans()):
        mask.window_size = jnp.int32(mask.window_size)
    return mask


@st.composite
def masks(draw: Any) -> Mask:
    """Masks of at most two kinds of conditions: more would hide nearly all, and what is wrong in each."""
    kinds = draw(st.sets(st.integers(0, 5), max_size=2))

    def some(kind: int, strategy: Any) -> Any:
        return draw(strategy) if kind in kinds else None

    pairs = some(0, arrays_of((B, HQ, SQ, SK), 0, 1))
    while pairs is not None and pairs.ndim < 2:
        pairs = pairs[None]
    return Mask(
        None if pairs is None else pairs.astype(bool),
        some(1, causal_masks()),
        some(2, arrays_of((B, HQ, SK), -1, 4)),
        some(3, arrays_of((B, HQ, SK), 1, 6)),
        some(4, arrays_of((B, HQ, SQ), -1, 5)),
        some(5, arrays_of((B, HQ, SQ), 2, 9)),
    )
