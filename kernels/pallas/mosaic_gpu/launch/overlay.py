"""Shared memory that is used twice: by a kernel's tiles, and by others when those are read no more."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu

from attest.kernels.pallas.mosaic_gpu.launch.transfers import Pieces, Tiles

plgpu: Any = mosaic_gpu  # a checker takes its transforms for abstract

_ALIGNMENT = 1024  # Pallas begins each array of shared memory at a multiple of so many bytes
_MEMORY = "memory"

type Rooms = Mapping[str, Any]


@dataclass(frozen=True)
class Later:
    """The rooms of a record that lie in the memory of a launch's other rooms, when those are read no more.

    rooms: as of a launch, by the fields of `record`. keeps: the names of other rooms that are read meanwhile.
    """

    record: Callable[..., Any]
    rooms: Rooms
    keeps: tuple[str, ...] = ()


def allocated(rooms: Rooms) -> Rooms:
    """Return what Pallas is to allocate for the rooms of a launch, of which one may be `Later`."""
    name, later = _later(rooms)
    if later is None:
        return rooms
    union = plgpu.RefUnion(*_views(_tiles(rooms, later.keeps)), *_views(_tiles(later.rooms)))
    kept = {key: x for key, x in rooms.items() if key in later.keeps or _is_barrier(x)}
    behind = {f"{name}_{key}": x for key, x in later.rooms.items() if _is_barrier(x)}
    return {_MEMORY: union, **kept, **behind}


def filled(rooms: Rooms, refs: Rooms) -> dict[str, Any]:
    """Return what a kernel sees of the rooms of a launch. refs: of what was allocated, by name."""
    name, later = _later(rooms)
    if later is None:
        return {key: _of_one(room, refs[key]) for key, room in rooms.items()}
    first_tiled, first_copied, tiled, copied = refs[_MEMORY]
    found = _of_views(_tiles(rooms, later.keeps), first_tiled, first_copied)
    behind = _of_views(_tiles(later.rooms), tiled, copied)
    behind |= {key: refs[f"{name}_{key}"] for key, x in later.rooms.items() if _is_barrier(x)}
    found |= {key: refs[key] for key in rooms if key in refs}
    return {**found, name: later.record(**behind)}


def shared_bytes(rooms: Rooms) -> int:
    """Return the shared memory that a launch with such rooms takes, but for its barriers."""
    _, later = _later(rooms)
    if later is None:
        return _bytes(_tiles(rooms).values())
    first, kept = _tiles(rooms, later.keeps), {key: x for key, x in rooms.items() if key in later.keeps}
    return max(_bytes(first.values()), _bytes(_tiles(later.rooms).values())) + _bytes(kept.values())


def _later(rooms: Rooms) -> tuple[str, Later | None]:
    return next(((name, x) for name, x in rooms.items() if isinstance(x, Later)), ("", None))


def _is_barrier(room: Any) -> bool:
    return isinstance(room, plgpu.Barrier)


def _tiles(rooms: Rooms, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the rooms that are neither barriers nor later, nor one of these."""
    return {
        key: x
        for key, x in rooms.items()
        if not _is_barrier(x) and not isinstance(x, Later) and key not in but
    }


def _flat(rooms: Iterable[Any]) -> list[Any]:
    return [x for room in rooms for x in (room if isinstance(room, tuple) else (room,))]


def _bytes(rooms: Iterable[Any]) -> int:
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _flat(rooms)]
    return sum(-(-x.size * x.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for x in arrays)


def _views(rooms: Rooms) -> tuple[list[Any], list[Any]]:
    """Return the two views of all rooms, at the same addresses; a room with one view is in both."""
    flat = _flat(rooms.values())
    tiled, copied = ([x.refs[i] if isinstance(x, plgpu.RefUnion) else x for x in flat] for i in range(2))
    return tiled, copied


def _of_views(rooms: Rooms, tiled: Iterable[Any], copied: Iterable[Any]) -> dict[str, Any]:
    views = zip(tiled, copied, strict=True)

    def of_one(room: Any) -> Any:
        both = next(views)
        return Tiles(*both) if isinstance(room, plgpu.RefUnion) else both[0]

    return {
        key: Pieces(tuple(map(of_one, room))) if isinstance(room, tuple) else of_one(room)
        for key, room in rooms.items()
    }


def _of_one(room: Any, refs: Any) -> Any:
    """Return what a kernel sees of an allocation, by its references: `Pieces`, `Tiles` or a reference."""
    if isinstance(room, tuple):
        return Pieces(tuple(Tiles(*x) for x in refs))
    return Tiles(*refs) if isinstance(room, plgpu.RefUnion) else refs
