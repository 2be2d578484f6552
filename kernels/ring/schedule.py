"""The schedule of ring attention: which pieces of the sequence meet, when, and what is sent for it.

Everything here is known before the program is traced, in plain numbers. The sequence is cut into equal
pieces: one for each device, or two for each, where device d of n has pieces d and 2n - 1 - d, so that all
have equally much to do under causal order ("zigzag").

A device meets the keys of the device that lies an offset before it. Of a static causal order, window or
chunk it is known which pairs of pieces are hidden: they are neither computed nor sent. What arrays decide
is seen at run time alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

type Ints = NDArray[np.int64]


class Meeting(Enum):
    """A meeting of a piece of the rows and a piece of the keys: what is known of its pairs."""

    HIDDEN = "no pair is visible"
    FULL = "every pair is visible, masks, biases and segments aside"
    ALIGNED = "the order of both pieces is that of a call on them alone"
    RANGES = "each row sees an interval of the keys"
    UNKNOWN = "arrays decide at run time"


@dataclass(frozen=True)
class Order:
    """Causal order, window and chunks (S6, S7, S24), where nothing else decides what rows see.

    shift: the position of row 0 among those of the keys.
    """

    causal: bool
    window: tuple[int | None, int | None]
    chunk: int | None
    shift: int

    @property
    def hides(self) -> bool:
        """Whether any pair may be hidden by the order of keys."""
        return self.causal or self.window != (None, None) or self.chunk is not None

    def interval(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the first and the last key that rows see, before they are cut at the ends of the keys."""
        position = rows + self.shift
        left, right = self.window
        low = np.full_like(position, np.iinfo(np.int64).min) if left is None else position - left
        high = np.full_like(position, np.iinfo(np.int64).max) if right is None else position + right
        if self.causal:
            high = np.minimum(high, position)
        if self.chunk is not None:
            first = position - position % self.chunk
            low, high = np.maximum(low, first), np.minimum(high, first + self.chunk - 1)
        return low, high


def likely_strategy(order: Order | None, q_local: int, k_local: int) -> str:
    """Return the strategy that is likely to be fast: zigzag shares out what causal order leaves to do.

    q_local, k_local: the rows and the keys of a device, which zigzag halves.
    """
    even = q_local % 2 == 0 and k_local % 2 == 0
    causal = order is not None and order.causal and order.window[0] is None and order.chunk is None
    return "zigzag" if causal and even else "ring"


@dataclass(frozen=True)
class Slot:
    """A call that all devices make at one offset, each of a pair of pieces of its own.

    q_pieces, k_pieces: of the rows and of the keys, by device. meetings: by device, HIDDEN for one that has
    nothing to compute.
    """

    q_pieces: tuple[int, ...]
    k_pieces: tuple[int, ...]
    meetings: tuple[Meeting, ...]


