"""The call of a pair of pieces: some rows of this device against some keys of one device.

Its visibility is that of the whole sequence. What causal order, windows, chunks, lengths and ranges leave
of the keys is an interval for each row, which becomes the range of the call (S28); positions, segments, masks
and biases are cut; dropout and ALiBi get the coordinates of the whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attest.kernels.call.axes import AXES
from attest.kernels.call.call import Call
from attest.kernels.call.positions import Positions, moved_origin
from attest.kernels.contract import Passes, Settings
from attest.kernels.ring.schedule import Meeting, Schedule
from attest.kernels.sharding.explicit import FLOATS
from attest.kernels.varying import vary_together, varying_axes
from attest.kernels.visibility.intervals import Rows, Whole, describe_rows

# The arrays of a call that belong to keys, and the axis of the keys.
KEY_AXES = {name: axes.index("k") for name, axes in AXES.items() if "k" in axes}

type Shard = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Ring:
    """The static settings of a call whose sequence is split over the devices of an axis.

    name: of the axis. gathers: whether each device gets all keys at once, rather than those of one device
    after those of another. dtypes: of the float arrays by name, as passes read them: see `widened`.
    """

    passes: Passes
    settings: Settings
    name: str
    schedule: Schedule
    gathers: bool = False
    dtypes: tuple[tuple[str, str], ...] = ()

    def read(self, call: Call) -> Call:
        """Return a call with float arrays in the dtypes that passes read."""
        return replace(call, **{name: getattr(call, name).astype(dtype) for name, dtype in self.dtypes})

    @property
    def unrounded(self) -> Settings:
        """The settings of the call of a pair: normalised, and rounded when all pairs are merged.

        An out that is not to be normalised is then made of the maxima of all pairs.
        """
        reads = not self.settings.normalize_output
        return replace(self.settings, unrounded=True, normalize_output=True, reads_row_max=reads)


@dataclass(frozen=True)
class Own:
    """The share of a device: its part of the call, what its rows see in the whole, and its number."""

    call: Call
    rows: Rows
    device: Any  # a traced integer


def widened(call: Call) -> tuple[Call, tuple[tuple[str, str], ...]]:
    """Return a call with float arrays that several devices share in float32, and the dtypes of all.

    So their gradients are summed over devices before they are rounded, once.
    """
    floats = {name: x for name in FLOATS if (x := getattr(call, name)) is not None}
    every = frozenset[str]().union(*(varying_axes(x) for x in jax.tree.leaves(call)))
    shared = {name: x.astype(jnp.float32) for name, x in floats.items() if varying_axes(x) != every}
    return replace(call, **shared), tuple((name, x.dtype.name) for name, x in floats.items())


def own_part(ring: Ring, call: Call) -> Own:
    """Return the part of the call on this device; intervals are cut at the ends of the keys."""
    schedule, device = ring.schedule, lax.axis_index(ring.name)
    starts = [schedule.place(device, piece) * schedule.q_piece for piece in range(schedule.pieces)]
    index = jnp.concatenate([start + jnp.arange(schedule.q_piece, dtype=jnp.int32) for start in starts])
    rows = describe_rows(call, Whole(index, schedule.q_length, schedule.k_length))
    first, last = rows.first, rows.last
    first = jnp.zeros((1, index.size), jnp.int32) if first is None else first
    last = jnp.full((1, index.size), schedule.k_length - 1, jnp.int32) if last is None else last
    first, last = jnp.clip(first, 0, schedule.k_length), jnp.clip(last, -1, schedule.k_length - 1)
    return Own(call, replace(rows, first=first, last=last), device)


def travelling(call: Call) -> dict[str, jax.Array]:
    """Return the arrays of a device's keys; masks and biases where their columns are split like the keys."""
    given = {"kv_positions": call.positions.kv} | {
        name: getattr(call, name) for name in KEY_AXES if name != "kv_positions"
    }
    found = {name: x for name, x in given.items() if x is not None}
    return {name: x for name, x in found.items() if x.shape[KEY_AXES[name]] == call.key.shape[1]}


