"""Tiles of shared memory, and their copies from and to memory by the TMA unit.

The TMA unit reads rows past the end of an array as 0 and writes none, if it counts rows one by one. But a
tile that products read lies in groups of eight rows, each in parts of one swizzle width. Three ways of
copying a tile of an array [B, S, H, D] follow:

- A row that is one part wide: groups follow each other, so the tile is `rows` rows. One copy takes any S.
- S is a multiple of eight: the unit counts groups. One copy.
- Otherwise each group is a copy. The array is then [B, S, H, parts, columns], as `operand_shape` says.

The unit also reads columns past the end of a row as 0 and writes none. So where a row of the tile is one part
wide, an array may have fewer columns, if its rows begin at multiples of 16 bytes. For that purpose a wider
tile can be cut into pieces that are one part wide each: `Pieces`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir.dialects import llvm

plgpu: Any = mosaic_gpu  # a checker takes its transforms for abstract

GROUP = 8  # the rows that a swizzle pattern spans
PART_BYTES = 128  # of the widest part of a row
_UNGROUPED = 4  # the axes of an array that is not copied group by group
_ALIGNED = 16  # bytes: where the TMA unit lets a row begin


@dataclass(frozen=True)
class Tiles:
    """[count, rows, D] in shared memory, seen in two ways.

    tiled: as products read it, and registers are written to it. copied: as the TMA unit sees it, [count,
    rows, D] of rows that are one part wide, else [count, groups, parts, 8, columns]. These are the same bytes
    by their layouts. Pallas does not promise it: tests on a GPU compare results.
    """

    tiled: Any
    copied: Any

    @property
    def at(self) -> Any:
        """The view by index, as of a reference."""
        return self.tiled.at

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in tiles."""
        return self.tiled.shape


@dataclass(frozen=True)
class Pieces:
    """The channels of [count, rows, D] in shared memory, in one or several `Tiles` side by side."""

    tiles: tuple[Tiles, ...]


def tiles_of(room: Tiles | Pieces) -> tuple[Tiles, ...]:
    """Return the tiles that stand side by side."""
    return room.tiles if isinstance(room, Pieces) else (room,)


def widths_of_pieces(dtype: Any, channels: int, width: int) -> tuple[int, ...]:
    """Return the widths of the pieces of a tile of `width` channels, for arrays of `channels`.

    It is one piece where arrays have all channels, or must be padded, and where a row is one part wide.
    """
    itemsize = jnp.dtype(dtype).itemsize
    if channels == width or channels * itemsize % _ALIGNED or parts_of(dtype, width) == 1:
        return (width,)
    widest = PART_BYTES // itemsize
    whole, rest = divmod(width, widest)
    return (widest,) * whole + ((rest,) if rest else ())


