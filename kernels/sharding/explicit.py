"""The dispatcher: how a checked call runs on the devices of the mesh that its arrays are on.

On an explicit mesh the types of arrays have the sharding of each axis. There each device computes its own
batch entries and heads by `jax.shard_map`, and no array is gathered. It is the same for all implementations:
what they are given is a call, in coordinates of the whole (S21, S23). Inside `jax.shard_map` and on one
device a call runs as it is; for automatic meshes, see `attest.kernels.sharding.automatic`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, PartitionSpec

from attest.kernels.call.axes import AXES
from attest.kernels.call.call import Call
from attest.kernels.call.positions import moved_origin
from attest.kernels.varying import vary_together

type Axes = tuple[str, ...]
type Results = tuple[jax.Array, jax.Array]

# The names that a `Call` has for positions, and those that users give them.
_GIVEN = {"q": "q_positions", "kv": "kv_positions"}
_NAMES = {given: name for name, given in _GIVEN.items()}
# What the axes of each array of a `Call` are: a batch entry, a query or key head, or what is never sharded.
_KINDS = str.maketrans({"q": ".", "k": ".", "g": "k"})
LAYOUTS: dict[str, str] = {_NAMES.get(name, name): axes.translate(_KINDS) for name, axes in AXES.items()}
# The arrays of a call that have gradients.
FLOATS = ("query", "key", "value", "bias", "softmax_aux")
_AXES = {"b": "the batch", "h": "the heads", "k": "the heads"}


@dataclass(frozen=True)
class Placement:
    """The axes of a mesh over which the batch and the heads of a call are sharded; explicit: all such axes.

    mapped: the same of the axes that each `jax.vmap` maps, the innermost first.
    """

    mesh: Any
    explicit: frozenset[str]
    batch: Axes
    heads: Axes
    mapped: tuple[Axes, ...] = ()

    def of(self, kind: str) -> Axes:
        """Return the axes of the mesh that shard an axis of an array, by its letter in `LAYOUTS`."""
        mapped = {mapped_kind(level): axes for level, axes in enumerate(self.mapped)}
        return ({"b": self.batch, "h": self.heads, "k": self.heads} | mapped).get(kind, ())

    def shards(self, axes: Axes) -> int:
        """Return the number of devices along these axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


def mapped_kind(level: int) -> str:
    """Return the letter in layouts for the axis that a `jax.vmap` maps; the innermost is level 0."""
    return chr(ord("A") + level)


def on_mesh(run: Callable[[Call], Results], call: Call) -> Results:
    """Return out and lse of a call, computed by `run` on one device, or on each of an explicit mesh.

    Gradients of arrays that several devices read, such as shared keys, are summed over the devices.

    Raises: NotImplementedError naming the argument that is sharded in another way than by batch and heads.
    """
    placement = _placement_of(call)
    if placement is None:
        return run(call)
    if not hasattr(jax, "shard_map"):
        raise NotImplementedError(
            f"query: got arrays on an explicit mesh; expected an automatic one with jax {jax.__version__}, "
            "which has no jax.shard_map. Install jax 0.7 or later."
        )
    whole = frozenset(name for name in ("key", "value") if not _sharded(getattr(call, name))[2])

    def local(call: Call) -> Results:
        return run(own_part(placement, whole, call))

    call = _widened(placement, call)
    specs = mapped(call, lambda name, x: PartitionSpec(*_axes_of(placement, name, x)))
    batch, heads = placement.batch or None, placement.heads or None
    return jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(specs,),
        out_specs=(PartitionSpec(batch, None, heads, None), PartitionSpec(batch, heads, None)),
        # All of them, by default, are those over which jax.vmap has not sharded the axis that it maps.
        axis_names=set()
        if placement.explicit == frozenset(placement.mesh.axis_names)
        else placement.explicit,
    )(call)


def within_mesh() -> bool:
    """Return whether the program that is being traced has a mesh."""
    return not jax.sharding.get_abstract_mesh().empty


def on_own_entries[T](run: Callable[..., T], *arguments: Any) -> T:
    """Return `run(*arguments)`; of an axis that `jax.vmap` maps, each device computes its own entries.

    So a loop that depends on what is stored in the entries runs on each device by itself. Without that, XLA
    partitions what `jax.vmap` makes of `run`, and all devices wait for each other at each step of the loop.

    arguments: pytrees of arrays. It cannot be differentiated.
    """
    arrays, structure = jax.tree.flatten(arguments)

    def flat(*arrays: jax.Array) -> T:
        return run(*jax.tree.unflatten(structure, vary_together(arrays)))

    return _own_entries(flat)(*arrays)


def _own_entries(function: Callable[..., Any]) -> Callable[..., Any]:
    @custom_vmap
    def computed(*arrays: jax.Array) -> Any:
        return function(*arrays)

    @computed.def_vmap
    def _(_size: int, in_batch: Any, *arrays: jax.Array) -> Any:
        batched = jax.vmap(function, in_axes=tuple(0 if mapped else None for mapped in in_batch))
        own = _own_entries(batched)
        mapped = [_sharded(x)[0] for x, is_mapped in zip(arrays, in_batch, strict=True) if is_mapped]
        axes = next(filter(None, mapped), ())
        if axes:
            mesh: Any = jax.typeof(arrays[0]).sharding.mesh
            specs = tuple(PartitionSpec(axes) if is_mapped else PartitionSpec() for is_mapped in in_batch)
            own = jax.shard_map(
                own, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(axes), axis_names=set(axes)
            )
        found = own(*arrays)
        return found, jax.tree.map(lambda _: True, found)

    return computed


