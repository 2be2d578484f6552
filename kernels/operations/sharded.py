"""A call over the batch and heads of a mesh by `jax.shard_map`, from the specs of its operands (S21)."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attest.kernels.arguments import AttentionArguments, check_arguments
from attest.kernels.call.arrays import check_is_array
from attest.kernels.call.leading_axes import split as batch_dimensions
from attest.kernels.call.options import refuse
from attest.kernels.call.wide_keys import check_dtype_of_query, wide_keys
from attest.kernels.masks.mask_info import MaskInfo
from attest.kernels.operations.leading import with_one_batch
from attest.kernels.sharding.explicit import FLOATS, LAYOUTS, Axes, Placement, own_array, own_origin
from attest.kernels.sharding.mesh_functions import once_for_alike, placed_on
from attest.kernels.with_mask_info import with_mask_info

# What specs pair with, in order.
OPERANDS = ("query", "key", "value", "bias", "cum_seqlens_q", "cum_seqlens_k", "softmax_aux")
# The names that layouts have for other arguments.
_LAYOUT_OF = {"q_positions": "q", "kv_positions": "kv"}
_RING = "A sequence that is split over devices is the matter of ring attention."


@dataclass(frozen=True)
class _Specs:
    """The axes of the mesh that split the batch and the heads, and the spec of each operand."""

    batch: Axes
    heads: Axes
    operands: Mapping[str, PartitionSpec]


def sharded_call(
    run: Callable[..., jax.Array],
    arguments: Mapping[str, Any],
    mesh: Any,
    in_specs: Any,
    out_specs: Any,
    widens: bool = True,
    check_vma: bool = False,
) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """Return a function under jax.shard_map that runs a call on its shards, and its arrays.

    run: from arguments by name to out. arguments: the call, whole. in_specs: as many of `OPERANDS` as have a
    spec; the others are whole on every device. widens: whether `run` takes arrays that several devices read
    in float32, so that their gradients are rounded once; see `attest.kernels.call.wide_keys`. check_vma: as
    in jax.shard_map.

    Raises: ValueError for specs that do not fit the mesh, the arrays or each other, or split a sequence; what
    the checks of the whole call raise, as the devices see values traced.
    """
    if isinstance(in_specs, tuple | list):
        arguments, in_specs, out_specs, leading = with_one_batch(arguments, OPERANDS, in_specs, out_specs)
    else:
        leading = None
    _check_whole(arguments, checks_values=widens)
    # The batch and the heads are the first of four axes.
    pairs = {name: x for name, x in arguments.items() if name in ("attention_mask", "bias") and x is not None}
    arguments = {**arguments, **{name: x.reshape((1,) * (4 - x.ndim) + x.shape) for name, x in pairs.items()}}
    specs = _read(arguments, mesh, in_specs)
    out_spec = PartitionSpec(specs.batch or None, None, specs.heads or None, None)
    if _entries("out_specs", out_specs, 4, mesh) != _entries("out_specs", out_spec, 4, mesh):
        refuse("out_specs", str(out_specs), f"{out_spec}, as in_specs split query", "Give that of query.")
    placement = Placement(mesh, frozenset(mesh.axis_names), specs.batch, specs.heads)
    arrays = {name: x for name, x in arguments.items() if _has_arrays(x)}
    if isinstance(arrays.get("q_offset"), jax.Array) and arrays["q_offset"].ndim == 0:
        arrays["q_offset"] = arrays["q_offset"].reshape(1)
    if getattr(arrays.get("alibi_slopes"), "ndim", None) == 1:
        arrays["alibi_slopes"] = arrays["alibi_slopes"].reshape(1, -1)
    static = {name: x for name, x in arguments.items() if name not in arrays}
    if widens:
        for name in ("key", "value"):
            check_dtype_of_query(name, arguments[name], arguments["query"])
        shared = [name for name in FLOATS if name in arrays and _is_shared(specs, name, mesh)]
        arrays |= {name: _widened(arrays[name]) for name in shared}
    whole_heads = axes_at(specs.operands.get("key"), 2) != specs.heads
    local = _Local(run, tuple(static.items()), tuple(arrays), placement, whole_heads, widens)
    split = tuple(_spec(name, x, specs) for name, x in arrays.items())
    query, value = arguments["query"], arguments["value"]
    if 0 in (query.shape[1], value.shape[1]) and AxisType.Explicit not in mesh.axis_types:
        of_out = jax.ShapeDtypeStruct(
            (*query.shape[:3], value.shape[3]), query.dtype, sharding=NamedSharding(mesh, out_spec)
        )
        function = partial(_without_pairs, of_out)
    else:
        function = _over(local, split, out_spec, check_vma)
    if leading is None:
        return function, tuple(arrays.values())
    return lambda *operands: batch_dimensions(function(*operands), leading), tuple(arrays.values())


def _without_pairs(out: jax.ShapeDtypeStruct, *_: jax.Array) -> jax.Array:
    """Return out of a call without rows or keys: XLA crashes on its arrays in jax.shard_map (jax 0.11.2)."""
    return lax.with_sharding_constraint(jnp.zeros(out.shape, out.dtype), out.sharding)


def part_of_call(arguments: Mapping[str, Any], mesh: Any, in_specs: Any, out_specs: Any) -> dict[str, Any]:
    """Return the arguments of a call on one device of a mesh, with arrays as jax.ShapeDtypeStruct.

    Raises: ValueError for specs that do not fit the mesh, the arrays or each other, or split a sequence.
    """
    part = _Part()
    arrays = {name: jax.tree.map(_shape, x) for name, x in arguments.items() if _has_arrays(x)}
    static = {name: x for name, x in arguments.items() if name not in arrays}

    def call(arrays: dict[str, Any]) -> jax.Array:
        function, operands = sharded_call(part, static | arrays, mesh, in_specs, out_specs, widens=False)
        return function(*operands)

    jax.eval_shape(call, arrays)
    # Where the part begins in the whole is no matter of its speed.
    return {name: _with_axes_of(arrays.get(name), x) for name, x in part.seen.items() if name in arguments}


class _Part:
    """A keeper of a call's arguments on a device. It has no hash, so that no function is kept for it."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def __call__(self, **arguments: Any) -> jax.Array:
        self.seen = {name: jax.tree.map(_shape, x) if _has_arrays(x) else x for name, x in arguments.items()}
        query, value = arguments["query"], arguments["value"]
        return jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x


