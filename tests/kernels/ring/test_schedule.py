"""The schedule of ring attention: which pieces meet and what is sent, held to the visibility of pairs."""

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.kernels.ring.schedule import Meeting, Order, Schedule

WINDOWS = st.none() | st.integers(0, 40)
ORDERS = st.builds(
    lambda causal, left, right, chunk: (causal, (left, right), chunk),
    st.booleans(),
    WINDOWS,
    WINDOWS,
    st.none() | st.integers(1, 30),
)


@st.composite
def schedules(draw: Any) -> Schedule:
    devices, pieces = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2]))
    q_piece, k_piece = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    q_length = draw(st.integers(1, devices * pieces * q_piece))
    k_length = draw(st.integers(1, devices * pieces * k_piece))
    causal, window, chunk = draw(ORDERS)
    order = Order(causal, window, chunk, k_length - q_length)
    return Schedule(devices, pieces, q_piece, k_piece, q_length, k_length, order)


def visible(schedule: Schedule) -> np.ndarray:
    """Which pairs of the padded sequence are visible, written down from the clauses."""
    places = schedule.devices * schedule.pieces
    rows, keys = np.arange(places * schedule.q_piece)[:, None], np.arange(places * schedule.k_piece)[None]
    order = schedule.order
    assert order is not None
    stands = rows + schedule.k_length - schedule.q_length
    seen = (rows < schedule.q_length) & (keys < schedule.k_length)
    left, right = order.window
    if order.causal:
        seen = seen & (keys <= stands)
    if left is not None:
        seen = seen & (keys >= stands - left)
    if right is not None:
        seen = seen & (keys <= stands + right)
    if order.chunk is not None:
        seen = seen & (keys // order.chunk == stands // order.chunk)
    return seen


def block(schedule: Schedule, seen: np.ndarray, device: int, source: int, at: tuple[int, int]) -> np.ndarray:
    row, key = schedule.place(device, at[0]), schedule.place(source, at[1])
    lines = slice(row * schedule.q_piece, (row + 1) * schedule.q_piece)
    return seen[lines, key * schedule.k_piece : (key + 1) * schedule.k_piece]


@given(schedules())
def test_meetings_say_what_is_visible(schedule: Schedule) -> None:
    """What is called hidden is, and so is what is called full; what is aligned is a call on its own."""
    seen = visible(schedule)
    every = range(schedule.devices)
    for device, source, *at in product(every, every, range(schedule.pieces), range(schedule.pieces)):
        pair = block(schedule, seen, device, source, (at[0], at[1]))
        meeting = schedule.meeting(device, source, at[0], at[1])
        if meeting is Meeting.HIDDEN:
            assert not pair.any()
        elif meeting is Meeting.FULL:
            assert pair.all()
        else:
            assert not pair.all()
        if meeting is Meeting.ALIGNED:
            order = schedule.order
            assert order is not None
            alone = Order(order.causal, order.window, None, 0)
            size = schedule.q_piece
            np.testing.assert_array_equal(pair, visible(Schedule(1, 1, size, size, size, size, alone)))


@given(schedules())
def test_no_pair_of_pieces_without_a_visible_pair_is_computed(schedule: Schedule) -> None:
    """But for chunks, whose intervals are taken for one of the piece."""
    seen = visible(schedule)
    for offset, pairs in schedule.meetings.items():
        for at, row in pairs.items():
            for device, meeting in enumerate(row):
                pair = block(schedule, seen, device, (device - offset) % schedule.devices, at)
                assert (meeting is not Meeting.HIDDEN) == pair.any()


@given(schedules())
def test_keys_reach_all_who_need_them_and_gradients_come_home(schedule: Schedule) -> None:
    """Along the chains, each device is sent what it needs, by a device that has it."""
    devices = schedule.devices
    reached = {(source, source) for source in range(devices)}
    for chain in schedule.chains:
        before = 0
        for step, offset in enumerate(chain):
            sends = schedule.sends(chain, step)
            assert len({a for a, _ in sends}) == len({b for _, b in sends}) == len(sends)
            for at, to in sends:
                source = (at - before) % devices
                assert (source, at) in reached
                reached.add((source, to))
                assert to == (source + offset) % devices
            before = offset
    for offset, pairs in schedule.meetings.items():
        needing = {
            device
            for row in pairs.values()
            for device, meeting in enumerate(row)
            if meeting is not Meeting.HIDDEN
        }
        assert {((device - offset) % devices, device) for device in needing} <= reached
        assert set(schedule.returns(offset)) == {(device, (device - offset) % devices) for device in needing}


def pairs_of(schedule: Schedule) -> Counter[int]:
    """How many pairs of pieces each device computes."""
    found: Counter[int] = Counter()
    for pairs in schedule.meetings.values():
        for row in pairs.values():
            found.update(device for device, meeting in enumerate(row) if meeting is not Meeting.HIDDEN)
    return found


def sent(schedule: Schedule) -> int:
    return sum(len(schedule.sends(chain, step)) for chain in schedule.chains for step in range(len(chain)))


CAUSAL = Order(True, (None, None), None, 0)


def test_causal_order_halves_what_is_computed_and_sent() -> None:
    schedule = Schedule(8, 1, 16, 16, 128, 128, CAUSAL)
    assert sum(pairs_of(schedule).values()) == 8 * 9 // 2
    assert sent(schedule) == 8 * 7 // 2
    assert pairs_of(schedule)[0] == 1
    assert pairs_of(schedule)[7] == 8


def test_zigzag_gives_every_device_equally_much() -> None:
    """2n + 1 pairs of halves each, of which two are cut by the diagonal."""
    assert set(pairs_of(Schedule(8, 2, 8, 8, 128, 128, CAUSAL)).values()) == {2 * 8 + 1}


@pytest.mark.parametrize(("window", "offsets"), [((1024, 0), {0, 1}), ((1024, 1024), {0, 1, 7})])
def test_a_window_touches_neighbours_alone(window: tuple[int, int], offsets: set[int]) -> None:
    schedule = Schedule(8, 1, 2048, 2048, 16384, 16384, Order(False, window, None, 0))
    assert set(schedule.meetings) == offsets
    assert sent(schedule) == 7 * (len(offsets) - 1)
    assert all(abs(offset) == 1 for chain in schedule.chains for offset in chain)


def test_what_arrays_decide_is_sent_to_all() -> None:
    schedule = Schedule(4, 1, 8, 8, 32, 32, None)
    assert sent(schedule) == 4 * 3
    assert {meeting for pairs in schedule.meetings.values() for row in pairs.values() for meeting in row} == {
        Meeting.UNKNOWN
    }


@given(schedules())
def test_slots_hold_each_pair_that_is_computed_once(schedule: Schedule) -> None:
    """Each device computes all its pairs, in as few calls as the device with most of them needs."""
    for offset, pairs in schedule.meetings.items():
        slots = schedule.slots(offset)
        for device in range(schedule.devices):
            expected = {at: row[device] for at, row in pairs.items() if row[device] is not Meeting.HIDDEN}
            found = [
                ((slot.q_pieces[device], slot.k_pieces[device]), slot.meetings[device])
                for slot in slots
                if slot.meetings[device] is not Meeting.HIDDEN
            ]
            assert len(found) == len(expected)
            assert dict(found) == expected
        assert all(set(slot.meetings) != {Meeting.HIDDEN} for slot in slots)


def test_no_device_of_a_zigzag_chooses_what_to_compute() -> None:
    """Under causal order all make the same calls, of pieces that may be other ones on each."""
    schedule = Schedule(8, 2, 8, 8, 128, 128, CAUSAL)
    assert [len(schedule.slots(offset)) for offset in range(8)] == [3] + 7 * [2]
    assert all(len(set(slot.meetings)) == 1 for offset in range(8) for slot in schedule.slots(offset))
