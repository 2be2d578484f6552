"""Launches of the TPU kernels: the grid, the blocks of each step and the devices.

A step of a grid works on one tile: a batch entry, a query head, a block of queries and a block of keys. A
`Schedule` says which; every array follows from that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attest.kernels.pallas.tpu.target import interpreting, require_tpu
from attest.kernels.varying import shape_varying_as, vary_together


@dataclass(frozen=True)
class Place:
    """The tile of a step: batch entry, query head, block of queries, block of keys; int32 scalars.

    visited: whether some pair of it may be visible. A step whose tile is not visited names another, which
    the steps before or after it name too, so that nothing is copied for it. own_k: the block of keys that the
    step itself stands at.
    """

    batch: Any
    head: Any
    q: Any
    k: Any
    visited: Any
    own_k: Any


@dataclass(frozen=True)
class Step(Place):
    """A place, and whether it is the first or the last that adds to the same outputs; bool scalars."""

    first: Any
    last: Any


@dataclass(frozen=True)
class Schedule:
    """The order in which a kernel visits its blocks.

    grid: its sizes. parallel: how many of its leading axes have outputs of their own; along the others sums
    run in order. place: from the indices of a step and the scalars by name.
    """

    grid: tuple[int, ...]
    parallel: int
    place: Callable[[tuple[Any, ...], Mapping[str, Any]], Place]


@dataclass(frozen=True)
class Blocked:
    """An array, or the shape of one to be filled, and the block of it that belongs to a place.

    block: sizes by axis; None for 1, an axis that the kernel does not see. at: from a place to block indices.
    """

    array: Any
    block: tuple[int | None, ...]
    at: Callable[[Place], tuple[Any, ...]]


def launch(
    kernel: Callable[[Step, Mapping[str, Any]], None],
    name: str,
    schedule: Schedule,
    scalars: Mapping[str, jax.Array],
    inputs: Mapping[str, Blocked],
    outputs: Mapping[str, Blocked],
    scratch: Mapping[str, tuple[int, ...]],
) -> dict[str, jax.Array]:
    """Run the kernel over the grid; return what fills the outputs, by name.

    scalars: small arrays that are read one element at a time, also to place blocks. scratch: shapes of
    float32 arrays that last from step to step. The kernel has all of them as references by one mapping.
    """
    arrays = {**scalars, **{key: x.array for key, x in inputs.items()}}
    arrays = dict(zip(arrays, vary_together(tuple(arrays.values())), strict=True))
    if not interpreting():
        arrays = {key: require_tpu(x) for key, x in arrays.items()}
    first_array = next(iter(arrays.values()))
    axes, sums = len(schedule.grid), range(schedule.parallel, len(schedule.grid))

    def spec(x: Blocked) -> pl.BlockSpec:
        def index(*arguments: Any) -> tuple[Any, ...]:
            known = dict(zip(scalars, arguments[axes:], strict=True))
            return x.at(schedule.place(arguments[:axes], known))

        return pl.BlockSpec(x.block, index)

    names = (*arrays, *outputs, *scratch)

    def body(*references: Any) -> None:
        refs = dict(zip(names, references, strict=True))
        indices = tuple(pl.program_id(axis) for axis in range(axes))
        place = schedule.place(indices, refs)
        first, last = jnp.bool_(True), jnp.bool_(True)
        for axis in sums:
            first &= indices[axis] == 0
            last &= indices[axis] == schedule.grid[axis] - 1
        kernel(Step(**vars(place), first=first, last=last), refs)

    # Errors name a reference by the parameter that it is.
    parameters = [Parameter(each, Parameter.POSITIONAL_ONLY) for each in names]
    body.__signature__ = Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    filled = pl.pallas_call(
        body,
        [shape_varying_as(first_array, x.array.shape, x.array.dtype) for x in outputs.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=schedule.grid,
            in_specs=[spec(x) for x in inputs.values()],
            out_specs=[spec(x) for x in outputs.values()],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=tuple(
                "parallel" if axis < schedule.parallel else "arbitrary" for axis in range(axes)
            )
        ),
        name=name,
    )(*arrays.values())
    return dict(zip(outputs, filled, strict=True))


def by_queries(batch: int, heads: int, q_blocks: int, steps: int, batched: bool) -> Schedule:
    """Schedule one block of queries at a time: the key blocks it sees. ranges: [N * q_blocks * 2] int32."""

    def place(at: tuple[Any, ...], scalars: Mapping[str, Any]) -> Place:
        b, h, i, step = at
        j, visited = _block(scalars, b, i, step, q_blocks, batched)
        return Place(b, h, i, j, visited, j)

    return Schedule((batch, heads, q_blocks, steps), 3, place)


def by_keys(batch: int, k_heads: int, group: int, k_blocks: int, steps: int, batched: bool) -> Schedule:
    """Schedule a block of keys at a time: all query heads of its group, and the query blocks that see it."""

    def place(at: tuple[Any, ...], scalars: Mapping[str, Any]) -> Place:
        b, key_head, j, member, step = at
        i, visited = _block(scalars, b, j, step, k_blocks, batched)
        return Place(b, key_head * group + member, i, j, visited, j)

    return Schedule((batch, k_heads, k_blocks, group, steps), 3, place)


def _block(
    scalars: Mapping[str, Any], batch: Any, own: Any, step: Any, blocks: int, batched: bool
) -> tuple[Any, Any]:
    """Return the block of a step along the range of block `own`, and whether the range reaches so far."""
    if "ranges" not in scalars:
        return step, jnp.bool_(True)
    start, stop = _range(scalars, batch, own, blocks, batched)
    return jnp.maximum(jnp.minimum(start + step, stop - 1), 0), start + step < stop


def by_bias(
    batch: int,
    heads: int,
    q_blocks: int,
    k_blocks: int,
    steps: int,
    batched: bool,
    shape: tuple[int, ...],
) -> Schedule:
    """Schedule a tile of a bias at a time: the batch entries, heads and query blocks that share it.

    shape: that of the bias. ranges: by blocks of keys where rows share the bias, as for `by_keys`, otherwise
    by blocks of queries; steps is 1 then.
    """
    per_batch, per_head, per_row = shape[0] > 1, shape[1] > 1, shape[2] > 1
    grid = (
        *(batch if per_batch else 1, heads if per_head else 1, q_blocks if per_row else 1, k_blocks),
        *(1 if per_batch else batch, 1 if per_head else heads, steps),
    )

    def place(at: tuple[Any, ...], scalars: Mapping[str, Any]) -> Place:
        b, h, i, j = at[0] + at[4], at[1] + at[5], at[2], at[3]
        if per_row:
            k, visited = _within(scalars, b, i, j, q_blocks, batched)
            return Place(b, h, i, k, visited, j)
        i, visited = _block(scalars, b, j, at[6], k_blocks, batched)
        return Place(b, h, i, j, visited, j)

    return Schedule(grid, 4, place)


def _within(
    scalars: Mapping[str, Any], batch: Any, own: Any, other: Any, blocks: int, batched: bool
) -> tuple[Any, Any]:
    """Return `other`, moved into the range of block `own`, and whether it lies there."""
    if "ranges" not in scalars:
        return other, jnp.bool_(True)
    start, stop = _range(scalars, batch, own, blocks, batched)
    return jnp.clip(other, start, jnp.maximum(stop - 1, start)), (start <= other) & (other < stop)


def _range(scalars: Mapping[str, Any], batch: Any, own: Any, blocks: int, batched: bool) -> tuple[Any, Any]:
    """Return the first block that block `own` visits, and one past the last."""
    at = ((batch * blocks if batched else 0) + own) * 2
    return scalars["ranges"][at], scalars["ranges"][at + 1]