@dataclass(frozen=True)
class Run:
    """Some entries of an axis that follow each other: where they begin, also traced, and how many."""

    first: Any
    size: int

    def of(self, x: jax.Array, axis: int) -> jax.Array:
        """Return these entries of an array."""
        if self.size == x.shape[axis]:
            return x
        if isinstance(self.first, int):
            return lax.slice_in_dim(x, self.first, self.first + self.size, axis=axis)
        return lax.dynamic_slice_in_dim(x, self.first, self.size, axis)


@dataclass(frozen=True)
class Pair:
    """A piece of the own rows and one of the keys of `shard`, which are those of the device `source`.

    q_piece, k_piece: 0 or 1, traced where they differ between devices. meetings: of every device.
    """

    ring: Ring
    own: Own
    shard: Shard
    source: Any
    q_piece: Any
    k_piece: Any
    meetings: tuple[Meeting, ...]

    @property
    def lines(self) -> Run:
        """The rows, among the own ones."""
        size = self.ring.schedule.q_piece
        return Run(self.q_piece * size, size)

    @property
    def columns(self) -> Run:
        """The keys, among those of the shard."""
        size = self.ring.schedule.k_piece
        return Run(self.k_piece * size, size)

    @property
    def first_row(self) -> Any:
        """The start of the rows in the whole."""
        return self.ring.schedule.place(self.own.device, self.q_piece) * self.ring.schedule.q_piece

    @property
    def first_key(self) -> Any:
        """The start of the keys in the whole."""
        return self.ring.schedule.place(self.source, self.k_piece) * self.ring.schedule.k_piece

    def place_of(self, name: str, shape: tuple[int, ...]) -> dict[int, Run]:
        """Return where the rows and keys lie in a mask or bias of a shape, by axis."""
        schedule = self.ring.schedule
        own_rows, own_keys = schedule.pieces * schedule.q_piece, schedule.pieces * schedule.k_piece
        if shape[2] == 1:
            rows = Run(0, 1)
        else:
            rows = self.lines if shape[2] == own_rows else Run(self.first_row, schedule.q_piece)
        if shape[3] == 1:
            return {2: rows, 3: Run(0, 1)}
        split = shape[3] == own_keys or name in self.shard
        return {2: rows, 3: self.columns if split else Run(self.first_key, schedule.k_piece)}

    def cut(self, name: str, x: jax.Array | None) -> jax.Array | None:
        """Return the rows and keys of a mask or bias."""
        if x is None:
            return None
        x = self.shard.get(name, x)
        for axis, run in self.place_of(name, x.shape).items():
            x = run.of(x, axis)
        return x

    def call(self, meeting: Meeting) -> Call:
        """Return the call, which an implementation computes with unrounded results."""
        call, rows = self.own.call, self.own.rows
        if meeting is Meeting.ALIGNED and call.alibi_slopes is not None:
            meeting = Meeting.RANGES
        by_position = call.positions.kv is not None
        start = end = stand = None
        if meeting not in (Meeting.FULL, Meeting.ALIGNED):
            start, end = self._range(rows.first, 0), self._range(rows.last, 1)
        keys = {name: self.columns.of(x, 1) for name, x in self.shard.items() if KEY_AXES[name] == 1}
        if rows.position is not None or by_position:
            stand = self._stands(rows, by_position)
        ordered = by_position or meeting is Meeting.ALIGNED
        return replace(
            call,
            query=self.lines.of(call.query, 1),
            key=keys["key"],
            value=keys["value"],
            attention_mask=self.cut("attention_mask", call.attention_mask),
            bias=self.cut("bias", call.bias),
            q_segment_ids=None if call.q_segment_ids is None else self.lines.of(call.q_segment_ids, 1),
            kv_segment_ids=keys.get("kv_segment_ids"),
            cum_seqlens_q=None,
            cum_seqlens_k=None,
            softmax_aux=None,
            positions=Positions(q=stand, kv=keys.get("kv_positions"), origin=self._origin()),
            kv_start=start,
            kv_end=end,
            causal=call.causal and ordered,
            sliding_window=call.sliding_window if ordered else (None, None),
            chunk_size=call.chunk_size if by_position else None,
        )

    def _range(self, bound: Any, more: int) -> jax.Array:
        """Return an end of the interval of each row, counted in the keys of the piece."""
        return jnp.clip(self.lines.of(bound, 1) + more - self.first_key, 0, self.ring.schedule.k_piece)

    def _stands(self, rows: Rows, by_position: bool) -> jax.Array:
        """Return the position of each row: as keys have them, or counted from the first key of the piece."""
        if by_position:
            position = self.own.call.positions.q if rows.position is None else rows.position
            assert position is not None
            return self.lines.of(position, 1)
        assert rows.position is not None
        return self.lines.of(rows.position, 1) - self.first_key

    def _origin(self) -> jax.Array | None:
        call = self.own.call
        if call.dropout_seed is None:
            return None
        return moved_origin(call.positions.origin, (0, 0, self.first_row, self.first_key))

    def may_see(self, call: Call) -> jax.Array:
        """Return whether some pair may be visible, by the extremes of what the arrays of a call say."""
        seen = jnp.bool_(True)
        if call.kv_start is not None and call.kv_end is not None:
            seen = (call.kv_start < call.kv_end).any()
        if call.q_segment_ids is not None and call.kv_segment_ids is not None:
            q_ids, kv_ids = call.q_segment_ids, call.kv_segment_ids
            largest = jnp.minimum(q_ids.max(), kv_ids.max())
            seen &= (q_ids.min() <= kv_ids.max()) & (kv_ids.min() <= q_ids.max()) & (largest >= 0)
        rows, positions = self.own.rows, call.positions.kv
        if positions is not None and rows.lowest is not None:
            seen &= self.lines.of(rows.lowest, 1).min() <= positions.max()
        if positions is not None and rows.highest is not None:
            seen &= self.lines.of(rows.highest, 1).max() >= positions.min()
        return seen


