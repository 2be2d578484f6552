"""Masks, lengths and windows of ONNX's `Attention` as arguments of ours."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.adapters.shared import as_pairs, counts
from attest.kernels.call.arrays import check_is_array
from attest.kernels.call.options import check_integer, refuse


def mask_arguments(mask: Any, keys: int, cap: float | None) -> dict[str, Any]:
    """Return `attn_mask` as a mask or a bias of ours; keys past its end are hidden.

    Raises: ValueError naming it; NotImplementedError for values to add after a cap.
    """
    if mask is None:
        return {}
    check_is_array("attn_mask", mask)
    is_bool = mask.dtype == np.bool_
    if not (is_bool or jnp.issubdtype(mask.dtype, jnp.floating)):
        refuse(
            "attn_mask", f"dtype {mask.dtype}", "bool or a float dtype", "Pass attn_mask != 0, or cast it."
        )
    if mask.ndim == 0 or mask.shape[-1] > keys or (mask.shape[-1] == 1 and keys > 1):
        # ONNX's text would broadcast a last axis of 1, and its reference fills it up.
        expected = f"a last axis of {keys} keys, or of fewer but more than 1"
        refuse("attn_mask", f"shape {mask.shape}", expected, "Repeat it, or fill it up with -inf or False.")
    if not is_bool and cap is not None:
        mask, is_bool = _only_hiding(mask), True
    filled = as_pairs("attn_mask", mask, 4)
    if missing := keys - filled.shape[-1]:
        hidden = False if is_bool else -jnp.inf
        filled = jnp.pad(filled, [(0, 0)] * 3 + [(0, missing)], constant_values=hidden)
    return {"attention_mask" if is_bool else "bias": filled}


def _only_hiding(mask: Any) -> np.ndarray[Any, Any]:
    """Return what a float mask of 0 and -inf shows; beside a cap, others are refused.

    Raises: NotImplementedError.
    """
    known = None if isinstance(mask, Tracer) else np.asarray(mask)
    if known is None or not ((known == 0) | np.isneginf(known)).all():
        got = "traced values" if known is None else "values to add"
        raise NotImplementedError(
            f"attn_mask: got {got} beside a softcap; expected bool, or known values of 0 and -inf, since "
            "ONNX adds them after the cap, and our kernels before it. Pass a bool mask, or no softcap."
        )
    return known == 0


def padded_lengths(query: jax.Array, key: jax.Array, lengths: Any, past: Any) -> dict[str, Any]:
    """Return the cumulative lengths of a padded batch (S9), whose last queries are at the last keys."""
    if lengths is None:
        return {}
    if past is not None:
        advice = "Write the past keys into K, and count them."
        refuse("nonpad_kv_seqlen", "lengths beside past_key", "one of the two", advice)
    (batch, rows), keys = query.shape[:2], key.shape[1]
    ends = jnp.cumsum(counts("nonpad_kv_seqlen", lengths, batch, keys, "batch entry"), dtype=jnp.int32)
    return {
        "cum_seqlens_q": jnp.arange(batch + 1, dtype=jnp.int32) * rows,
        "cum_seqlens_k": jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
    }


def window_of(left: Any, right: Any) -> tuple[int | None, int | None] | None:
    """Return a window of ours; -1 leaves a side open."""
    sides: list[int | None] = []
    for name, given in (("left_window_size", left), ("right_window_size", right)):
        side = check_integer(name, given)
        if side < -1:
            refuse(name, side, "-1, or an integer from 0", "Pass -1 for a side without an end.")
        sides.append(None if side == -1 else side)
    return None if sides == [None, None] else (sides[0], sides[1])