def _widened(placement: Placement, call: Call) -> Call:
    """Return the call with arrays that several devices read in float32: their gradients are rounded once.

    The passes round key and value to the dtype of query again, which is exact.
    """
    spread = {*placement.batch, *placement.heads}
    given = {name: x for name in FLOATS if (x := getattr(call, name)) is not None}
    shared = [name for name, x in given.items() if {axis for axes in _sharded(x) for axis in axes} != spread]
    return replace(call, **{name: given[name].astype(jnp.float32) for name in shared})


def _placement_of(call: Call) -> Placement | None:
    """Return where a call is sharded; None without an explicit mesh."""
    for x in jax.tree.leaves(call):
        mesh: Any = jax.typeof(x).sharding.mesh
        explicit = frozenset(
            name
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == AxisType.Explicit
        )
        if explicit:
            batch, _, heads, _ = _sharded(call.query)
            return Placement(mesh, explicit, batch, heads)
    return None


def _sharded(x: jax.Array) -> tuple[Axes, ...]:
    """Return the explicit axes of the mesh over which each axis of an array is sharded."""
    spec: Any = jax.typeof(x).sharding.spec
    entries = [
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec
    ]
    return (*entries, *((),) * (x.ndim - len(entries)))


def _axes_of(placement: Placement, name: str, x: jax.Array) -> tuple[Axes | None, ...]:
    """Return how an array is sharded, if it can be so: like the query, or not at all along an axis."""
    found = _sharded(x)
    for axis, (kind, own) in enumerate(zip(LAYOUTS[name], found, strict=True)):
        if own and own != placement.of(kind):
            alike = f"{_AXES[kind]} sharded as those of query are, or " if kind in _AXES else ""
            raise NotImplementedError(
                f"{_GIVEN.get(name, name)}: got axis {axis} sharded over {', '.join(own)}; expected "
                f"{alike}all of it on every device. Batch and heads alone may be sharded: use "
                "jax.sharding.reshard."
            )
    return tuple(own or None for own in found)


def mapped(call: Call, change: Callable[[str, jax.Array], Any]) -> Call:
    """Return the call with another value for each array that it has."""

    def changed(record: Any) -> dict[str, Any]:
        found = {name: getattr(record, name) for name in LAYOUTS if hasattr(record, name)}
        return {name: change(name, x) for name, x in found.items() if x is not None}

    return replace(call, **changed(call), positions=replace(call.positions, **changed(call.positions)))


def own_part(placement: Placement, whole: frozenset[str], call: Call) -> Call:
    """Return the part that a device reads of the arrays that are not sharded, and its start in the whole.

    whole: which of key and value have all their heads on every device.
    """
    batch, _, heads, _ = call.query.shape
    call = mapped(call, lambda name, x: own_array(placement, name, x, batch, heads, name in whole))
    if call.dropout_seed is None:
        return call
    origin = own_origin(placement, batch, heads, call.positions.origin)
    return replace(call, positions=replace(call.positions, origin=origin))


def own_array(
    placement: Placement, name: str, x: jax.Array, batch: int, heads: int, whole_heads: bool = False
) -> jax.Array:
    """Return the part that a device reads of one array, by its name in `LAYOUTS`.

    batch, heads: how many of them a device has. An axis that has all of them is cut to its own. whole_heads:
    whether a key or value has all its heads.
    """
    own = {"b": batch, "h": heads}
    first = {kind: _index(placement.of(kind)) * size for kind, size in own.items()}
    if whole_heads and placement.heads:
        x = _own_key_heads(placement, x, heads, first["h"])
    if name.startswith("cum_seqlens"):
        return _own_lengths(x, batch, first["b"]) if placement.shards(placement.batch) > 1 else x
    for axis, kind in enumerate(LAYOUTS[name]):
        size = own.get(kind)
        if size is not None and x.shape[axis] == size * placement.shards(placement.of(kind)) > size:
            x = lax.dynamic_slice_in_dim(x, first[kind], size, axis)
    return x


def own_origin(placement: Placement, batch: int, heads: int, origin: Any = None) -> jax.Array:
    """Return where the part of a device begins in the whole: batch entry, query head, row, key, uint32 [4].

    origin: where the call begins, None for the whole.
    """
    return moved_origin(origin, (_index(placement.batch) * batch, _index(placement.heads) * heads, 0, 0))


def _index(axes: Axes) -> Any:
    """Return the number of this device among those of some axes."""
    return lax.axis_index(axes) if axes else 0


def _own_lengths(cumulative: jax.Array, batch: int, first: Any) -> jax.Array:
    """Return [batch + 1]: those of the own batch entries, from 0."""
    own = lax.dynamic_slice_in_dim(cumulative, first, batch + 1)
    return own - own[:1]


def _own_key_heads(placement: Placement, x: jax.Array, heads: int, first: Any) -> jax.Array:
    """Return the key heads that the own query heads read, of keys or values that are whole on every device.

    Where the devices divide no group, each of their query heads has a key head of its own.
    """
    group = heads * placement.shards(placement.heads) // x.shape[2]
    if heads % group == 0:
        return lax.dynamic_slice_in_dim(x, first // group, heads // group, 2)
    if group % heads == 0:
        return lax.dynamic_slice_in_dim(x, first // group, 1, 2)
    return jnp.take(x, (first + jnp.arange(heads)) // group, axis=2)
