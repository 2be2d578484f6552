"""Ring attention from outside of `jax.shard_map`: whole arrays over a mesh, padded where need be."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from attest.kernels.arguments import AttentionArguments, by_name
from attest.kernels.call.axes import AXES
from attest.kernels.call.options import refuse, shown
from attest.kernels.ring.arguments import Spread, check_axis_name
from attest.kernels.sharding.explicit import Axes, Placement, own_array, own_origin
from attest.kernels.sharding.mesh_functions import check_devices, once_for_alike, placed_on

# What each device has of all batch entries, and reads of its own.
_OF_ENTRIES = ("cum_seqlens_q", "cum_seqlens_k", "q_offset")
# The axes of the arrays of which each device has a part.
_LAYOUTS = {name: axes for name, axes in AXES.items() if name not in _OF_ENTRIES and axes != "."}
# What pads an array that is not padded with 0: rows and keys of padding meet nothing.
_FILL = {"q_segment_ids": -1, "kv_segment_ids": -1}
# Shards are a multiple of so many rows and keys: their halves begin at multiples of 4, as dropout needs.
_UNIT = 8


def over_mesh(
    run: Callable[[AttentionArguments, Spread], tuple[jax.Array, jax.Array]],
    arguments: AttentionArguments,
    mesh: Any,
    axis_name: Any,
    batch_axes: Any,
    head_axes: Any,
) -> tuple[jax.Array, jax.Array]:
    """Return out and lse of a whole call, which `run` computes on every device of the mesh.

    Raises: ValueError for axes that the mesh does not have, or that do not divide the batch or the heads.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        refuse("mesh", f"a {type(mesh).__name__}", "a jax.sharding.Mesh", "Build it with jax.make_mesh.")
    axes = {"b": _axes("batch_axes", batch_axes, mesh), "h": _axes("head_axes", head_axes, mesh)}
    check_axis_name(axis_name)
    (sequence,) = _axes("axis_name", axis_name, mesh)
    if sequence in jax.sharding.get_abstract_mesh().manual_axes:
        got = f"a mesh inside jax.shard_map over its axis {sequence!r}"
        refuse("mesh", got, "None there", "Leave mesh out: arrays are those of this device.")
    if len({sequence, *axes["b"], *axes["h"]}) < 1 + len(axes["b"]) + len(axes["h"]):
        got = f"{sequence!r}, {axes['b']} and {axes['h']}"
        refuse(
            "axis_name", got, "other axes for the sequence, the batch and the heads", "Use each axis once."
        )
    operands: dict[str, Any] = {"query": arguments.query, "key": arguments.key, "value": arguments.value}
    for name, x in operands.items():
        if getattr(x, "ndim", None) != 4:
            refuse(name, f"shape {getattr(x, 'shape', None)}", "4 axes", "Give [B, length, heads, head dim].")
    check_devices(mesh, arguments.query)
    devices = mesh.shape[sequence]
    lengths = {"q": arguments.query.shape[1], "k": arguments.key.shape[1]}
    padded = {kind: _padded(length, devices) for kind, length in lengths.items()}
    given = by_name(arguments)
    arrays = {name: x for name, x in given.items() if isinstance(x, jax.Array | np.ndarray)}
    static = {name: x for name, x in given.items() if name not in arrays}
    ready: dict[str, jax.Array] = {}
    specs: dict[str, PartitionSpec] = {}
    for name, x in arrays.items():
        ready[name], specs[name] = _placed(name, x, axes, sequence, lengths, padded, mesh)
    spread = Spread(sequence, devices, lengths["q"], lengths["k"])
    placement = Placement(mesh, frozenset(mesh.axis_names), axes["b"], axes["h"])
    local = _Local(run, tuple(static.items()), spread, placement)
    explicit = AxisType.Explicit in mesh.axis_types
    if explicit:
        ready = {name: placed_on(mesh, x, specs[name]) for name, x in ready.items()}
    out, lse = _over(local, tuple(specs.items()))(ready)
    batch, heads = axes["b"] or None, axes["h"] or None
    if lengths["q"] == padded["q"]:
        return out, lse
    if explicit:
        # A part of an axis that is sharded has no type there.
        out, lse = (
            placed_on(mesh, out, PartitionSpec(batch, None, heads)),
            placed_on(mesh, lse, PartitionSpec(batch, heads)),
        )
    return out[:, : lengths["q"]], lse[:, :, : lengths["q"]]