@dataclass(frozen=True)
class Schedule:
    """The communication schedule.

    devices: how many share the sequence. pieces: how many each of them has, 1 or 2. q_piece, k_piece: rows
    and keys of a piece. q_length, k_length: of the sequence; what lies past them pads the last pieces. order:
    None where arrays decide what rows see.
    """

    devices: int
    pieces: int
    q_piece: int
    k_piece: int
    q_length: int
    k_length: int
    order: Order | None

    def place(self, device: Any, piece: Any) -> Any:
        """Return which piece of the sequence the piece of a device is; both may be traced."""
        return device + piece * (2 * self.devices - 1 - 2 * device)

    def meeting(self, device: int, source: int, q_piece: int, k_piece: int) -> Meeting:
        """Return what is known of a piece of a device's rows and one of another device's keys."""
        row = self.place(device, q_piece)
        first_key = self.place(source, k_piece) * self.k_piece
        stop = min(first_key + self.k_piece, self.k_length)
        if row * self.q_piece >= self.q_length or first_key >= self.k_length:
            return Meeting.HIDDEN
        if self.order is None:
            return Meeting.UNKNOWN
        order = self.order
        low, high = self._intervals
        low, high = low[row], high[row]
        sees = (low < stop) & (high >= first_key) & (low <= high)
        if not sees.any():
            return Meeting.HIDDEN
        whole = len(low) == self.q_piece and stop == first_key + self.k_piece
        if whole and bool(((low <= first_key) & (high >= stop - 1)).all()):
            return Meeting.FULL
        aligned = row * self.q_piece + order.shift == first_key and self.q_piece == self.k_piece
        return Meeting.ALIGNED if whole and aligned and order.chunk is None else Meeting.RANGES

    @cached_property
    def _intervals(self) -> tuple[list[Ints], list[Ints]]:
        """The interval of keys of each row, by piece; rows of padding are left out."""
        assert self.order is not None
        lows: list[Ints] = []
        highs: list[Ints] = []
        for piece in range(self.devices * self.pieces):
            start = piece * self.q_piece
            rows = np.arange(start, min(start + self.q_piece, max(self.q_length, start)), dtype=np.int64)
            low, high = self.order.interval(rows)
            lows.append(np.maximum(low, 0))
            highs.append(np.minimum(high, self.k_length - 1))
        return lows, highs

    @cached_property
    def meetings(self) -> Mapping[int, Mapping[tuple[int, int], tuple[Meeting, ...]]]:
        """The meeting on each device, by offset, then by (row piece, key piece). Hidden ones are left out."""
        found: dict[int, dict[tuple[int, int], tuple[Meeting, ...]]] = {}
        for offset in range(self.devices):
            pairs: dict[tuple[int, int], tuple[Meeting, ...]] = {}
            for q_piece in range(self.pieces):
                for k_piece in range(self.pieces):
                    row = tuple(
                        self.meeting(device, (device - offset) % self.devices, q_piece, k_piece)
                        for device in range(self.devices)
                    )
                    if set(row) != {Meeting.HIDDEN}:
                        pairs[q_piece, k_piece] = row
            if pairs:
                found[offset] = pairs
        return found

    def slots(self, offset: int) -> tuple[Slot, ...]:
        """Return the calls at an offset: as few as the device with most pairs needs.

        Those of one pair of pieces on all devices come first. Under causal order each device of a zigzag has
        one more full pair, but not of the same pieces: they share a call, and no device waits for another.
        """
        pairs = self.meetings.get(offset % self.devices, {})
        shared = [at for at, row in pairs.items() if Meeting.HIDDEN not in row]
        slots = [
            Slot((q_piece,) * self.devices, (k_piece,) * self.devices, pairs[q_piece, k_piece])
            for q_piece, k_piece in shared
        ]
        rest = [
            [at for at, row in pairs.items() if at not in shared and row[device] is not Meeting.HIDDEN]
            for device in range(self.devices)
        ]
        for number in range(max(map(len, rest))):
            some = next(own[number] for own in rest if len(own) > number)
            ats = [own[number] if len(own) > number else some for own in rest]
            meetings = (
                pairs[at][device] if len(rest[device]) > number else Meeting.HIDDEN
                for device, at in enumerate(ats)
            )
            slots.append(Slot(tuple(at[0] for at in ats), tuple(at[1] for at in ats), tuple(meetings)))
        return tuple(slots)

    @cached_property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """The offsets other than 0 that are needed, in the order in which keys travel.

        One chain where they follow each other from 1 on; else one of positive and one of negative offsets, so
        that neighbours on both sides are near.
        """
        needed = [offset for offset in self.meetings if offset]
        if needed == list(range(1, len(needed) + 1)):
            return (tuple(needed),) if needed else ()
        near = [x if x <= self.devices // 2 else x - self.devices for x in needed]
        ahead, behind = sorted(x for x in near if x > 0), sorted((x for x in near if x < 0), reverse=True)
        return tuple(tuple(chain) for chain in (ahead, behind) if chain)

    def needs(self, source: int, offset: int) -> bool:
        """Return whether the device that lies an offset behind `source` needs its keys."""
        pairs = self.meetings.get(offset % self.devices, {})
        device = (source + offset) % self.devices
        return any(row[device] is not Meeting.HIDDEN for row in pairs.values())

    def sends(self, chain: tuple[int, ...], step: int) -> tuple[tuple[int, int], ...]:
        """Return (from, to) of each device that passes keys on at a step of a chain, if they are needed."""
        before = chain[step - 1] if step else 0
        return tuple(
            ((source + before) % self.devices, (source + chain[step]) % self.devices)
            for source in range(self.devices)
            if any(self.needs(source, later) for later in chain[step:])
        )

    def returns(self, offset: int) -> tuple[tuple[int, int], ...]:
        """Return (from, to) of each device that sends gradients of keys home."""
        return tuple(
            ((source + offset) % self.devices, source)
            for source in range(self.devices)
            if self.needs(source, offset)
        )
