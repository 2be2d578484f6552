"""Attention over a sequence that is split over the devices of a mesh axis."""

from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attest.kernels.annotations import Lse, Out, SpreadBias, SpreadMask
from attest.kernels.arguments import AttentionArguments, check_arguments, merged, with_arguments
from attest.kernels.call.call import Call
from attest.kernels.call.leading_axes import split
from attest.kernels.call.options import check_names_of_flax, refuse, shown
from attest.kernels.call.positions import KEY_GROUP
from attest.kernels.choice.choose import check_supported, chosen, traits_of
from attest.kernels.differentiate import attend
from attest.kernels.prepare import computed, settings_of
from attest.kernels.reverse_mode import reverse_mode_only
from attest.kernels.ring.arguments import (
    STRATEGIES,
    Spread,
    check_spread_call,
    check_strategy,
    devices_of,
)
from attest.kernels.ring.differentiable import ring_attend
from attest.kernels.ring.layout import from_zigzag, to_zigzag
from attest.kernels.ring.mask_info import with_own_mask_info, with_whole_mask_info
from attest.kernels.ring.mesh import over_mesh
from attest.kernels.ring.pairs import KEY_AXES, Ring, widened
from attest.kernels.ring.schedule import Order, Schedule, likely_strategy
from attest.kernels.ring.ulysses import ulysses
from attest.kernels.varying import vary_together
from attest.kernels.visibility.intervals import Whole, row_positions

_NAME = "ring_attention"
# The arrays of rows, and the axis along which they are shards.
_ROW_AXES = {"query": 1, "q_segment_ids": 1, "kv_start": 1, "kv_end": 1}


# The arrays of a device may be parts: their axes need not fit each other as those of one call do.
@dataclass(frozen=True, eq=False)
class RingArguments(AttentionArguments):
    """The arguments of one call of `ring_attention` as they were given."""

    attention_mask: SpreadMask | None = None
    bias: SpreadBias | None = None
    _: KW_ONLY
    axis_name: str | None = None
    strategy: str | None = None
    mesh: Any = None
    batch_axes: str | tuple[str, ...] | None = None
    head_axes: str | tuple[str, ...] | None = None


@with_arguments(RingArguments)
def ring_attention(arguments: RingArguments) -> Out:
    """Compute attention over a sequence whose rows and keys are split over devices: out [B, Sq, Hq, Dv].

    Every clause applies to the whole sequence: device d of n has the d-th of n equal parts of the rows and of
    the keys. Results differ from those of one device only by rounding, and dropout drops the same weights
    (S21).

    Inside `jax.shard_map`, with axis_name, arrays are the parts of this device: query, key, value, segment
    ids, positions and ranges. The axes of rows and of keys of a mask or bias each have size 1, the size of
    this device's part, or the size of the whole. Cumulative lengths, offsets and ranges refer to the whole
    sequence. From outside, with mesh and axis_name, arrays are whole, and a length that the devices do not
    divide is padded inside. The arrays of a mask_info are split like the arguments of the same names; its
    lengths of keys refer to the whole sequence.

    Args:
        axis_name: the mesh axis over which the sequence is split. None computes on one device.
        strategy: "ring" passes keys from neighbour to neighbour. "zigzag" does so after giving each device
            one of the first and one of the last parts, which balances the work under causal order.
            "all_gather" gives each device all keys at once. "ulysses" gives each device the whole sequence
            of some heads. By default "zigzag" under causal order without a window, else "ring".
        mesh: a `jax.sharding.Mesh`, to call it from outside of `jax.shard_map`.
        batch_axes: with mesh, the axes over which the batch is sharded, as (axis, ...) or one name.
        head_axes: with mesh, the axes over which query heads and key heads are sharded.

    The other arguments and the derivatives are those of `attest.flash_attention`.

    Raises:
        ValueError: an argument is malformed, an axis does not exist, the strategy does not fit the shapes, or
            mask_info has chunks of several sizes inside `jax.shard_map`; the message names it (S20).
        NotImplementedError: the platform that is named does not support the call.
    """
    return _computed(arguments)[0]


@with_arguments(RingArguments)
def ring_attention_with_lse(arguments: RingArguments) -> tuple[Out, Lse]:
    """Compute attention as `ring_attention` does, and its logsumexp, lse [B, Hq, Sq] float32 (S13).

    Both results are differentiable. The arguments and the errors are those of `ring_attention`.
    """
    return _computed(arguments)


def _computed(given: RingArguments) -> tuple[jax.Array, jax.Array]:
    check_names_of_flax(given.mask, given.dropout_rng)
    arguments = AttentionArguments(**{x.name: getattr(given, x.name) for x in fields(AttentionArguments)})
    strategy = check_strategy(given.strategy)
    if given.axis_name is None:
        if given.mesh is not None:
            refuse("axis_name", None, "the axis of mesh that splits the sequence", "Name it.")
        _refuse_axes(given.batch_axes, given.head_axes, "Give mesh and axis_name, too.")
        return computed(_NAME, arguments)
    arguments, leading = merged(arguments)
    if given.mesh is None:
        _refuse_axes(given.batch_axes, given.head_axes, "In jax.shard_map arrays are those of this device.")
        devices = devices_of(given.axis_name)
        lengths = _length_of(arguments.query) * devices, _length_of(arguments.key) * devices
        spread = Spread(given.axis_name, devices, *lengths)
        out, lse = _on_device(with_own_mask_info(arguments, spread), spread, strategy)
    else:
        arguments = with_whole_mask_info(arguments)
        # Of the whole call, whose values the devices see only traced.
        check_arguments(arguments)
        out, lse = over_mesh(
            _BY_STRATEGY[strategy], arguments, given.mesh, given.axis_name, given.batch_axes, given.head_axes
        )
    return split(out, leading), split(lse, leading)