@dataclass(frozen=True)
class _Local:
    """The computation of each device. static: the arguments that are no arrays."""

    run: Callable[[AttentionArguments, Spread], tuple[jax.Array, jax.Array]]
    static: tuple[tuple[str, Any], ...]
    spread: Spread
    placement: Placement

    def __call__(self, given: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        whole: dict[str, Any] = {**dict(self.static), **given}
        batch, _, heads, _ = whole["query"].shape
        for name in _OF_ENTRIES:
            if getattr(whole.get(name), "ndim", 0) == 1:
                whole[name] = own_array(self.placement, name, whole[name], batch, heads)
        if whole.get("dropout_prob"):
            # The ring itself counts rows and keys.
            whole["origin"] = own_origin(self.placement, batch, heads, whole.get("origin"))
        return self.run(AttentionArguments(**whole), self.spread)


@once_for_alike
def _over(
    local: _Local, specs: tuple[tuple[str, PartitionSpec], ...]
) -> Callable[[dict[str, jax.Array]], tuple[jax.Array, jax.Array]]:
    """Return the function that computes on every device of the mesh."""
    placement, sequence = local.placement, local.spread.axis
    batch, heads = placement.batch or None, placement.heads or None
    out_specs = PartitionSpec(batch, sequence, heads, None), PartitionSpec(batch, heads, sequence)
    return jax.jit(jax.shard_map(local, mesh=placement.mesh, in_specs=(dict(specs),), out_specs=out_specs))


def _axes(argument: str, given: Any, mesh: Any) -> Axes:
    found = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(found, tuple | list):
        refuse(argument, shown(given), "the name of a mesh axis, or a tuple of them", "None splits nothing.")
    for name in found:
        if not isinstance(name, str) or name not in mesh.axis_names:
            there = ", ".join(map(repr, mesh.axis_names))
            refuse(argument, shown(name), f"axes of the mesh, {there}", "Correct the name.")
    return tuple(found)


def _padded(length: int, devices: int) -> int:
    """Return the length that devices divide: at least one unit for each, if they do not divide it as is."""
    if devices == 1:
        return length
    unit = devices * _UNIT
    return length if length and length % unit == 0 else max(1, -(-length // unit)) * unit


def _placed(
    name: str,
    x: Any,
    axes: Mapping[str, Axes],
    sequence: str,
    lengths: Mapping[str, int],
    padded: Mapping[str, int],
    mesh: Any,
) -> tuple[jax.Array, PartitionSpec]:
    """Return an array padded along rows and keys, and its spec on the mesh."""
    layout = _LAYOUTS.get(name)
    x = jnp.asarray(x)
    if layout is None or x.ndim == 0:
        return x, PartitionSpec()
    if name == "alibi_slopes" and x.ndim == 1:
        x = x[None]
    if name in ("attention_mask", "bias"):
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if name == "softmax_aux" and x.ndim == 1:
        layout = "."
    if x.ndim != len(layout):
        refuse(name, f"shape {x.shape}", f"{len(layout)} axes", "See attest.flash_attention.")
    pads: list[tuple[int, int]] = []
    spec: list[Axes | None] = []
    for kind, size in zip(layout, x.shape, strict=True):
        # One entry of a mask or bias is for all; one row or key of the others is all there is.
        shared = size == 1 and (name in ("attention_mask", "bias") or kind in "bh")
        along = kind in lengths and not shared
        if along and size != lengths[kind]:
            what = f"{lengths[kind]} {'rows' if kind == 'q' else 'keys'}, as the sequence has"
            refuse(name, f"shape {x.shape}", what, "See attest.flash_attention.")
        pads.append((0, padded[kind] - size if along else 0))
        # The keys of a mask stay whole on every device: its rows are split over the same axis.
        own = (sequence,) if kind == "q" or (kind == "k" and "q" not in layout) else ()
        own = axes["h" if kind == "g" else kind] if kind in "bhg" else own
        shards = int(np.prod([mesh.shape[axis] for axis in own], dtype=np.int64))
        if shared and name not in ("query", "key", "value"):
            own = ()
        elif kind in "bhg" and size % shards:
            what = {"b": "batch entries", "h": "query heads", "g": "key heads"}[kind]
            refuse(
                name, f"{size} {what}", f"a multiple of the {shards} devices of {own}", "Use fewer devices."
            )
        spec.append(own or None)
    if any(more for _, more in pads):
        x = jnp.pad(x, pads, constant_values=_FILL.get(name, 0))
    return x, PartitionSpec(*spec)
