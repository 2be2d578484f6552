"""The tiles of a repair: 64 rows of out, dquery, or dkey and dvalue, without what may not be seen.

They are computed in the kernels' own order of sums: to the bit the same where nothing leaked.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from attest.kernels.pallas.mosaic_gpu.blocks import ROWS, Blocks
from attest.kernels.pallas.mosaic_gpu.launch.transfers import (
    first_channels,
    load_and_wait,
    matrix,
    start_store,
)
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import barriers, vector
from attest.kernels.pallas.mosaic_gpu.schedule.integers import unknown
from attest.kernels.pallas.mosaic_gpu.schedule.spans import part_span
from attest.kernels.pallas.mosaic_gpu.schedule.tiles import batch_and_part
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.mosaic_gpu.tile import pairs
from attest.kernels.pallas.mosaic_gpu.tile.dropout import dropped, kept_pairs, load_words, of_kept_pairs
from attest.kernels.pallas.mosaic_gpu.tile.normalize import finish, scaled
from attest.kernels.pallas.mosaic_gpu.tile.softmax import Softmax, nothing_known, online_softmax, rescaled
from attest.kernels.pallas.mosaic_gpu.tile.tile import (
    BY_COLUMN,
    BY_ROW,
    TILE,
    Tile,
    cotangents,
    load,
    load_bounds,
    over_rows,
    weights,
    zeros,
)

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private

CHANNELS = 128  # the most of whose sums the registers hold
_CHANNELS_OF_SUMS = 64  # the same where a sum is of sums

type Place = tuple[Any, Any, Any]  # of a tile: its batch row, or entry of partial results, head and block


@dataclass(frozen=True)
class Shared:
    """Tiles of the rows that a tile owns and of those that it visits, with two numbers of each.

    own, visited [1, rows, D]: of query and key. own_value, visited_value [1, rows, Dv]: of value and the
    cotangent of out. result [1, 64, D]. mask, bias [1, 64, k]: of the pairs of both, those of every pair.
    """

    own: Annotated[Any, lambda spec: matrix(spec.dtype, 1, ROWS, spec.shape.head_dim)]
    own_value: Annotated[Any, lambda spec: matrix(spec.dtype, 1, ROWS, spec.shape.value_dim)]
    visited: Annotated[Any, lambda spec: matrix(spec.dtype, 1, spec.shape.k_block, spec.shape.head_dim)]
    visited_value: Annotated[
        Any, lambda spec: matrix(spec.dtype, 1, spec.shape.k_block, spec.shape.value_dim)
    ]
    result: Annotated[Any, lambda spec: matrix(spec.result_dtype, 1, ROWS, spec.shape.head_dim)]
    numbers: Annotated[Any, lambda _: vector(ROWS, 2)]
    full: Annotated[Any, lambda _: barriers(1)]
    mask: Annotated[Any, pairs.room("mask")] = None
    bias: Annotated[Any, pairs.room("bias")] = None


def out(blocks: Blocks, spec: KernelSpec, arrays: Mapping[str, Any], shared: Shared, place: Place) -> None:
    """Compute 64 rows of out.

    Values that are not finite are left out; then the rows that give one of them weight are NaN there. Which
    do is found with values that are 1 in their places and 0 elsewhere.
    """
    shape = spec.shape
    entry, head, block = place
    batch, part = batch_and_part(spec, entry)
    begin, _, _, end = part_span(spec, part, (0, 0, 0, shape.k_blocks))
    tile = Tile(spec, arrays, batch, head, block * ROWS, key=None, strict=True)
    tile = replace(tile, bounds=load_bounds(tile), words=load_words(arrays))
    _fetch(shared, arrays["query"], (batch, tile.queries, head), shared.own, 0)

    def step(nonfinite: Any, acc: Any, channels: Any, j: Any, known: Softmax) -> Softmax:
        here = _with_pairs(replace(tile, key=j * blocks.k), shared)
        at = (batch, here.keys, lax.div(head, shape.group))
        _fetch(shared, arrays["key"], at, shared.visited, 0)
        score = _product(here, shared.own.at[_only()], shared.visited.at[_only()])
        found = online_softmax(here, score, compared=True, known=known)
        acc[...] = rescaled(acc[...], found._replace(moved=jnp.where(nonfinite, 0, found.moved)))
        # However small a weight is, its dtype holds 1.
        p = jnp.where(nonfinite, jnp.where(found.p > 0.0, 1.0, 0.0), found.p)
        p = dropped(p, kept_pairs(here))
        _fetch(shared, arrays["value"], at, shared.visited_value, 0)
        _change(shared.visited_value.at[_only()], partial(_part, nonfinite))
        _add(acc, p, shared.visited_value.at[_only(), :, channels])
        return found.known

    def total(nonfinite: Any, acc: Any, channels: Any) -> jax.Array:
        start = nothing_known(spec, blocks.partial_sums)
        known = lax.fori_loop(begin, end, partial(step, nonfinite, acc, channels), start)
        _, factor = finish(spec, arrays, head, known.level(spec), known.whole_norm())
        return jnp.where(nonfinite, acc[...], scaled(spec, acc[...], factor))

    result = first_channels(shared.result.at[0], shape.value_dim)

    def one(i: Any) -> None:
        def store(channels: Any, found: jax.Array) -> None:
            pl.when(i == 0)(lambda: _store(shared.own_value.at[0], channels, found))
            pl.when(i == 1)(lambda: _store(result, channels, found))

        _sum(spec, shape.value_dim, partial(total, i == 0), store)

    each(2, one)
    _change(result, lambda x, nonfinite: jnp.where(nonfinite > 0.0, jnp.nan, x), shared.own_value.at[0])
    target = (entry, head, tile.queries) if spec.results.partial else (entry, tile.queries, head)
    _write(shared, shape.value_dim, arrays["out"], target)


def d_query(
    keys: int | None, spec: KernelSpec, arrays: Mapping[str, Any], shared: Shared, place: Place
) -> None:
    """Compute 64 rows of d_query: non-finite keys are left out; the lse is NaN for those that are seen.

    keys: how many of them the fast kernel sums before it adds the sum to those of the keys before. None: all.
    """
    shape = spec.shape
    batch, head, block = place
    tile = Tile(spec, arrays, batch, head, block * ROWS, key=None, strict=True)
    tile = replace(tile, bounds=load_bounds(tile), words=load_words(arrays))
    own, of_row = (batch, tile.queries, head), (batch, head, tile.queries)
    _fetch(shared, arrays["query"], own, shared.own, 0)
    _fetch(shared, arrays["d_out"], own, shared.own_value, 0)
    lse, delta = (tile.load_by_query(arrays[name].at[of_row]) for name in ("lse", "delta"))

    def step(acc: Any, channels: Any, j: Any, _: None) -> None:
        here = _with_pairs(replace(tile, key=j * ROWS), shared)
        at = (batch, here.keys, lax.div(head, shape.group))
        _fetch(shared, arrays["key"], at, shared.visited, 0)
        _fetch(shared, arrays["value"], at, shared.visited_value, 0)
        ds = _cotangents(here, shared, lse, delta)
        _change(shared.visited.at[_only()], _finite_or_zero)
        _add(acc, ds, shared.visited.at[_only(), :, channels])

    def total(acc: Any, channels: Any) -> jax.Array:
        lax.fori_loop(0, shape.k_blocks, partial(step, acc, channels), None)
        return acc[...] * spec.logits.scale

    def total_of_sums(acc: Any, channels: Any) -> jax.Array:
        blocks = (keys or 0) // ROWS

        def add(i: Any, found: jax.Array) -> jax.Array:
            acc[...] = zeros(acc.shape)
            stop = jnp.minimum((i + 1) * blocks, shape.k_blocks)
            lax.fori_loop(i * blocks, stop, partial(step, acc, channels), None)
            return found + acc[...]

        return lax.fori_loop(0, -(-shape.k_blocks // blocks), add, acc[...]) * spec.logits.scale

    store = partial(_store, shared.result.at[0])
    if keys is None:
        _sum(spec, shape.head_dim, total, store)
    else:
        _sum(spec, shape.head_dim, total_of_sums, store, _CHANNELS_OF_SUMS)
    _write(shared, shape.head_dim, arrays["d_query"], own)


def d_key(
    step: int | None, spec: KernelSpec, arrays: Mapping[str, Any], shared: Shared, place: Place
) -> None:
    """Compute 64 rows of d_key, d_value or both: query rows that see nothing, or are NaN, are left out.

    The lse is not finite for those, and makes P 0 or NaN where they are seen. step: of a fused kernel, the
    queries in a block. None: of one that sums over a head's queries before it takes the next head's.
    """
    shape = spec.shape
    batch, key_head, block = place
    tile = Tile(spec, arrays, batch, key_head, row=None, key=block * ROWS, transposed=True, strict=True)
    tile = replace(tile, words=load_words(arrays))
    own = (batch, tile.keys, key_head)
    _fetch(shared, arrays["key"], own, shared.own, 0)
    _fetch(shared, arrays["value"], own, shared.own_value, 0)

    size = 1 if step is None else step // ROWS
    whole_blocks = -(-shape.q_blocks // size)

    def visited(visit: Any) -> tuple[Any, Any]:
        if step is None:
            return lax.div(visit, shape.q_blocks), lax.rem(visit, shape.q_blocks)
        # From the last block to the first, of all heads in turn.
        count, within = lax.div(visit, size), lax.rem(visit, size)
        block = whole_blocks - 1 - lax.div(count, shape.group)
        return lax.rem(count, shape.group), block * size + within

    def add(name: str, acc: Any, channels: Any, visit: Any, _: None) -> None:
        member, i = visited(visit)
        head = key_head * shape.group + member
        here = replace(tile, head=head, row=i * ROWS)
        here = _with_pairs(replace(here, bounds=load_bounds(here)), shared)
        at, of_row = (batch, here.queries, head), (batch, head, here.queries)
        _fetch(shared, arrays["query"], at, shared.visited, 0)
        _fetch(shared, arrays["d_out"], at, shared.visited_value, 0)
        for i, number in enumerate(("lse", "delta")):
            _fetch(shared, arrays[number], of_row, shared.numbers, i)
        lse, delta = (load(shared.numbers.at[i], BY_COLUMN) for i in range(2))
        if name == "d_key":
            left, right = _cotangents(here, shared, lse, delta), shared.visited
        else:
            left, right = dropped(_weights(here, shared, lse)[0], kept_pairs(here)), shared.visited_value
        sound = load(shared.numbers.at[0], BY_ROW) * 0.0 == 0.0
        _change(right.at[_only()], lambda x: jnp.where(over_rows(sound, x.shape), x, 0.0))
        _add(acc, left, right.at[_only(), :, channels])

    def total(name: str, acc: Any, channels: Any) -> jax.Array:
        visits = whole_blocks * size * shape.group
        lax.fori_loop(0, visits, partial(add, name, acc, channels), None)
        return acc[...] * (spec.logits.scale if name == "d_key" else 1.0)

    for name, channels in (("d_key", shape.head_dim), ("d_value", shape.value_dim)):
        if name in arrays:
            room = first_channels(shared.result.at[0], channels)
            _sum(spec, channels, partial(total, name), partial(_store, room))
            _write(shared, channels, arrays[name], own)


def _weights(tile: Tile, shared: Shared, lse: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return P of a tile whose Q and K are those that it owns and visits, and the slope of the cap."""
    folds = tile.spec.logits.folds_lse
    score = _product(tile, shared.own.at[_only()], shared.visited.at[_only()], lse if folds else None)
    return weights(tile, score, None if folds else lse, compared=True)