def computed[T](pair: Pair, compute: Callable[[Call], T]) -> T:
    """Return what a call of the pair gives, zeros and -inf where the pair is hidden: see `nothing_like`.

    Each device computes its own kind of call, or nothing.
    """
    kinds = sorted(set(pair.meetings), key=lambda meeting: meeting.name)

    def run(kind: Meeting) -> Callable[[], T]:
        def branch() -> T:
            return vary_together((pair.own.call, compute(pair.call(kind))))[1]

        return branch

    def nothing() -> T:
        some = next(kind for kind in kinds if kind is not Meeting.HIDDEN)
        return vary_together((pair.own.call, nothing_like(jax.eval_shape(run(some)))))[1]

    arrays = pair.own.call.q_segment_ids is not None

    def guarded(kind: Meeting) -> Callable[[], T]:
        if kind is Meeting.HIDDEN:
            return nothing
        if not arrays and kind is not Meeting.UNKNOWN:
            return run(kind)
        return lambda: lax.cond(pair.may_see(pair.call(kind)), run(kind), nothing)

    if len(kinds) == 1:
        return guarded(kinds[0])()
    own = jnp.array([kinds.index(meeting) for meeting in pair.meetings], jnp.int32)[pair.own.device]
    return lax.switch(own, [guarded(kind) for kind in kinds])


def nothing_like[T](tree: T) -> T:
    """Return zeros, and -inf for the lse and the row maximum of `Forward`, of the shapes of a tree."""

    def filled(path: Any, x: Any) -> jax.Array:
        name = getattr(path[-1], "name", "")
        return jnp.full(x.shape, -jnp.inf if name in ("lse", "row_max") else 0, x.dtype)

    return jax.tree_util.tree_map_with_path(filled, tree)
