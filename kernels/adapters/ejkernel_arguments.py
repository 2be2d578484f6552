"""The arguments of ejKernel as those of ours: block sizes, masks, segment ids, sinks and places of rows."""

from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from attest.kernels.call.arrays import check_is_array, fitted, is_integer
from attest.kernels.call.call import check_window
from attest.kernels.call.options import check_flag, check_integer, check_size, refuse, refuse_tracer
from attest.kernels.masks.mask_info import MaskInfo
from attest.kernels.operations.configs import BwdParams, FlashAttentionConfig, FwdParams
from attest.kernels.operations.platforms import check_platform

# The fields by which a MaskInfo of ejKernel is told. What it does not store is None there.
_STORED = ("_attention_mask", "_q_segment_ids", "_kv_segment_ids")

_LARGEST = 2**31 - 1
_FARTHEST = 2**30


def sizes_of[Params: FwdParams | BwdParams](name: str, given: Any, kind: type[Params]) -> Params | None:
    """Return the neutral sizes of an object that has them as attributes.

    Raises: ValueError naming the argument.
    """
    if given is None:
        return None
    if not (hasattr(given, "q_blocksize") and hasattr(given, "kv_blocksize")):
        expected = "None, or an object with q_blocksize and kv_blocksize"
        refuse(name, f"a {type(given).__name__}", expected, f"Build it as {kind.__name__}.")
    return kind(**{field.name: getattr(given, field.name, None) for field in fields(kind)})


def config_of(
    cfg: Any, fwd_params: Any, bwd_params: Any, chunks: dict[str, Any]
) -> FlashAttentionConfig | None:
    """Return the configuration that a call gives; None where it gives no sizes.

    cfg: None, one of ours, or an object with `fwd_params`, `bwd_params`, `platform` and `backend`. chunks:
    the sizes of blocks of queries and of keys, in this order, by the names that they have in the call.

    Raises: ValueError naming the argument.
    """
    given = {name: check_size(name, x) for name, x in chunks.items() if x is not None}
    if given and fwd_params is not None:
        refuse(next(iter(given)), "sizes beside fwd_params", "one of them", "Put them into fwd_params.")
    if given:
        q_name, kv_name = chunks
        fwd_params = FwdParams(q_blocksize=given.get(q_name), kv_blocksize=given.get(kv_name))
    forward = sizes_of("fwd_params", fwd_params, FwdParams)
    backward = sizes_of("bwd_params", bwd_params, BwdParams)
    if cfg is None:
        if forward is None and backward is None:
            return None
        return FlashAttentionConfig(fwd_params=forward, bwd_params=backward)
    if forward is not None or backward is not None:
        refuse("cfg", "a configuration beside sizes", "one of them", "Put the sizes into cfg.")
    if isinstance(cfg, FlashAttentionConfig):
        return cfg
    if not all(hasattr(cfg, name) for name in ("fwd_params", "bwd_params", "platform", "backend")):
        expected = "None, or an object with fwd_params, bwd_params, platform and backend"
        refuse("cfg", f"a {type(cfg).__name__}", expected, "Build it as FlashAttentionConfig.")
    return FlashAttentionConfig(
        fwd_params=sizes_of("cfg", cfg.fwd_params, FwdParams),
        bwd_params=sizes_of("cfg", cfg.bwd_params, BwdParams),
        platform=cfg.platform,
        backend=cfg.backend,
    )


def precision_of(precision: Any) -> Any:
    """Return the precision of a call of ours: DEFAULT, the default there, is that of our kernels."""
    refuse_tracer("precision", precision)
    return None if isinstance(precision, lax.Precision) and precision == lax.Precision.DEFAULT else precision


def shared_sinks(softmax_aux: Any) -> Any:
    """Return sinks of which [n] are shared by all heads, as in the flash and ring attention of ejKernel."""
    if softmax_aux is None:
        return None
    check_is_array("softmax_aux", softmax_aux)
    if softmax_aux.ndim not in (1, 2):
        advice = "Sinks come before a bias by position; name the two."
        refuse("softmax_aux", f"shape {softmax_aux.shape}", "[num_sinks] or [heads, num_sinks]", advice)
    return softmax_aux[None] if softmax_aux.ndim == 1 else softmax_aux


def check_integers(name: str, x: Any) -> None:
    """Refuse what is no array of integers."""
    check_is_array(name, x)
    if not is_integer(x.dtype):
        refuse(name, f"dtype {x.dtype}", "an integer dtype", "Cast it with .astype('int32').")


def segment_ids(q_ids: Any, kv_ids: Any, zero_is_padding: bool) -> dict[str, Any]:
    """Return segment ids as our kernels read them; one of the two is for both sides.

    zero_is_padding: whether a token of segment 0 is padding; a negative one always is.

    Raises: ValueError naming the argument.
    """
    check_flag("zero_is_padding", zero_is_padding)
    for name, ids in (("q_segment_ids", q_ids), ("kv_segment_ids", kv_ids)):
        if ids is not None:
            check_integers(name, ids)
    if q_ids is None and kv_ids is None:
        return {}
    pair = {
        "q_segment_ids": kv_ids if q_ids is None else q_ids,
        "kv_segment_ids": q_ids if kv_ids is None else kv_ids,
    }
    return {name: _without_zero(name, ids) for name, ids in pair.items()} if zero_is_padding else pair