def _refuse_axes(batch_axes: Any, head_axes: Any, advice: str) -> None:
    """Refuse axes that split the batch or the heads, where no mesh is given."""
    if batch_axes is not None or head_axes is not None:
        got = f"{shown(batch_axes)} and {shown(head_axes)}"
        refuse("batch_axes and head_axes", got, "None without mesh", advice)


def _length_of(x: Any) -> int:
    """Return how many rows or keys this device has; of a malformed array, which is refused later, 0."""
    shape = getattr(x, "shape", ())
    return shape[1] if len(shape) == 4 else 0


def _on_device(
    arguments: AttentionArguments, spread: Spread, strategy: str | None
) -> tuple[jax.Array, jax.Array]:
    """Return out and lse of the rows of this device."""
    choice = chosen(arguments, traits_of(arguments))
    passes = choice.load()
    call = _placed(check_spread_call(arguments, spread), spread)
    call, dtypes = widened(reverse_mode_only(_NAME, call))
    call = vary_together(call)
    check_supported(choice)
    settings = replace(settings_of(passes, arguments), function=_NAME)
    if spread.devices == 1:
        return attend(passes, settings, call)
    order = _order(call, spread)
    if strategy is None:
        strategy = likely_strategy(order, call.query.shape[1], call.key.shape[1])
    if strategy == "ulysses":
        return ulysses(partial(attend, passes, settings), call, spread)
    schedule = _schedule(choice.implementation.name, call, spread, order, strategy)
    ring = Ring(passes, settings, spread.axis, schedule, strategy == "all_gather", dtypes)
    if strategy != "zigzag":
        return ring_attend(ring, call)
    results: Any = ring_attend(ring, _relaid(call, spread))
    out, lse = results
    return (
        from_zigzag(out, 1, spread.axis, spread.devices),
        from_zigzag(lse, 2, spread.axis, spread.devices),
    )


def _placed(call: Call, spread: Spread) -> Call:
    """Return the call with the positions of its rows, where its keys have positions (S23)."""
    if call.positions.kv is None or call.positions.q is not None:
        return call
    rows = call.query.shape[1]
    index = lax.axis_index(spread.axis) * rows + jnp.arange(rows, dtype=jnp.int32)
    q = row_positions(call, Whole(index, spread.q_length, spread.k_length))
    return replace(call, positions=replace(call.positions, q=q, q_offset=None))


def _schedule(name: str, call: Call, spread: Spread, order: Order | None, strategy: str) -> Schedule:
    """Return the communication schedule of a strategy, on a named implementation; refuses unfit lengths."""
    q_local, k_local = call.query.shape[1], call.key.shape[1]
    pieces = 2 if strategy == "zigzag" else 1
    for argument, length in (("query", q_local), ("key", k_local)):
        if length % pieces:
            got = f"{length} {'rows' if argument == 'query' else 'keys'} a device with strategy='zigzag'"
            refuse(argument, got, "an even number", "Use strategy='ring', or pass mesh, which pads.")
    k_piece = k_local * spread.devices if strategy == "all_gather" else k_local // pieces
    if call.dropout_seed is not None and k_piece % KEY_GROUP and name != "xla":
        got = f"pieces of {k_piece} keys with dropout on {name!r}"
        refuse("key", got, f"a multiple of {KEY_GROUP}", "Use platform='xla', or pad the keys.")
    return Schedule(
        spread.devices, pieces, q_local // pieces, k_piece, spread.q_length, spread.k_length, order
    )


# One function for each strategy, so that calls over a mesh which are alike are the same function.
_BY_STRATEGY = {strategy: partial(_on_device, strategy=strategy) for strategy in (None, *STRATEGIES)}


def _relaid(call: Call, spread: Spread) -> Call:
    """Return the call with the pieces that zigzag gives to this device."""
    q_local, k_local = call.query.shape[1], call.key.shape[1]

    def moved(x: jax.Array, axis: int) -> jax.Array:
        return to_zigzag(x, axis, spread.axis, spread.devices)

    changed: dict[str, jax.Array] = {}
    for axes, length in ((_ROW_AXES, q_local), (KEY_AXES, k_local)):
        for name, axis in axes.items():
            x = getattr(call, name, None)
            if x is not None and x.shape[axis] == length:
                changed[name] = moved(x, axis)
    for name in ("attention_mask", "bias"):
        x = changed.get(name, getattr(call, name))
        if x is not None and x.shape[2] == q_local > 1:
            changed[name] = moved(x, 2)
    q, kv = call.positions.q, call.positions.kv
    positions = replace(
        call.positions,
        q=None if q is None else moved(q, 1),
        kv=None if kv is None else moved(kv, 1),
    )
    return replace(call, **changed, positions=positions)


def _order(call: Call, spread: Spread) -> Order | None:
    """Return causal order, window and chunks, or None where arrays decide what rows see."""
    arrays = (call.cum_seqlens_q, call.kv_start, call.kv_end)
    if call.positions.given or any(x is not None for x in arrays):
        return None
    shift = spread.k_length - spread.q_length
    return Order(call.causal, call.sliding_window, call.chunk_size, shift)