def _with_axes_of(whole: Any, part: Any) -> Any:
    """Return the part without the axes of size 1 that were put in front of those of the whole."""
    more = getattr(part, "ndim", 0) - getattr(whole, "ndim", 0)
    return jax.ShapeDtypeStruct(part.shape[more:], part.dtype) if more > 0 else part


def _check_whole(arguments: Mapping[str, Any], checks_values: bool) -> None:
    """Refuse a malformed call; checks_values: also values and features that not every kernel takes."""
    for name in (*OPERANDS, "attention_mask"):
        if name in OPERANDS[:3] or arguments.get(name) is not None:
            check_is_array(name, arguments.get(name))
    if checks_values:
        check_arguments(with_mask_info(AttentionArguments(**arguments)))


@dataclass(frozen=True)
class _Local:
    """The computation of each device: a call on its shards, in coordinates of the whole.

    static: the arguments that are no arrays. names: of the arrays. whole_heads: whether key and value have
    all their heads on every device.
    """

    run: Callable[..., jax.Array]
    static: tuple[tuple[str, Any], ...]
    names: tuple[str, ...]
    placement: Placement
    whole_heads: bool
    widens: bool

    def __call__(self, *operands: Any) -> jax.Array:
        static = dict(self.static)
        given = dict(zip(self.names, operands, strict=True))
        batch, heads = given["query"].shape[0], given["query"].shape[2]
        own = partial(own_array, self.placement, batch=batch, heads=heads)
        for name, x in given.items():
            layout = _LAYOUT_OF.get(name, name)
            if layout in LAYOUTS and x.ndim == len(LAYOUTS[layout]):
                given[name] = own(layout, x, whole_heads=self.whole_heads and name in ("key", "value"))
        if isinstance(info := given.get("mask_info"), MaskInfo):
            given["mask_info"] = replace(info, **{name: own(name, x) for name, x in _counted(info).items()})
        if static.get("dropout_prob", 0.0):
            origin = given.get("origin", static.get("origin"))
            given["origin"] = own_origin(self.placement, batch, heads, origin)
        with wide_keys() if self.widens else nullcontext():
            return self.run(**{**static, **given})


@once_for_alike
def _over(local: _Local, split: Any, out_spec: PartitionSpec, check_vma: bool) -> Callable[..., jax.Array]:
    """Return the function that computes on every device of the mesh."""
    mesh = local.placement.mesh
    function = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=out_spec, check_vma=check_vma)
    )
    if AxisType.Explicit not in mesh.axis_types:
        return function

    def resharded(*operands: Any) -> jax.Array:
        return function(*jax.tree.map(partial(placed_on, mesh), operands, split))

    return resharded


def _is_shared(specs: _Specs, name: str, mesh: Any) -> bool:
    """Return whether several devices read the same part of an operand."""
    spec = specs.operands.get(name, PartitionSpec())
    own = {axis for place in range(len(spec)) for axis in axes_at(spec, place)}
    return any(mesh.shape[axis] > 1 for axis in {*specs.batch, *specs.heads} - own)


