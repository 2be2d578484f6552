"""`mask_info` beside the other arguments of a call: all conditions count (S5)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from attest.kernels.arguments import AttentionArguments
from attest.kernels.call.arrays import check_pair
from attest.kernels.call.options import check_flag, refuse
from attest.kernels.masks.mask_info import MaskInfo

# The arguments in whose place a joined MaskInfo stands. It has causal order where that was given, and lengths
# beside a MaskInfo are refused.
_REPLACED = (
    "attention_mask", "q_segment_ids", "kv_segment_ids", "sliding_window", "chunk_size", "kv_start", "kv_end",
    "q_offset", "q_positions", "kv_positions",
)  # fmt: skip


def with_mask_info[T: AttentionArguments](arguments: T) -> T:
    """Return a call with one batch dimension whose MaskInfo, if it has one, is in its other arguments.

    Positions and segment ids may be given once, in either; cumulative lengths in the MaskInfo alone. What is
    malformed is left for the checks of the call.

    Raises: ValueError naming the argument.
    """
    info = joined(arguments)
    if info is None:
        return arguments
    alibi = arguments.alibi_slopes is not None
    return replaced(arguments, info.arguments(arguments.query, arguments.key, alibi=alibi))


def joined(arguments: AttentionArguments) -> MaskInfo | None:
    """Return the conditions of the MaskInfo and those of the other arguments, as one MaskInfo.

    None where there is no MaskInfo, or where query or key are malformed, which the checks of the call refuse.

    Raises: ValueError naming the argument.
    """
    info: Any = arguments.mask_info
    if info is None:
        return None
    if not isinstance(info, MaskInfo):
        advice = "Build it from attest.kernels.operations.MaskInfo."
        refuse("mask_info", f"a {type(info).__name__}", "a MaskInfo", advice)
    arrays: tuple[Any, ...] = (arguments.query, arguments.key)
    for x in arrays:
        if not isinstance(x, jax.Array | np.ndarray) or x.ndim != 4:
            return None
    return _with_arguments(info, arguments)


def replaced[T: AttentionArguments](arguments: T, said: Mapping[str, Any]) -> T:
    """Return a call with what a joined MaskInfo says in place of all its conditions."""
    return replace(arguments, mask_info=None, **{**dict.fromkeys(_REPLACED), **said})


def _with_arguments(info: MaskInfo, given: AttentionArguments) -> MaskInfo:
    """Return the MaskInfo with the conditions of the other arguments: how one is passed on depends on all."""
    if given.cum_seqlens_q is not None or given.cum_seqlens_k is not None:
        refuse("cum_seqlens_q", "lengths beside mask_info", "None", "Use MaskInfo.from_cu_seqlens.")
    of_rows = info.q_offset is not None or info.q_positions is not None
    for name, positions, stored in (
        ("q_offset", given.q_offset, of_rows),
        ("q_positions", given.q_positions, of_rows),
        ("kv_positions", given.kv_positions, info.kv_positions is not None),
    ):
        if positions is not None and stored:
            refuse(name, "positions beside those of mask_info", "one of them", "Leave one out.")
    if check_flag("causal", given.causal):
        info = info.apply_causal()
    if given.sliding_window is not None:
        info = info.apply_sliding_window(given.sliding_window)
    if given.attention_mask is not None:
        axes = {2: "qk", 3: "hqk"}.get(getattr(given.attention_mask, "ndim", 4), "bhqk")
        info = info.apply_attention_mask(given.attention_mask, axes=axes)
    if given.chunk_size is not None:
        info = info.apply_chunked(given.chunk_size)
    info = info.apply_kv_ranges(given.kv_start, given.kv_end)
    q_ids, kv_ids = given.q_segment_ids, given.kv_segment_ids
    if check_pair("q_segment_ids", q_ids, "kv_segment_ids", kv_ids) and q_ids is not None:
        info = info.apply_segments(q_ids, kv_ids)
    return info.with_positions(given.q_positions, given.kv_positions, q_offset=given.q_offset)
