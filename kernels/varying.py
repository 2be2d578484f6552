"""The manual axes of `jax.shard_map` over which a group of values varies.

A loop's carry must vary over the same axes before and after each step, so constants that start a loop and
inputs that are replicated must first join the axes of the inputs that are sharded. Outside `shard_map`
nothing happens.
"""

import jax


def vary_together[T](tree: T) -> T:
    """Makes every leaf of `tree` vary over the union of the manual axes of its leaves (clause S22).

    The transpose of the cast is a sum over the axis, so gradients of a replicated input are complete.
    """
    leaves, treedef = jax.tree.flatten(tree)
    axes = [_varying_axes(leaf) for leaf in leaves]
    union = frozenset[str]().union(*axes)
    cast = [
        jax.lax.pcast(leaf, tuple(sorted(union - own)), to="varying") if union - own else leaf
        for leaf, own in zip(leaves, axes, strict=True)
    ]
    return jax.tree.unflatten(treedef, cast)


def _varying_axes(leaf: jax.Array) -> frozenset[str]:
    return jax.typeof(leaf).manual_axis_type.varying
