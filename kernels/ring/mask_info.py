"""`mask_info` of a call whose sequence is split over devices: its conditions as arguments (S5, S21).

Lengths of keys become ranges of keys, which refer to the whole sequence on every device.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.arguments import AttentionArguments
from attest.kernels.call.options import refuse
from attest.kernels.masks.as_arguments import chunk_argument, order_arguments
from attest.kernels.masks.mask_info import MaskInfo
from attest.kernels.masks.sizes import Sizes, sizes_of
from attest.kernels.ring.arguments import Spread, check_parts
from attest.kernels.with_mask_info import joined, replaced

_MASK = "attention_mask"


def with_whole_mask_info(arguments: AttentionArguments) -> AttentionArguments:
    """Return the arguments of a call of whole arrays, with what a MaskInfo of the whole says added to them.

    It is done as `attest.flash_attention` does it, but for lengths of keys.

    Raises: ValueError naming the argument.
    """
    info = joined(arguments)
    if info is None:
        return arguments
    query, key = arguments.query, arguments.key
    batch, rows, heads, _ = query.shape
    sizes_of(info, batch=batch, heads=heads, q_length=rows, kv_length=key.shape[1])
    alibi = arguments.alibi_slopes is not None
    return replaced(arguments, _by_ranges(info, rows).arguments(query, key, alibi=alibi))


def with_own_mask_info(arguments: AttentionArguments, spread: Spread) -> AttentionArguments:
    """Return the arguments of a call on one device, with what a MaskInfo says added to them.

    Segment ids, positions and ranges of rows are those of this device. Lengths, offsets and the numbers in
    ranges refer to the whole sequence, and so do causal order, the window and chunks. A mask has, along rows
    and along keys, 1, this device's part or all.

    Raises: ValueError naming the argument, also for chunks of several sizes.
    """
    _check_masks(arguments, spread)
    info = joined(arguments)
    if info is None:
        return arguments
    sizes = _check_sizes(info, arguments.query, arguments.key)
    if len(info.chunk_sizes) > 1:
        got = f"chunks of {' and '.join(map(str, info.chunk_sizes))} positions"
        advice = "Pass mesh, or one of them as a mask of this device's rows and all keys."
        refuse("mask_info", got, "one size inside jax.shard_map", advice)
    info = _by_ranges(info, sizes.queries())
    said: dict[str, Any] = {
        name: x
        for name in (_MASK, "kv_start", "kv_end", "cum_seqlens_q", "cum_seqlens_k")
        if (x := getattr(info, name)) is not None
    }
    for name in ("q_segment_ids", "kv_segment_ids"):
        ids = getattr(info, name)
        if ids is not None:
            said[name] = jnp.broadcast_to(ids, (sizes.batch, ids.shape[1]))
    if info.chunk_sizes:
        said["chunk_size"] = chunk_argument(info.chunk_sizes[0])
    placed = bool(info.chunk_sizes) or arguments.alibi_slopes is not None
    return replaced(arguments, said | order_arguments(info, sizes, placed))


def _check_masks(arguments: AttentionArguments, spread: Spread) -> None:
    """Refuse masks whose rows and keys are neither a shard's nor all, before they are joined into one."""
    query, key = arguments.query, arguments.key
    mask_info: Any = arguments.mask_info
    if not isinstance(mask_info, MaskInfo) or not all(getattr(x, "ndim", 0) == 4 for x in (query, key)):
        return
    for name, mask in ((_MASK, arguments.attention_mask), (f"mask_info.{_MASK}", mask_info.attention_mask)):
        if isinstance(mask, jax.Array | np.ndarray) and 2 <= mask.ndim <= 4:
            check_parts(name, mask, query.shape[1], key.shape[1], spread)


def _check_sizes(info: MaskInfo, query: Any, key: Any) -> Sizes:
    """Return the sizes of the call on this device; refuses arrays of other ones.

    Cumulative lengths, which refer to the whole, are compared with its lengths by the checks of the call.
    """
    batch, rows, heads, _ = query.shape
    of_whole: dict[str, Any] = dict.fromkeys((_MASK, "cum_seqlens_q", "cum_seqlens_k", "q_offset"))
    sizes = sizes_of(
        replace(info, **of_whole), batch=batch, heads=heads, q_length=rows, kv_length=key.shape[1]
    )
    whole = MaskInfo(packed=info.packed, **{name: getattr(info, name) for name in of_whole})
    sizes_of(whole, batch=batch, heads=heads)
    return sizes


def _by_ranges(info: MaskInfo, rows: int) -> MaskInfo:
    """Return the MaskInfo with lengths of keys as the ends of ranges of its rows."""
    if info.kv_lengths is None:
        return info
    ends = jnp.broadcast_to(info.kv_lengths[:, None], (info.kv_lengths.shape[0], rows))
    return replace(info, kv_lengths=None).apply_kv_ranges(kv_end=ends)
