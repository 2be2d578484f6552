"""Attention over a sequence that is spread over the devices of a mesh axis."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attest.kernels.annotations import (
    AlibiSlopes,
    CumSeqlens,
    DropoutSeed,
    DropoutShared,
    Flag,
    Key,
    KVPositions,
    KVRange,
    KVSegmentIds,
    Lse,
    Number,
    Origin,
    Out,
    QOffset,
    QPositions,
    QSegmentIds,
    Query,
    Sinks,
    Size,
    SlidingWindow,
    SpreadBias,
    SpreadMask,
    Value,
)
from attest.kernels.attention import SETTINGS, computed, settings_of
from attest.kernels.call.call import Call, check_call
from attest.kernels.call.leading_axes import merged, split
from attest.kernels.call.options import refuse, shown, without_names_of_flax
from attest.kernels.call.positions import KEY_GROUP
from attest.kernels.choice.choose import check_supported, chosen, traits_of
from attest.kernels.differentiate import attend
from attest.kernels.implementation import Implementation
from attest.kernels.masks.mask_info import MaskInfo
from attest.kernels.once import reverse_mode_only
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
# The arguments that only `ring_attention` has.
_OWN = ("axis_name", "strategy", "mesh", "batch_axes", "head_axes")
# The arrays of rows, and the axis along which they are shards.
_ROW_AXES = {"query": 1, "q_segment_ids": 1, "kv_start": 1, "kv_end": 1}


def ring_attention(
    query: Query,
    key: Key,
    value: Value,
    attention_mask: SpreadMask | None = None,
    bias: SpreadBias | None = None,
    softmax_scale: Number | None = None,
    dropout_prob: Number = 0.0,
    causal: Flag = False,
    dropout_seed: DropoutSeed | None = None,
    cum_seqlens_q: CumSeqlens | None = None,
    cum_seqlens_k: CumSeqlens | None = None,
    sliding_window: SlidingWindow | None = None,
    fwd_params: Any = None,
    bwd_params: Any = None,
    logits_soft_cap: Number | None = None,
    softmax_aux: Sinks | None = None,
    normalize_output: Flag = True,
    precision: Any = None,
    logits_dtype: Any = None,
    *,
    q_segment_ids: QSegmentIds | None = None,
    kv_segment_ids: KVSegmentIds | None = None,
    q_offset: QOffset | None = None,
    q_positions: QPositions | None = None,
    kv_positions: KVPositions | None = None,
    origin: Origin | None = None,
    chunk_size: Size | None = None,
    kv_start: KVRange | None = None,
    kv_end: KVRange | None = None,
    alibi_slopes: AlibiSlopes | None = None,
    dropout_shared: DropoutShared | None = None,
    mask_info: MaskInfo | None = None,
    config: Any = None,
    platform: str | Implementation | None = None,
    axis_name: str | None = None,
    strategy: str | None = None,
    mesh: Any = None,
    batch_axes: str | tuple[str, ...] | None = None,
    head_axes: str | tuple[str, ...] | None = None,
    mask: None = None,
    dropout_rng: None = None,
) -> Out:
    """Compute attention over a sequence whose rows and keys are spread over devices: out [B, Sq, Hq, Dv].

    Every clause holds on the whole sequence, in its order: device d of n has the d-th of n equal parts of the
    rows and of the keys. Results differ from those of one device by rounding alone, and dropout drops the
    same pairs (S21).

    Inside `jax.shard_map`, with axis_name, arrays are the parts of this device: query, key, value, segment
    ids, positions and ranges. A mask or bias has, along its rows and along its keys, 1, this device's part or
    all. Cumulative lengths, offsets and ranges count in the whole sequence. From outside, with mesh and
    axis_name, arrays are whole, and a length that the devices do not divide is padded inside. The arrays of a
    mask_info lie as the arguments of the same names do; its lengths of keys count in the whole sequence.

    Args:
        axis_name: the mesh axis over which the sequence is spread. None computes on one device.
        strategy: "ring" passes keys from neighbour to neighbour. "zigzag" does so after giving each device
            one of the first and one of the last parts, so that causal order leaves all equally much to do.
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
    return ring_attention_with_lse(**locals())[0]