def _widened(x: Any) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def _read(arguments: Mapping[str, Any], mesh: Any, in_specs: Any) -> _Specs:
    """Return the specs of a call, checked against its operands."""
    if not isinstance(in_specs, tuple | list) or not 1 <= len(in_specs) <= len(OPERANDS):
        got = (
            f"{len(in_specs)} of them"
            if isinstance(in_specs, tuple | list)
            else f"a {type(in_specs).__name__}"
        )
        refuse("in_specs", got, f"a tuple of 1 to {len(OPERANDS)}", f"Give those of {', '.join(OPERANDS)}.")
    query = _entries("in_specs of query", in_specs[0], 4, mesh)
    batch, heads = query[0], query[2]
    both = [axis for axis in batch if axis in heads]
    if both:
        got = f"{both[0]!r} for its batch and its heads"
        refuse("in_specs of query", got, "another axis of the mesh for each", "Leave one of them whole.")
    own = {"b": batch, "h": heads, "k": heads}
    operands: dict[str, PartitionSpec] = {}
    for name, spec in zip(OPERANDS, in_specs, strict=False):
        x = arguments.get(name)
        if spec is None or x is None:
            continue
        entries = _entries(f"in_specs of {name}", spec, x.ndim, mesh)
        layout = LAYOUTS[name][len(LAYOUTS[name]) - x.ndim :]
        for axis, (kind, axes) in enumerate(zip(layout, entries, strict=True)):
            _check_axis(name, x, axis, kind, axes, own, mesh)
        operands[name] = PartitionSpec(*(axes or None for axes in entries))
    key, value = (axes_at(operands.get(name), 2) for name in ("key", "value"))
    if key != value:
        refuse("in_specs of value", str(operands.get("value")), "heads split as those of key", "Split both.")
    return _Specs(batch, heads, operands)


def _check_axis(
    name: str, x: Any, axis: int, kind: str, axes: Axes, own: Mapping[str, Axes], mesh: Any
) -> None:
    """Refuse an axis of an operand that is split in another way than query, or does not divide."""
    if not axes:
        return
    place = f"in_specs of {name}"
    if kind not in own:
        refuse(place, f"axis {axis} over {', '.join(axes)}", f"axis {axis} whole", _RING)
    if axes != own[kind]:
        expected = f"{', '.join(own[kind]) or 'None'}, as for query, or None"
        refuse(place, f"axis {axis} over {', '.join(axes)}", expected, "Split the operands alike.")
    shards = Placement(mesh, frozenset(), (), ()).shards(axes)
    if x.shape[axis] % shards:
        advice = (
            "Leave the spec None there: each device then takes the heads that it reads."
            if kind == "k"
            else ""
        )
        expected = f"a multiple of the {shards} devices of {', '.join(axes)}"
        refuse(place, f"axis {axis} of length {x.shape[axis]}", expected, advice or "Use fewer devices.")


def _entries(place: str, spec: Any, ndim: int, mesh: Any) -> tuple[Axes, ...]:
    """Return the axes of the mesh for each axis of an array."""
    if not isinstance(spec, PartitionSpec):
        refuse(place, f"a {type(spec).__name__}", "a jax.sharding.PartitionSpec", "Give one, or None.")
    if len(spec) > ndim:
        refuse(place, str(spec), f"at most {ndim} entries, as the array has axes", "Remove the others.")
    found = [axes_at(spec, axis) for axis in range(len(spec))]
    unknown = [axis for axes in found for axis in axes if axis not in mesh.axis_names]
    if unknown:
        there = ", ".join(map(repr, mesh.axis_names))
        refuse(place, f"the mesh axis {unknown[0]!r}", f"axes of the mesh, {there}", "Correct the name.")
    return (*found, *((),) * (ndim - len(found)))


def _spec(name: str, x: Any, specs: _Specs) -> Any:
    """Return the spec of an argument: as given, or split like query where it has the batch or the heads."""
    if isinstance(x, MaskInfo):
        counted = _counted(x)
        parts = replace(x, **dict.fromkeys(counted))
        of_parts = parts.shardings(batch=specs.batch or None, heads=specs.heads or None)
        return replace(of_parts, **dict.fromkeys(counted, PartitionSpec()))
    if name in OPERANDS:
        return specs.operands.get(name, PartitionSpec())
    layout = LAYOUTS.get(_LAYOUT_OF.get(name, name), "")
    if x.ndim != len(layout):
        return PartitionSpec()
    own = {"b": specs.batch, "h": specs.heads}
    return PartitionSpec(
        *(own.get(kind) or None if size > 1 else None for kind, size in zip(layout, x.shape, strict=True))
    )


def _counted(info: MaskInfo) -> dict[str, Any]:
    """Return the arrays of a MaskInfo that have no parts of their own: lengths of sequences, and offsets."""
    if info.cum_seqlens_q is None:
        return {}
    found = {name: getattr(info, name) for name in ("cum_seqlens_q", "cum_seqlens_k", "q_offset")}
    return {name: x for name, x in found.items() if x is not None}


def axes_at(spec: PartitionSpec | None, axis: int) -> Axes:
    """Return the axes of the mesh that split an axis of an array."""
    entry: Any = None if spec is None or len(spec) <= axis else spec[axis]
    # What names no axes, as PartitionSpec.UNCONSTRAINED, is returned as it is, and is no axis of any mesh.
    return () if entry is None else tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def _has_arrays(x: Any) -> bool:
    return any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(x))
