"""The masks of splash attention as arguments of `attest.flash_attention`.

Causal order, windows and chunks stay such, so that kernels skip blocks. Other masks become arrays.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.call.arrays import check_is_array
from attest.kernels.call.options import refuse

_MODULE = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask"


def mask_arguments(mask: Any) -> tuple[tuple[int, int, int], dict[str, Any], jax.Array | None]:
    """Return the shape [heads, Sq, Sk] of a mask, options of a call, and an array [heads or 1, Sq, Sk].

    mask: a MultiHeadMask of JAX, or an array of bool. Its masks of single heads are told by their class, so
    that JAX's module need not be imported.

    Raises: ValueError naming the mask.
    """
    if isinstance(mask, jax.Array | np.ndarray):
        check_is_array("mask", mask)
        if mask.ndim != 3 or mask.dtype != np.bool_:
            got = f"{mask.dtype} of shape {mask.shape}"
            refuse(
                "mask", got, "bool of shape (heads, queries, keys)", "Pass mask != 0, with an axis of heads."
            )
        return (mask.shape[0], mask.shape[1], mask.shape[2]), {}, jnp.asarray(mask)
    if _class_of(mask) != "MultiHeadMask":
        expected = "a MultiHeadMask of splash attention, or an array of bool"
        refuse("mask", f"a {type(mask).__name__}", expected, "Give each head a mask: MultiHeadMask([...]).")
    heads: list[Any] = list(mask.masks)
    rows, keys = heads[0].shape
    options = [_options_of(head) for head in heads]
    if options[0] is not None and all(each == options[0] for each in options):
        return (len(heads), rows, keys), options[0], None
    # Heads often share one object, which is then made an array once.
    arrays = {id(head): np.asarray(head[:, :], np.bool_) for head in heads}
    shared = len(arrays) == 1
    chosen = list(arrays.values()) if shared else [arrays[id(head)] for head in heads]
    return (len(heads), rows, keys), {}, jnp.asarray(np.stack(chosen))


def _class_of(mask: Any) -> str:
    """Return the name of a class of JAX's masks; the class of a user, which may differ, has none."""
    kind = type(mask)
    return kind.__name__ if kind.__module__ == _MODULE else ""


def _options_of(mask: Any) -> dict[str, Any] | None:
    """Return the options of a call that show what a mask of one head shows; None if there are none."""
    kind = _class_of(mask)
    if kind == "FullMask":
        return {}
    if kind == "LogicalAnd":
        return _both(_options_of(mask.left), _options_of(mask.right))
    if kind not in ("CausalMask", "LocalMask", "ChunkedCausalMask") or not _counts_from_zero(mask):
        return None
    if kind == "CausalMask":
        return {"causal": True, "q_offset": mask.offset}
    if kind == "ChunkedCausalMask":
        return {"causal": True, "chunk_size": mask.chunk_size, "q_offset": 0}
    window = tuple(mask.window_size)
    if window == (None, None):
        return {}
    if any(side is not None and side < 0 for side in window):
        return None
    return {"sliding_window": window, "q_offset": mask.offset}


def _counts_from_zero(mask: Any) -> bool:
    """Return whether the rows of a mask have their own indices, which users may permute."""
    return np.array_equal(mask.q_sequence, np.arange(mask.shape[0]))


def _both(left: dict[str, Any] | None, right: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the options of two masks that both apply; None if a call cannot have both."""
    if left is None or right is None or any(left[name] != right[name] for name in left.keys() & right.keys()):
        return None
    return left | right
