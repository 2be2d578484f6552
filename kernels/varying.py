"""The manual axes of `jax.shard_map` over which values vary, in every version of JAX that is allowed.

A loop's carry must vary over the same axes before and after each step, so constants that start a loop and
inputs that are replicated must first join the axes of the inputs that are sharded. Outside `shard_map`
nothing happens.

JAX has renamed what this needs; the rest of the kernels must not see that, so all of it is here.
"""

from typing import Any

import jax
from jax import lax


def vary_together[T](tree: T) -> T:
    """Make every leaf of `tree` vary over the union of the manual axes of its leaves (clause S22).

    The transpose of the cast is a sum over the axis, so gradients of a replicated input are complete.
    """
    leaves, treedef = jax.tree.flatten(tree)
    axes = [varying_axes(leaf) for leaf in leaves]
    union = frozenset[str]().union(*axes)
    cast = [
        _vary(leaf, tuple(sorted(union - own))) if union - own else leaf
        for leaf, own in zip(leaves, axes, strict=True)
    ]
    return jax.tree.unflatten(treedef, cast)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Return the manual axes over which `x` varies; none outside of `shard_map`."""
    name, own = _varying(x)
    return own.varying if name == "manual_axis_type" else own


def shape_varying_as(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return the type of an array of this shape and dtype that varies over the manual axes of `x`."""
    name, own = _varying(x)
    return jax.ShapeDtypeStruct(shape, dtype, **{name: own})


def _varying(x: jax.Array) -> tuple[str, Any]:
    """Return what the type of `x` records about its manual axes, and under which name."""
    kind: Any = jax.typeof(x)
    # Before jax 0.10 there was only the set of axes.
    name = "manual_axis_type" if hasattr(kind, "manual_axis_type") else "vma"
    return name, getattr(kind, name)


def _vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Cast `x` to vary over these axes, too: it does not vary over any of them yet."""
    if hasattr(lax, "pcast"):
        return lax.pcast(x, axes, to="varying")
    # Before jax 0.8.1: looked up by name, as newer versions do not have it.
    return getattr(lax, "pvary")(x, axes)  # noqa: B009
