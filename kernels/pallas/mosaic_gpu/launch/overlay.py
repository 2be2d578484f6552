"""Shared memory that is used twice: tiles of a record lie where others are read no more, or are not used."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu

from attest.kernels.pallas.mosaic_gpu.launch.transfers import Pieces, Tiles

plgpu: Any = mosaic_gpu  # a checker takes its transforms for abstract

_ALIGNMENT = 1024  # Pallas begins each array of shared memory at a multiple of so many bytes
_MEMORY = "memory"

type Rooms = Mapping[str, Any]


@dataclass(frozen=True)
class Overlay:
    """A room that is a record of its own, whose tiles lie in the memory of the rooms beside it.

    record: called with what a kernel sees of `rooms`, by name. keeps: the names of rooms beside it that lie
    where they are, and can be read as long as its own.
    """

    record: Callable[..., Any]
    rooms: Rooms
    keeps: tuple[str, ...] = ()


def allocated(rooms: Rooms) -> Rooms:
    """Return what Pallas is to allocate for the rooms of a launch."""
    layouts = _layouts(rooms)
    if len(layouts) == 1:
        return rooms
    union = plgpu.RefUnion(*chain.from_iterable(map(_views, layouts.values())))
    return {_MEMORY: union, **_barriers(rooms)}


def filled(rooms: Rooms, refs: Rooms) -> dict[str, Any]:
    """Return what a kernel sees of the rooms of a launch. refs: of what was allocated, by name."""
    layouts = _layouts(rooms)
    if len(layouts) == 1:
        return {key: _seen(room, refs[key]) for key, room in rooms.items()}
    views = iter(refs[_MEMORY])
    tiles = {name: _of_views(layout, next(views), next(views)) for name, layout in layouts.items()}

    def of_record(rooms: Rooms, name: str) -> dict[str, Any]:
        found = {key: refs[name + key] for key, room in rooms.items() if _is_barrier(room)}
        found |= {key: tile for key, tile in tiles.get(name, {}).items() if key in rooms}
        return found | {
            key: room.record(**of_record(room.rooms, f"{name}{key}."))
            for key, room in rooms.items()
            if isinstance(room, Overlay)
        }

    return of_record(rooms, "")


def shared_bytes(rooms: Rooms) -> int:
    """Return the shared memory that a launch with such rooms takes, but for its barriers."""
    return max(_bytes(layout.values()) for layout in _layouts(rooms).values())


def _layouts(rooms: Rooms, name: str = "", kept: Rooms | None = None) -> dict[str, dict[str, Any]]:
    """Return the rooms, by their names, that lie side by side in each use of the memory.

    The name of a use is that of its record, with those of the records around it. What is kept comes first in
    both uses, and so lies at the same place.
    """
    overlays = {key: room for key, room in rooms.items() if isinstance(room, Overlay)}
    first = {key: rooms[key] for room in overlays.values() for key in room.keeps}
    rest = {key: room for key, room in rooms.items() if key not in overlays and not _is_barrier(room)}
    layouts = {name: {**(kept or {}), **first, **rest}}
    for key, room in overlays.items():
        layouts |= _layouts(room.rooms, f"{name}{key}.", {it: rooms[it] for it in room.keeps})
    return {name: layout for name, layout in layouts.items() if layout}


def _barriers(rooms: Rooms, name: str = "") -> dict[str, Any]:
    found = {name + key: room for key, room in rooms.items() if _is_barrier(room)}
    for key, room in rooms.items():
        if isinstance(room, Overlay):
            found |= _barriers(room.rooms, f"{name}{key}.")
    return found


def _is_barrier(room: Any) -> bool:
    return isinstance(room, plgpu.Barrier)


def _flat(rooms: Iterable[Any]) -> list[Any]:
    return [x for room in rooms for x in (room if isinstance(room, tuple) else (room,))]


def _bytes(rooms: Iterable[Any]) -> int:
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _flat(rooms)]
    return sum(-(-x.size * x.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for x in arrays)


def _views(rooms: Rooms) -> tuple[list[Any], list[Any]]:
    """Return the two views of rooms, at the same addresses; a room with one view is in both."""
    flat = _flat(rooms.values())
    tiled, copied = ([x.refs[i] if isinstance(x, plgpu.RefUnion) else x for x in flat] for i in range(2))
    return tiled, copied


def _of_views(rooms: Rooms, tiled: Iterable[Any], copied: Iterable[Any]) -> dict[str, Any]:
    """Return what a kernel sees of rooms, by the references of both views."""
    views = zip(tiled, copied, strict=True)

    def of_one(room: Any) -> Any:
        both = next(views)
        return Tiles(*both) if isinstance(room, plgpu.RefUnion) else both[0]

    return {
        key: Pieces(tuple(map(of_one, room))) if isinstance(room, tuple) else of_one(room)
        for key, room in rooms.items()
    }


def _seen(room: Any, refs: Any) -> Any:
    """Return what a kernel sees of an allocation, by its references: `Pieces`, `Tiles` or a reference."""
    if isinstance(room, tuple):
        return Pieces(tuple(Tiles(*x) for x in refs))
    return Tiles(*refs) if isinstance(room, plgpu.RefUnion) else refs
