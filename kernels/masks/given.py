"""`mask_info` beside the other arguments of a call: all conditions count (S5)."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from attest.kernels.call.arrays import check_pair
from attest.kernels.call.options import check_flag, refuse
from attest.kernels.masks.mask_info import MaskInfo

_POSITIONS = ("q_offset", "q_positions", "kv_positions")
_REPLACED = (
    "attention_mask",
    "q_segment_ids",
    "kv_segment_ids",
    "sliding_window",
    "chunk_size",
    "kv_start",
    "kv_end",
    *_POSITIONS,
)


def with_mask_info(arguments: Mapping[str, Any], mask_info: Any) -> dict[str, Any]:
    """Return the arguments of a call with one batch dimension, with what a MaskInfo says added to them.

    The MaskInfo may be None. Positions and segment ids may be given once, in either; cumulative lengths in
    the MaskInfo alone. What is malformed is left for the checks of the call.

    Raises: ValueError naming the argument.
    """
    info = joined(arguments, mask_info)
    if info is None:
        return dict(arguments)
    alibi = arguments["alibi_slopes"] is not None
    return replaced(arguments, info.arguments(arguments["query"], arguments["key"], alibi=alibi))


def joined(arguments: Mapping[str, Any], mask_info: Any) -> MaskInfo | None:
    """Return the conditions of a MaskInfo and those of the other arguments, as one MaskInfo.

    None where mask_info is None, or where query or key are malformed, which the checks of the call refuse.

    Raises: ValueError naming the argument.
    """
    if mask_info is None:
        return None
    if not isinstance(mask_info, MaskInfo):
        advice = "Build it from attest.kernels.operations.MaskInfo."
        refuse("mask_info", f"a {type(mask_info).__name__}", "a MaskInfo", advice)
    query, key = arguments["query"], arguments["key"]
    if not all(isinstance(x, jax.Array | np.ndarray) and x.ndim == 4 for x in (query, key)):
        return None
    return _with_arguments(mask_info, arguments)


def replaced(arguments: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with what a joined MaskInfo says in place of all conditions."""
    return {**arguments, **dict.fromkeys(_REPLACED), **said}


def _with_arguments(info: MaskInfo, given: Mapping[str, Any]) -> MaskInfo:
    """The MaskInfo with the conditions of the other arguments: how one is passed on depends on the others."""
    if given["cum_seqlens_q"] is not None or given["cum_seqlens_k"] is not None:
        refuse("cum_seqlens_q", "lengths beside mask_info", "None", "Use MaskInfo.from_cu_seqlens.")
    for name in _POSITIONS:
        stored = (info.q_offset, info.q_positions) if name.startswith("q") else (info.kv_positions,)
        if given[name] is not None and any(x is not None for x in stored):
            refuse(name, "positions beside those of mask_info", "one of them", "Leave one out.")
    if check_flag("causal", given["causal"]):
        info = info.apply_causal()
    if given["sliding_window"] is not None:
        info = info.apply_sliding_window(given["sliding_window"])
    if given["attention_mask"] is not None:
        axes = {2: "qk", 3: "hqk"}.get(getattr(given["attention_mask"], "ndim", 4), "bhqk")
        info = info.apply_attention_mask(given["attention_mask"], axes=axes)
    if given["chunk_size"] is not None:
        info = info.apply_chunked(given["chunk_size"])
    info = info.apply_kv_ranges(given["kv_start"], given["kv_end"])
    q_ids, kv_ids = given["q_segment_ids"], given["kv_segment_ids"]
    if check_pair("q_segment_ids", q_ids, "kv_segment_ids", kv_ids):
        info = info.apply_segments(q_ids, kv_ids)
    return info.with_positions(given["q_positions"], given["kv_positions"], q_offset=given["q_offset"])