def _cotangents(tile: Tile, shared: Shared, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """Return dS of a tile whose dO and V are those that it owns and visits."""
    p, slope = _weights(tile, shared, lse)
    kept = kept_pairs(tile)
    first = None if tile.spec.dropout else delta
    dp = _product(tile, shared.own_value.at[_only()], shared.visited_value.at[_only()], first)
    if tile.spec.dropout:
        dp = of_kept_pairs(dp, kept, tile.by_query(delta))
    return cotangents(p, slope, dp, compared=True)


def _with_pairs(tile: Tile, shared: Shared) -> Tile:
    """Return the tile with the tiles of a mask and bias of every pair."""
    spec, held = tile.spec, dict[str, Any]()
    for name in spec.tiled_pairs:
        room = getattr(shared, name)
        held[name] = room.at[0]
        at = pairs.place(spec, name, (tile.batch, tile.head, tile.queries, tile.keys))
        _fetch(shared, tile.arrays[name], at, room, 0)
    return replace(tile, pairs=held)


def _only() -> Any:
    """Return the index of the only entry, so that addresses are computed anew, which saves registers."""
    (index,) = unknown(jnp.int32(0))
    return index


def _fetch(shared: Shared, array: Any, at: tuple[Any, ...], room: Any, index: Any) -> None:
    load_and_wait(array, at, room, index, shared.full.at[0])


def _product(tile: Tile, left: Any, right: Any, begin: jax.Array | None = None) -> jax.Array:
    """Return left @ right.T float32, of a tile's shape; begin: the start of the sum, of each query."""

    def run(acc: Any) -> jax.Array:
        if begin is not None:
            acc[...] = tile.by_query(begin)
        plgpu.wgmma(acc, left, right.T)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(tile.shape, jnp.float32))


