"""The split of a MaskInfo's arrays over the axes of a mesh (clause S21)."""

from dataclasses import replace
from typing import Any, NoReturn

import jax
from jax.sharding import PartitionSpec

from attest.kernels.call.options import refuse
from attest.kernels.masks.conditions import Conditions
from attest.kernels.masks.sizes import AXES

# One axis of a mesh, several, or none.
type AxisName = str | tuple[str, ...] | None


def partition_specs[T: Conditions](
    info: T, batch: AxisName, heads: AxisName, q_length: AxisName, kv_length: AxisName
) -> T:
    """Return `info` with a PartitionSpec in place of each array; an axis of size 1 is not split.

    Raises: ValueError where a shard of an array would mean something else than its part of the whole.
    """
    names = {"batch": batch, "heads": heads, "q_length": q_length, "kv_length": kv_length}
    _check_lengths(info, names)
    _check_order(info, names)
    specs: dict[str, Any] = {}
    for name, axes in AXES.items():
        array = getattr(info, name)
        if array is not None:
            specs[name] = _spec(array, axes, names)
    if info.attention_mask is not None:
        _check_distinct(specs["attention_mask"])
    for name in ("cum_seqlens_q", "cum_seqlens_k", "q_offset"):
        array = getattr(info, name)
        if array is not None:
            of_entries = name == "q_offset" and info.cum_seqlens_q is None
            specs[name] = _spec(array, ("batch?",), names) if of_entries else PartitionSpec(None)
    return replace(info, **specs)


def _spec(array: jax.Array, axes: tuple[str, ...], names: dict[str, AxisName]) -> PartitionSpec:
    entries = [
        None if size == 1 else names[axis.rstrip("?")] for size, axis in zip(array.shape, axes, strict=True)
    ]
    return PartitionSpec(*entries)


def _check_lengths(info: Conditions, names: dict[str, AxisName]) -> None:
    """Refuse to split what counts from the first token of the whole: cumulative lengths, lengths, ranges."""
    if info.cum_seqlens_q is not None:
        for name in ("q_length", "kv_length") if info.packed else ("batch", "q_length", "kv_length"):
            if names[name] is not None:
                _refuse(name, names, "cumulative lengths, which have no parts")
    if info.kv_lengths is not None and names["kv_length"] is not None:
        _refuse("kv_length", names, "kv_lengths, which count from the first key of the whole")
    if (info.kv_start is not None or info.kv_end is not None) and names["kv_length"] is not None:
        _refuse("kv_length", names, "ranges, which count from the first key of the whole")


def _check_order(info: Conditions, names: dict[str, AxisName]) -> None:
    """Refuse to split default positions, which a shard would count from its own lengths."""
    if not (info.causal or info.chunk_sizes or info.sliding_window != (None, None)):
        return
    explicit = info.q_positions is not None and info.kv_positions is not None
    for name in ("q_length", "kv_length"):
        if names[name] is not None and not explicit:
            refuse(
                name,
                f"mesh axis {names[name]!r} and positions that are not stored",
                "q_positions and kv_positions, as causal order, windows and chunks compare them",
                "Store them: mask_info.with_positions(*mask_info.get_or_compute_positions(Sq, Sk)).",
            )


def _refuse(name: str, names: dict[str, AxisName], beside: str) -> NoReturn:
    refuse(
        name,
        f"mesh axis {names[name]!r} and {beside}",
        "None",
        "Use MaskInfo.from_segments(*mask_info.get_or_compute_segment_ids(Sq, Sk), *positions).",
    )


def _check_distinct(spec: PartitionSpec) -> None:
    """Refuse a mesh axis that splits two axes of an array."""
    used: list[str] = []
    for entry in spec:
        used += [entry] if isinstance(entry, str) else list(entry or ())
    twice = sorted({name for name in used if used.count(name) > 1})
    if twice:
        refuse(
            "attention_mask",
            f"mesh axis {twice[0]!r} for two of its axes, {spec}",
            "another mesh axis for each",
            "Leave kv_length or q_length out, and gather that side.",
        )
