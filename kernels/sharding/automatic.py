"""Calls that XLA partitions, on automatic meshes: each device computes its own batch entries and heads.

Under `jax.jit` XLA decides how arrays are sharded, and gathers what it cannot partition, such as a loop over
the batch. So each pass of a call is one operation to XLA, with a rule of which axes are sharded together and
the computation of one device. An axis that `jax.vmap` maps may be sharded, too: each device computes its own
entries of it, and waits for no other device. In a program for one device the operation is the pass itself.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import count, permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attest.kernels.call.call import Call
from attest.kernels.contract import Forward
from attest.kernels.sharding.explicit import FLOATS, LAYOUTS, Axes, Placement, mapped, mapped_kind, own_part

type Arrays = dict[str, jax.Array]
# From where the call is sharded, None for one device, and its operands to the results.
type Compute = Callable[[Placement | None, Arrays], Arrays]
# Which operands each `jax.vmap` around a call maps, the innermost first. A mapped axis comes first.
type Levels = tuple[tuple[bool, ...], ...]

# The results of the forward pass, and their cotangents, as LAYOUTS has them.
_RESULTS = {"out": "b.h.", "lse": "bh.", "row_max": "bh."}
_COTANGENTS = {"d_out": "b.h.", "d_lse": "bh."}


def spreads() -> bool:
    """Return whether XLA may split the program that is being traced over devices."""
    several = jax.device_count() > 1 and getattr(jax.config, "jax_use_shardy_partitioner", False)
    mesh = jax.sharding.get_abstract_mesh()
    return several and not mesh.manual_axes and AxisType.Explicit not in (mesh.axis_types or ())


def forward(run: Callable[[Call], Forward], call: Call) -> Forward:
    """Return the results of `run`, without what it keeps."""

    def compute(placement: Placement | None, arrays: Arrays) -> Arrays:
        part = _with_arrays(call, arrays)
        if placement is not None:
            part = own_part(placement, _whole(placement, call), part)
        found = run(part)
        return {"out": found.out, "lse": found.lse, "row_max": found.row_max}

    batch, length, heads, _ = call.query.shape
    shapes = {"out": (batch, length, heads, call.value.shape[3])}
    shapes |= dict.fromkeys(("lse", "row_max"), (batch, heads, length))
    return Forward(**_operation(compute, call, _arrays_of(call), shapes))


def backward(run: Callable[[Call, Arrays, bool], Arrays], call: Call, given: Arrays) -> Arrays:
    """Return the cotangents of the float arrays of a call, by name, in their dtypes.

    given: out, lse and row_max of the forward pass, and d_out and d_lse. run: from a call, what is given and
    whether they are not rounded to the cotangents of its float arrays.
    """
    floats = tuple(name for name in FLOATS if getattr(call, name) is not None)

    def compute(placement: Placement | None, arrays: Arrays) -> Arrays:
        sharded, here = _with_arrays(call, arrays), {name: arrays[name] for name in given}
        if placement is None:
            found = run(sharded, here, False)
            return {name: found[name].astype(getattr(call, name).dtype) for name in floats}
        whole = _whole(placement, call)
        found = run(own_part(placement, whole, sharded), here, True)

        def read(floats: Arrays) -> Arrays:
            part = own_part(placement, whole, replace(sharded, **floats))
            return {name: getattr(part, name) for name in floats}

        # The transpose of reading a part puts its cotangent in its place, between zeros. In float32, so that
        # sums over devices are rounded once.
        wide = {name: getattr(sharded, name).astype(jnp.float32) for name in floats}
        _, put = jax.vjp(read, wide)
        (cotangents,) = put({name: found[name].astype(jnp.float32) for name in floats})
        return {name: _summed(placement, call, name, cotangents[name]) for name in floats}

    shapes = {name: getattr(call, name).shape for name in floats}
    return _operation(compute, call, _arrays_of(call) | given, shapes)


def _operation(compute: Compute, call: Call, operands: Arrays, results: dict[str, tuple[int, ...]]) -> Arrays:
    """Return the results of `compute`, by name, in an operation that XLA partitions. results: shapes."""
    layouts = LAYOUTS | _RESULTS | _COTANGENTS
    shapes = {name: x.shape for name, x in operands.items()}

    def local(placement: Placement | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        found = compute(placement, dict(zip(operands, arrays, strict=True)))
        return tuple(found[name] for name in results)

    def operation(levels: Levels, sizes: tuple[int, ...]) -> Callable[..., Any]:
        """Return the operation within so many `jax.vmap`. sizes: of the axes that they map."""
        of_operands = [
            _mapped(layouts[name], shape, sizes, [level[i] for level in levels])
            for i, (name, shape) in enumerate(shapes.items())
        ]
        of_results = [
            _mapped(layouts[name], shape, sizes, [True] * len(levels)) for name, shape in results.items()
        ]

        def of_device(placement: Placement | None) -> Callable[..., tuple[jax.Array, ...]]:
            function: Callable[..., tuple[jax.Array, ...]] = partial(local, placement)
            for level in levels:
                function = jax.vmap(function, in_axes=tuple(0 if mapped else None for mapped in level))
            return function

        def partition(mesh: Any, arguments: Any, _: Any) -> Any:
            placement = _placement_of(mesh, of_operands, [x.sharding for x in arguments])

            def sharding(layout: str, shape: tuple[int, ...]) -> NamedSharding:
                axes = _axes_of(placement, call, layout, shape)
                return NamedSharding(placement.mesh, PartitionSpec(*(x or None for x in axes)))

            shardings = (tuple(sharding(*each) for each in side) for side in (of_results, of_operands))
            return placement.mesh, of_device(placement), *shardings

        # Jitted, as it may have constants, which custom_partitioning does not take.
        partitioned = custom_partitioning(jax.jit(of_device(None)))
        partitioned.def_partition(
            partition,
            # JAX's own names cannot say that an axis of the mesh is split between key heads and those of a
            # group.
            decode_shardings=False,
            **_rule(call, of_operands, of_results),
        )

        @custom_vmap
        def batched(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            query, *others = arrays
            return partitioned(_partitioned.bind(query), *others)

        @batched.def_vmap
        def _(size: int, in_batch: Any, *arrays: jax.Array) -> Any:
            found = operation((*levels, tuple(in_batch)), (*sizes, size))(*arrays)
            return found, tuple(True for _ in found)

        return batched

    return dict(zip(results, operation((), ())(*operands.values()), strict=True))


def _mapped(
    layout: str, shape: tuple[int, ...], sizes: tuple[int, ...], mapped: Iterable[bool]
) -> tuple[str, tuple[int, ...]]:
    """Return layout and shape of an array with the axes that `jax.vmap` maps in front, the outermost first.

    sizes: of all such axes, the innermost first. mapped: which of them the array has.
    """
    for level, (size, own) in enumerate(zip(sizes, mapped, strict=True)):
        if own:
            layout, shape = mapped_kind(level) + layout, (size, *shape)
    return layout, shape


def _lower(context: Any, query: Any) -> list[Any]:
    """Reject export over several devices with a clear error."""
    module = context.module_context
    devices = getattr(module.axis_context, "num_devices", 1)
    if devices > 1 and module.lowering_parameters.for_export:
        raise NotImplementedError(
            f"flash_attention: got exported in a program for {devices} devices that XLA partitions; expected "
            "arrays on an explicit mesh, or a call inside jax.shard_map. Make the mesh with "
            "axis_types=(AxisType.Explicit, ...)."
        )
    return [query]


# The query of an operation that XLA partitions; it leaves nothing in the program.
_partitioned = Primitive("flash_attention_partitioned")
_partitioned.def_impl(lambda query: query)
_partitioned.def_abstract_eval(lambda query: query)
mlir.register_lowering(_partitioned, _lower)


def _arrays_of(call: Call) -> Arrays:
    found: Arrays = {}
    mapped(call, found.setdefault)
    return found


def _with_arrays(call: Call, arrays: Arrays) -> Call:
    return mapped(call, lambda name, _: arrays[name])


def _placement_of(mesh: Any, operands: list[tuple[str, tuple[int, ...]]], shardings: list[Any]) -> Placement:
    """Return where XLA has the query, and the axes that `jax.vmap` maps.

    An axis that it does not divide evenly is not sharded. operands: their layouts and shapes. shardings: of
    the operands.
    """
    found: dict[str, Axes] = {}
    taken = set[str]()
    # The query comes first, so that it says where the batch and the heads are.
    for (layout, shape), sharding in zip(operands, shardings, strict=True):
        for axis, kind in enumerate(layout):
            if kind in found or not (kind in ("b", "h") or kind.isupper()):
                continue
            axes = _axes_at(mesh, sharding, shape, axis)
            found[kind] = () if taken.intersection(axes) else axes
            taken.update(found[kind])
    levels = sum(map(str.isupper, found))
    mapped = tuple(found[mapped_kind(level)] for level in range(levels))
    return Placement(mesh, frozenset(), found["b"], found["h"], mapped)


def _axes_at(mesh: Any, sharding: Any, shape: tuple[int, ...], axis: int) -> Axes:
    """Return the axes of the mesh that shard an axis of an array, if they divide it evenly.

    sharding: that of XLA, which has no names of axes. The place of the array on each device gives the names.
    """
    # Of a larger shape, which they divide evenly.
    large = tuple(mesh.size * max(1, size) for size in shape)

    def starts(sharding: Any) -> np.ndarray:
        indices = sharding.devices_indices_map(large)
        return np.vectorize(lambda device: indices[device][axis].start or 0, [int])(mesh.devices)

    found = starts(sharding)
    moving = [name for i, name in enumerate(mesh.axis_names) if (found != found.take([0], axis=i)).any()]
    for order in permutations(moving):
        if shape[axis] % math.prod(mesh.shape[name] for name in order):
            return ()
        if (starts(NamedSharding(mesh, PartitionSpec(*(None,) * axis, order))) == found).all():
            return order
    return ()


def _whole(placement: Placement, call: Call) -> frozenset[str]:
    """Return which of key and value have all their heads on every device."""
    shared = call.key.shape[2] % placement.shards(placement.heads)
    return frozenset(("key", "value") if shared else ())


def _axes_of(placement: Placement, call: Call, layout: str, shape: tuple[int, ...]) -> tuple[Axes, ...]:
    """Return the sharding of each axis of an array: only axes with one entry for each batch entry or head."""
    sizes = {"b": call.query.shape[0], "h": call.query.shape[2], "k": call.key.shape[2]}
    entries: list[Axes] = []
    for kind, size in zip(layout, shape, strict=True):
        axes = placement.of(kind) if size == sizes.get(kind, size) else ()
        entries.append(axes if size % placement.shards(axes) == 0 else ())
    return tuple(entries)


def _summed(placement: Placement, call: Call, name: str, cotangent: jax.Array) -> jax.Array:
    """Return the cotangent of an array, from all devices that read the same entries of it, rounded once."""
    shape, dtype = getattr(call, name).shape, getattr(call, name).dtype
    own = {axis for axes in _axes_of(placement, call, LAYOUTS[name], shape) for axis in axes}
    shared = tuple(axis for axis in (*placement.batch, *placement.heads) if axis not in own)
    return (lax.psum(cotangent, shared) if shared else cotangent).astype(dtype)


def _rule(
    call: Call, operands: list[tuple[str, tuple[int, ...]]], results: list[tuple[str, tuple[int, ...]]]
) -> dict[str, Any]:
    """Return the arguments of `def_partition` that say what is sharded together, from layouts and shapes.

    Query heads are key heads times those of a group; all other axes but the batch and those that `jax.vmap`
    maps are whole on every device.
    Where an axis of the mesh has more devices than there are key heads, the two are sharded apart: else XLA
    would spread the gradients of keys over a part of that axis, and gather them again.
    """
    group = call.query.shape[2] // call.key.shape[2]
    sizes = {"b": call.query.shape[0], "h": call.query.shape[2], "k": call.key.shape[2]}
    heads = "(k g)" if 1 < group < call.query.shape[2] else "k"
    devices: Any = jax.sharding.get_abstract_mesh().shape.values()
    if any(sizes["h"] % count == 0 and sizes["k"] % count for count in devices):
        heads = "h"
    factors = {"b": "b", "h": heads, "k": "k"}
    if group > 1 and group == call.query.shape[2]:
        sizes["k"] = 0  # one key head, which is whole on every device
    whole: list[str] = []
    numbers = count()

    def words(layout: str, shape: tuple[int, ...]) -> str:
        found: list[str] = []
        for kind, size in zip(layout, shape, strict=True):
            if kind.isupper():
                found.append(kind)
            elif size == sizes.get(kind):
                found.append(factors[kind])
            else:
                whole.append(f"w{next(numbers)}")
                found.append(whole[-1])
        return " ".join(found)

    sides = [", ".join(words(*each) for each in side) for side in (operands, results)]
    return {
        "sharding_rule": " -> ".join(sides),
        "need_replication_factors": tuple(whole),
        **({"g": group} if heads == "(k g)" else {}),
    }