def _add(acc: Any, left: jax.Array, right: Any) -> None:
    """Compute acc += left @ right, left rounded to the dtype of right."""
    plgpu.wgmma(acc, left.astype(right.dtype), right)
    plgpu.wgmma_wait(0)


def _sum(
    spec: KernelSpec,
    dim: int,
    total: Callable[[Any, Any], jax.Array],
    store: Callable[[Any, jax.Array], None],
    most: int = CHANNELS,
) -> None:
    """Call store(channels, total(acc, channels)) for `dim` channels, in parts that the registers hold.

    acc begins at 0.
    """
    # Equal parts: with one of 128 and one of 64 channels, the kernel holds the addresses of both, and spills.
    width = spec.shape.head_dim if spec.shape.head_dim <= most else math.gcd(spec.shape.head_dim, most)

    def part(channels: Any) -> None:
        acc = plgpu.ACC((ROWS, width), jnp.float32)
        store(channels, pl.run_scoped(lambda acc: total(acc, channels), acc))

    if dim == width:
        part(pl.ds(0, dim))
    else:
        each(dim // width, lambda i: part(pl.ds(pl.multiple_of(i * width, width), width)))
    plgpu.commit_smem()


def each(times: int, body: Callable[[Any], None]) -> None:
    """Call body(i) so many times, by the same instructions: copies of them would have to be compiled."""
    (stop,) = unknown(jnp.int32(times))
    lax.fori_loop(0, stop, lambda i, _: body(i), None)


def _store(room: Any, channels: Any, x: jax.Array) -> None:
    room[:, channels] = x.astype(room.dtype)


def _change(room: Any, change: Callable[..., jax.Array], *others: Any) -> None:
    """Set room = change(room, *others), 64 rows and up to 64 columns at a time: registers hold no more."""
    rows, columns = room.shape
    width = math.gcd(columns, ROWS)
    across = columns // width

    def part(n: Any) -> None:
        i, j = lax.div(n, across) * ROWS, lax.rem(n, across) * width
        at = (pl.ds(pl.multiple_of(i, ROWS), ROWS), pl.ds(pl.multiple_of(j, width), width))
        x, *given = (load(ref.at[at], TILE).astype(jnp.float32) for ref in (room, *others))
        room[at] = change(x, *given).astype(room.dtype)

    each(rows // ROWS * across, part)
    plgpu.commit_smem()


def _part(nonfinite: Any, x: jax.Array) -> jax.Array:
    """Return 1 where x is not finite, else 0; or x where it is finite, else 0."""
    finite = x * 0.0 == 0.0
    return jnp.where(nonfinite, jnp.where(finite, 0.0, 1.0), jnp.where(finite, x, 0.0))


def _finite_or_zero(x: jax.Array) -> jax.Array:
    return jnp.where(x * 0.0 == 0.0, x, 0.0)


def _write(shared: Shared, channels: int, array: Any, at: tuple[Any, ...]) -> None:
    start_store(shared.result, 0, channels, array, at)
    plgpu.wait_smem_to_gmem(0)