def ring_attention_with_lse(
    query: Query,
    key: Key,
    value: Value,
    attention_mask: SpreadMask | None = None,
    bias: SpreadBias | None = None,
    softmax_scale: Number | None = None,
    dropout_prob: Number = 0.0,
    causal: Flag = False,
    dropout_seed: DropoutSeed | None = None,
    cum_seqlens_q: CumSeqlens | None = None,
    cum_seqlens_k: CumSeqlens | None = None,
    sliding_window: SlidingWindow | None = None,
    fwd_params: Any = None,
    bwd_params: Any = None,
    logits_soft_cap: Number | None = None,
    softmax_aux: Sinks | None = None,
    normalize_output: Flag = True,
    precision: Any = None,
    logits_dtype: Any = None,
    *,
    q_segment_ids: QSegmentIds | None = None,
    kv_segment_ids: KVSegmentIds | None = None,
    q_offset: QOffset | None = None,
    q_positions: QPositions | None = None,
    kv_positions: KVPositions | None = None,
    origin: Origin | None = None,
    chunk_size: Size | None = None,
    kv_start: KVRange | None = None,
    kv_end: KVRange | None = None,
    alibi_slopes: AlibiSlopes | None = None,
    dropout_shared: DropoutShared | None = None,
    mask_info: MaskInfo | None = None,
    config: Any = None,
    platform: str | Implementation | None = None,
    axis_name: str | None = None,
    strategy: str | None = None,
    mesh: Any = None,
    batch_axes: str | tuple[str, ...] | None = None,
    head_axes: str | tuple[str, ...] | None = None,
    mask: None = None,
    dropout_rng: None = None,
) -> tuple[Out, Lse]:
    """Compute attention as `ring_attention` does, and its logsumexp, lse [B, Hq, Sq] float32 (S13).

    Both results are differentiable. The arguments and the errors are those of `ring_attention`.
    """
    arguments = without_names_of_flax(locals())
    for name in _OWN:
        del arguments[name]
    strategy = check_strategy(strategy)
    if axis_name is None:
        if mesh is not None:
            refuse("axis_name", None, "the axis of mesh that splits the sequence", "Name it.")
        _refuse_axes(batch_axes, head_axes, "Give mesh and axis_name, too.")
        return computed(_NAME, arguments)
    del arguments["mask_info"]
    arguments, leading = merged(arguments)
    if mesh is None:
        _refuse_axes(batch_axes, head_axes, "In jax.shard_map arrays are those of this device.")
        devices = devices_of(axis_name)
        lengths = _length_of("query", arguments) * devices, _length_of("key", arguments) * devices
        spread = Spread(axis_name, devices, *lengths)
        out, lse = _on_device(with_own_mask_info(arguments, mask_info, spread), spread, strategy)
    else:
        arguments = with_whole_mask_info(arguments, mask_info)
        # Of the whole call, whose values the devices see only traced.
        check_call(**{name: x for name, x in arguments.items() if name not in (*SETTINGS, "platform")})
        out, lse = over_mesh(_BY_STRATEGY[strategy], arguments, mesh, axis_name, batch_axes, head_axes)
    return split(out, leading), split(lse, leading)


def _refuse_axes(batch_axes: Any, head_axes: Any, advice: str) -> None:
    """Refuse axes that split the batch or the heads, where no mesh is given."""
    if batch_axes is not None or head_axes is not None:
        got = f"{shown(batch_axes)} and {shown(head_axes)}"
        refuse("batch_axes and head_axes", got, "None without mesh", advice)


def _length_of(name: str, arguments: dict[str, Any]) -> int:
    """How many rows or keys this device has; of malformed arrays, which are refused later, 0."""
    shape = getattr(arguments[name], "shape", ())
    return shape[1] if len(shape) == 4 else 0


def _on_device(
    arguments: dict[str, Any], spread: Spread, strategy: str | None
) -> tuple[jax.Array, jax.Array]:
    """Out and lse of the rows of this device."""
    choice = chosen(arguments, traits_of(arguments), arguments.pop("platform"))
    passes = choice.load()
    rest = {name: x for name, x in arguments.items() if name not in SETTINGS}
    call = _placed(check_spread_call(rest, spread), spread)
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
    """The call with the positions of its rows, where its keys have positions, which travel alone (S23)."""
    if call.positions.kv is None or call.positions.q is not None:
        return call
    rows = call.query.shape[1]
    index = lax.axis_index(spread.axis) * rows + jnp.arange(rows, dtype=jnp.int32)
    q = row_positions(call, Whole(index, spread.q_length, spread.k_length))
    return replace(call, positions=replace(call.positions, q=q, q_offset=None))


def _schedule(name: str, call: Call, spread: Spread, order: Order | None, strategy: str) -> Schedule:
    """Who meets whom by a strategy, on the implementation of a name; refuses lengths that do not fit."""
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
    """The call with the pieces that zigzag gives to this device."""
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
    """Causal order, window and chunks, where no array decides what rows see of the order of keys."""
    arrays = (call.cum_seqlens_q, call.kv_start, call.kv_end)
    if call.positions.given or any(x is not None for x in arrays):
        return None
    shift = spread.k_length - spread.q_length
    return Order(call.causal, call.sliding_window, call.chunk_size, shift)