def _without_zero(name: str, ids: Any) -> Any:
    """Return the ids with those of segment 0 made padding."""
    if not isinstance(ids, Tracer):
        ids = fitted(name, "ids", np.asarray(ids), "Renumber the segments.")
        return np.where(ids == 0, np.int32(-1), ids)
    if jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        expected = "a signed dtype, where segment 0 is padding"
        refuse(name, f"dtype {ids.dtype}", expected, "Cast the ids to int32.")
    return jnp.where(ids == 0, jnp.asarray(-1, ids.dtype), ids)


def mask_arguments(mask_info: Any, attention_mask: Any, ids: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of ours that say what a MaskInfo, a mask and segment ids say together.

    mask_info: ours, or one of ejKernel, of which the mask and the segment ids that it stores count.

    Raises: ValueError naming the argument.
    """
    if mask_info is None or isinstance(mask_info, MaskInfo):
        return {"mask_info": mask_info, "attention_mask": attention_mask, **ids}
    if not all(hasattr(mask_info, name) for name in _STORED):
        advice = "Build it from attest.kernels.operations.MaskInfo."
        refuse("mask_info", f"a {type(mask_info).__name__}", "a MaskInfo of attest or of ejKernel", advice)
    mask, q_ids, kv_ids = (getattr(mask_info, name) for name in _STORED)
    info = MaskInfo()
    if mask is not None:
        info = info.apply_attention_mask(mask, axes={2: "bk", 3: "bqk"}.get(mask.ndim))
    if q_ids is not None and kv_ids is not None:
        info = info.apply_segments(q_ids, kv_ids)
    return {"mask_info": info, "attention_mask": attention_mask, **ids}


def stored_positions(mask_info: Any) -> dict[str, Any]:
    """Return the positions of rows and keys by a MaskInfo of ejKernel; ours brings its own.

    By default they count from 0 in each segment. Keys of padding, which ids hide, have position 2**31 - 1.
    """
    if mask_info is None or isinstance(mask_info, MaskInfo):
        return {}
    q, kv = mask_info.get_or_compute_positions()
    if q is None or kv is None:
        return {}
    check_integers("mask_info.kv_positions", kv)
    return {"q_positions": q, "kv_positions": kv.clip(max=_FARTHEST - 1)}


def place_of_rows(query: Any, key: Any, q_offset: Any, mask_info: Any, platform: Any) -> Any:
    """Return the `q_offset` of a call with causal order or a window, None for the last row at the last key.

    ejKernel's XLA and TPU kernels put the first row at the first key, its Triton kernel the last row at the
    last key. That is one and the same where the lengths are equal.

    Raises: ValueError where nothing tells which of the two is meant.
    """
    shapes: list[tuple[int, ...]] = [getattr(x, "shape", ()) for x in (query, key)]
    if q_offset is not None or any(len(shape) < 3 for shape in shapes):
        return q_offset
    if isinstance(mask_info, MaskInfo) and (mask_info.q_offset, mask_info.q_positions) != (None, None):
        return None
    rows, keys = (shape[-3] for shape in shapes)
    if rows == keys:
        return None
    named = check_platform(platform)
    if named in ("xla", "pallas", "pallas_tpu"):
        return 0
    if named == "triton":
        return None
    expected = "an offset, or a platform, where causal order or a window meets other lengths"
    advice = (
        "ejKernel's XLA and TPU kernels put the first row at the first key, q_offset=0, and its Triton "
        "kernel the last at the last, q_offset=Sk - Sq."
    )
    return refuse("q_offset", f"None for {rows} queries and {keys} keys", expected, advice)


def is_ordered(causal: Any, sliding_window: Any) -> bool:
    """Return whether positions of rows matter to a call; what is malformed is refused elsewhere."""
    return causal is True or bool(isinstance(causal, np.bool_) and causal) or sliding_window is not None


def window_and_first_keys(
    query: Any, key: Any, window: Any, first_keys: int, q_offset: Any, rows_before: Any = 0, parts: int = 1
) -> jax.Array:
    """Return a mask of the pairs within a window or among the first keys, [1, 1, Sq, Sk] bool.

    rows_before: how many rows of the whole come before these. parts: in how many parts like these the whole
    lies on devices; the mask has all its keys.
    """
    left, right = check_window(window)
    rows, keys = query.shape[1], key.shape[1] * parts
    shift = keys - rows * parts if q_offset is None else check_integer("q_offset", q_offset)
    if not -_FARTHEST <= shift < _FARTHEST:
        refuse("q_offset", shift, "an offset in [-2**30, 2**30)", "Count from nearer.")
    row = jnp.arange(rows, dtype=jnp.int32)[:, None] + (
        jnp.asarray(rows_before, jnp.int32) + jnp.int32(shift)
    )
    column = jnp.arange(keys, dtype=jnp.int32)[None]
    behind, inside = row - column, jnp.ones((rows, keys), bool)
    if left is not None:
        inside &= behind <= jnp.int32(min(left, _LARGEST))
    if right is not None:
        inside &= -behind <= jnp.int32(min(right, _LARGEST))
    return (inside | (column < jnp.int32(min(first_keys, _LARGEST))))[None, None]
