"""Checks of what a MaskInfo is made of (clause S20). The sizes of a call are checked later, in `sizes`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.call.arrays import as_int32, between, broadcast, check_is_array, is_integer
from attest.kernels.call.options import check_integer, refuse
from attest.kernels.call.positions import Positions, check_positions
from attest.kernels.call.sequences import check_lengths, check_segments

# The axes of masks: batch, heads, queries and keys. "t" is the tokens of self-attention: queries and keys.
TOKENS = "bt"
_DEFAULT_AXES = {4: "bhqk", 3: "bqk", 2: TOKENS}
_AXES = ("bhqk", "bqk", "hqk", "qk", "bk", TOKENS)
# S23: the difference of two positions fits into 32 bits.
_FARTHEST = 2**30
_LONGEST = 2**31 - 1


def check_mask(mask: Any, axes: Any) -> tuple[jax.Array, bool]:
    """Return a mask as bool, and whether it is one of tokens.

    A mask of tokens is [B or 1, S]. Any other gets the four axes batch, heads, queries and keys, those that
    it lacks of size 1.
    """
    name = "attention_mask"
    check_is_array(name, mask)
    if mask.dtype != np.bool_ and not is_integer(mask.dtype):
        refuse(
            name,
            f"dtype {mask.dtype}",
            "bool or an integer dtype",
            "A mask of 0 and 1? Pass mask != 0. Values to add to the logits are a bias.",
        )
    if axes is None:
        axes = _DEFAULT_AXES.get(mask.ndim)
        if axes is None:
            refuse(name, f"shape {mask.shape}", "2 to 4 axes", "Name them with axes, as in axes='bhqk'.")
    if axes not in _AXES:
        refuse("axes", repr(axes), f"one of {', '.join(_AXES)}", "See MaskInfo.apply_attention_mask.")
    if mask.ndim != len(axes):
        refuse(name, f"shape {mask.shape}", f"{len(axes)} axes, {axes}", "Name the axes that it has.")
    # Compared in its own dtype: a 64-bit mask narrowed first could lose its only set bit.
    visible = jnp.asarray(mask if mask.dtype == np.bool_ else mask != 0)
    if axes == TOKENS:
        return visible, True
    size = dict(zip(axes, mask.shape, strict=True))
    return visible.reshape([size.get(axis, 1) for axis in "bhqk"]), False


def check_ids(q_ids: Any, kv_ids: Any) -> tuple[jax.Array, jax.Array]:
    """Return segment ids as int32, [B or 1, Sq] and [B or 1, Sk]; without kv_ids they are those of q_ids."""
    kv_ids = q_ids if kv_ids is None else kv_ids
    pair = (("q_segment_ids", q_ids), ("kv_segment_ids", kv_ids))
    for name, ids in pair:
        _check_axes(name, ids, ("batch", "tokens"))
    batch = max(q_ids.shape[0], kv_ids.shape[0])
    for name, ids in pair:
        if ids.shape[0] not in (1, batch):
            refuse(
                name, f"shape {ids.shape}", f"batch 1 or {batch}", "Give both the batch of the call, or 1."
            )
    # Together they are renumbered where int32 does not hold them, so they need one batch.
    wide = [ids if ids.shape[0] == batch else broadcast(ids, (batch, ids.shape[1])) for _, ids in pair]
    found = check_segments(wide[0], wide[1], batch, q_ids.shape[1], kv_ids.shape[1])
    assert found[0] is not None
    assert found[1] is not None
    return found[0], found[1]


def check_cumulative(cum_q: Any, cum_k: Any, padded: bool) -> tuple[jax.Array, jax.Array]:
    """Return cumulative lengths as int32 [n + 1]; without cum_k they are those of cum_q."""
    cum_k = cum_q if cum_k is None else cum_k
    _check_axes("cum_seqlens_q", cum_q, ("sequences + 1",))
    batch = cum_q.shape[0] - 1 if padded else 1
    found = check_lengths(cum_q, cum_k, batch, _LONGEST, _LONGEST)
    assert found[0] is not None
    assert found[1] is not None
    return found[0], found[1]


def check_kv_lengths(lengths: Any) -> jax.Array:
    """Return how many keys each batch entry has, as int32 [B or 1]."""
    name = "kv_lengths"
    advice = "Pass an int, or an integer array [B], one length for each batch entry."
    if not isinstance(lengths, jax.Array | np.ndarray):
        lengths = np.array([check_integer(name, lengths, advice)], dtype=object)
    elif not is_integer(lengths.dtype):
        refuse(name, f"dtype {lengths.dtype}", "an integer dtype", advice)
    if lengths.ndim == 0:
        lengths = lengths.reshape(1)
    if lengths.ndim != 1:
        refuse(name, f"shape {lengths.shape}", "[B] or [1]", advice)
    if not isinstance(lengths, Tracer):
        known = np.asarray(lengths)
        if (known < 0).any():
            refuse(name, int(known.min()), "lengths of 0 and more", "An entry with no keys has length 0.")
    return as_int32(name, "lengths", lengths, advice)


def check_end(name: str, ends: Any, before: jax.Array | None) -> jax.Array | None:
    """Return one side of the ranges of keys as int32 [B or 1, Sq]; before: what it is combined with."""
    if ends is None:
        return None
    _check_axes(name, ends, ("batch", "queries"))
    if not is_integer(ends.dtype):
        refuse(name, f"dtype {ends.dtype}", "an integer dtype", "Give one index of a key for each row.")
    if before is not None:
        (batch, length), known = ends.shape, before.shape
        if length != known[1] or len({batch, known[0], 1}) > 2:
            refuse(name, f"shape {ends.shape}", f"the batch or 1, and {known[1]} rows", f"It was {known}.")
    # An index beyond all keys is as good as their end.
    return between(ends, 0, _LONGEST)


def check_places(q_positions: Any, kv_positions: Any, q_offset: Any) -> Positions:
    """Return positions as int32, [B or 1, Sq] and [B or 1, Sk], and the offset as [1], [B] or [n] (S23)."""
    shapes: list[tuple[int, ...]] = []
    for name, positions in (("q_positions", q_positions), ("kv_positions", kv_positions)):
        if positions is not None:
            _check_axes(name, positions, ("batch", "tokens"))
            _check_near(name, positions)
        shapes.append((1, 0) if positions is None else positions.shape)
    if isinstance(q_offset, np.ndarray | jax.Array):
        _check_near("q_offset", q_offset)
        sequences = q_offset.size
    else:
        sequences = 1
        if q_offset is not None:
            advice = "Pass an int, or an integer array, one offset for each batch entry or sequence."
            _check_reach("q_offset", np.array(check_integer("q_offset", q_offset, advice), dtype=object))
    (q_batch, q_length), (k_batch, k_length) = shapes
    batch = max(q_batch, k_batch)
    return check_positions(
        q_offset,
        q_positions,
        kv_positions,
        None,
        sequences=sequences,
        batch=batch,
        q_length=q_length,
        k_length=k_length,
    )


def _check_axes(name: str, x: Any, axes: tuple[str, ...]) -> None:
    check_is_array(name, x)
    if x.ndim != len(axes):
        refuse(name, f"shape {x.shape}", f"[{', '.join(axes)}]", "Add the axes that are missing, of size 1.")


def _check_near(name: str, positions: Any) -> None:
    if isinstance(positions, Tracer) or positions.size == 0:
        return
    if not is_integer(positions.dtype):
        refuse(name, f"dtype {positions.dtype}", "an integer dtype", "Give one integer per token.")
    _check_reach(name, np.asarray(positions))


def _check_reach(name: str, known: np.ndarray) -> None:
    low, high = known.min(), known.max()
    if low < -_FARTHEST or high >= _FARTHEST:
        refuse(name, f"values from {low} to {high}", "positions in [-2**30, 2**30)", "Count from nearer.")