def matrix(dtype: Any, count: int, rows: int, channels: int) -> Any:
    """Return the allocation of `Tiles` [count, rows, channels], in the layout of TMA writes and WGMMA reads.

    Rows are cut into parts of 128, 64 or 32 bytes, the largest of these that divides a row.
    """
    columns, parts = columns_of(dtype, channels), parts_of(dtype, channels)
    shape = (count, rows, channels) if parts == 1 else (count, rows // GROUP, parts, GROUP, columns)
    copied = plgpu.SMEM(shape, dtype, transforms=(_swizzle(dtype, columns),))
    return plgpu.RefUnion(tiled(dtype, count, rows, channels), copied)


def pieces(dtype: Any, count: int, rows: int, widths: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the allocation of `Pieces`, of [count, rows, width] for each width."""
    return tuple(matrix(dtype, count, rows, width) for width in widths)


def tiled(dtype: Any, count: int, rows: int, channels: int) -> Any:
    """Return the allocation of [count, rows, channels] in that layout, which one copy of an array fills.

    The array's rows and their number are multiples of what the layout has.
    """
    columns = columns_of(dtype, channels)
    transforms = (plgpu.TilingTransform((GROUP, columns)), _swizzle(dtype, columns))
    return plgpu.SMEM((count, rows, channels), dtype, transforms=transforms)


def _swizzle(dtype: Any, columns: int) -> Any:
    return plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)


def columns_of(dtype: Any, channels: int) -> int:
    """Return the columns of a part of a row."""
    itemsize = jnp.dtype(dtype).itemsize
    return plgpu.find_swizzle(channels * itemsize * 8) // itemsize


def parts_of(dtype: Any, channels: int) -> int:
    """Return how many parts a row has."""
    return channels // columns_of(dtype, channels)


def in_groups(dtype: Any, length: int, channels: int) -> bool:
    """Return whether arrays of such a length are copied group by group."""
    return length % GROUP != 0 and parts_of(dtype, channels) > 1


def copies(dtype: Any, length: int, channels: int, rows: int) -> int:
    """Return how many copies fill a tile of so many rows from an array of such a length."""
    return rows // GROUP if in_groups(dtype, length, channels) else 1


def operand_shape(dtype: Any, shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Return the shape in which an array [B, S, H, D] is copied from or to tiles of `width` channels.

    D is `width` where the TMA unit cannot copy fewer channels, and parts and columns where it copies groups.
    """
    length, channels = shape[1], shape[3]
    if parts_of(dtype, width) == 1 and channels * jnp.dtype(dtype).itemsize % _ALIGNED == 0:
        return shape
    if not in_groups(dtype, length, width):
        return (*shape[:3], width)
    return (*shape[:3], parts_of(dtype, width), columns_of(dtype, width))


def from_operand(x: jax.Array) -> jax.Array:
    """Return the array [B, S, H, D] that `operand_shape` has given its shape."""
    return x.reshape(*x.shape[:3], -1)


def start_load(array: Any, at: tuple[Any, ...], room: Any, index: Any, barrier: Any) -> None:
    """Start the copies of `array.at[at]` to an entry of `room`: `copies` of them arrive at the barrier.

    room: `Tiles` or `Pieces`, with (batch row, rows, head) for `at`; or another reference, for one copy.
    """

    def start(memory: Any, shared: Any) -> None:
        plgpu.copy_gmem_to_smem(memory, shared, barrier)

    if isinstance(room, Tiles | Pieces):
        _each_copy(start, array, at, room, index)
    else:
        start(array.at[at], room.at[index])


def load_and_wait(array: Any, at: tuple[Any, ...], room: Any, index: Any, barrier: Any) -> None:
    """Copy as `start_load` does, one copy after another: each is the only arrival of the barrier."""

    def copy(memory: Any, shared: Any) -> None:
        plgpu.copy_gmem_to_smem(memory, shared, barrier)
        plgpu.barrier_wait(barrier)

    if isinstance(room, Tiles):
        _each_copy(copy, array, at, room, index)
    else:
        copy(array.at[at], room.at[index])


def start_store(room: Tiles | Pieces, index: Any, channels: int, array: Any, at: tuple[Any, ...]) -> None:
    """Start the copies of an entry of `room`, or of its first channels, to `array.at[at]`.

    The TMA unit takes what is contiguous: all channels of all rows, or a part of those of one group. Several
    pieces are stored as far as the array has channels.
    """
    tiles, *others = tiles_of(room)
    rows, width = tiles.shape[1:]
    if not others and channels < width and len(array.shape) == _UNGROUPED:
        for i in range(0, rows, GROUP):
            few = tuple(pl.ds(x.start + i, GROUP) if isinstance(x, pl.Slice) else x for x in at)
            plgpu.copy_smem_to_gmem(tiles.at[index, pl.ds(i, GROUP), pl.ds(0, channels)], array.at[few])
        return
    _each_copy(lambda memory, shared: plgpu.copy_smem_to_gmem(shared, memory), array, at, room, index)


def fence_copies() -> None:
    """Let copies that start from here on come after what was written to memory from registers."""

    def fence(_: Any) -> None:
        llvm.inline_asm(None, [], "fence.proxy.async;", "", has_side_effects=True)

    plgpu.inline_mgpu()(fence)()


def write_pieces(array: Any, at: tuple[Any, ...], pieces: tuple[jax.Array, ...]) -> None:
    """Write pieces of rows, in registers, side by side to `array.at[at]`."""
    first = 0
    for x in pieces:
        array[(*at, pl.ds(first, x.shape[1]))] = x
        first += x.shape[1]


def first_channels(room: Any, channels: int) -> Any:
    """Return the first channels of [rows, D] in shared memory."""
    return room if room.shape[1] == channels else room.at[:, pl.ds(0, channels)]


def _each_copy(
    copy: Callable[[Any, Any], None], array: Any, at: tuple[Any, ...], room: Tiles | Pieces, index: Any
) -> None:
    """Call copy(memory, shared) for each copy between `array.at[at]` and an entry of `room`."""
    tiles, *others = tiles_of(room)
    if others:
        first = 0
        for piece in (tiles, *others):
            columns = _columns(first, piece.shape[2], array.shape[-1])
            copy(array.at[(*at, columns)], piece.copied.at[index])
            first += piece.shape[2]
        return
    if len(array.shape) == _UNGROUPED:
        one_part = len(tiles.copied.shape) == len(tiles.shape)
        shared = (tiles.copied if one_part else tiles).at[index]
        copy(_all_columns(array, at, tiles.shape[2]), shared)
        return
    batch, rows, head = at
    parts = array.shape[3]

    def group(state: tuple[Any, Any]) -> tuple[Any, Any]:
        i, left = state
        # The array has a row's parts one after the other, and the tile each part of all eight rows.
        shared = tiles.copied.at[index, i, pl.ds(0, parts)].transpose((1, 0, 2))
        copy(array.at[batch, pl.ds(rows.start + i * GROUP, GROUP), head], shared)
        return i + 1, lax.optimization_barrier(lax.shift_right_logical(left, jnp.int32(1)))

    # A bit for each group: a loop that counts is unrolled, and then the producer spills registers.
    first, left = lax.optimization_barrier((jnp.int32(0), jnp.int32(1 << (rows.size // GROUP - 1))))
    lax.while_loop(lambda state: state[1] != 0, group, (first, left))


def _all_columns(array: Any, at: tuple[Any, ...], width: int) -> Any:
    """Return `array.at[at]` with `width` columns, the last of them past the end where the array has fewer."""
    if array.shape[-1] == width:
        return array.at[at]
    return array.at[(*at, _columns(0, width, array.shape[-1]))]


def _columns(first: int, width: int, end: int) -> Any:
    """Return `width` columns from the first on, the last of them past the end where there are fewer."""
    if first + width <= end:
        return pl.ds(first, width)
    # Pallas refuses a slice past the end if it knows where the slice starts.
    return pl.ds(lax.optimization_barrier(jnp.int32(first)), width)
