"""Checks of a call whose sequence is split over the devices of an axis."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax

from attest.kernels.arguments import AttentionArguments, check_arguments
from attest.kernels.call.call import Call, check_bias, check_mask
from attest.kernels.call.key_ranges import check_ranges
from attest.kernels.call.options import refuse, shown
from attest.kernels.call.positions import check_positions
from attest.kernels.call.sequences import check_lengths
from attest.kernels.varying import varying_axes

STRATEGIES = ("ring", "zigzag", "all_gather", "ulysses")

# The arguments whose checks need the lengths of the whole sequence, each as if it were not given.
_OF_THE_WHOLE = dict.fromkeys(
    (
        "attention_mask", "bias", "kv_start", "kv_end", "cum_seqlens_q", "cum_seqlens_k", "q_offset",
        "q_positions", "kv_positions", "origin",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """The layout of a sequence on devices.

    axis: the name of the mesh axis. devices: how many share the sequence. q_length, k_length: of the
    sequence; the last shards may hold padding past them.
    """

    axis: str
    devices: int
    q_length: int
    k_length: int


def check_axis_name(axis_name: Any) -> None:
    """Refuse what is no name of an axis.

    Raises: ValueError.
    """
    if not isinstance(axis_name, str):
        refuse("axis_name", shown(axis_name), "the name of a mesh axis", "None computes on one device.")


def devices_of(axis_name: Any) -> int:
    """Return how many devices an axis of jax.shard_map has.

    Raises: ValueError for what is no axis here.
    """
    check_axis_name(axis_name)
    try:
        return int(lax.psum(1, axis_name))
    except NameError:
        advice = "Call ring_attention inside jax.shard_map over that axis, or pass mesh."
        refuse("axis_name", repr(axis_name), "an axis of a jax.shard_map around the call", advice)


def check_strategy(strategy: Any) -> str | None:
    """Return the strategy, None where the caller leaves it to us.

    Raises: ValueError for one that does not exist.
    """
    if strategy is not None and (not isinstance(strategy, str) or strategy not in STRATEGIES):
        expected = f"one of {', '.join(map(repr, STRATEGIES))}"
        refuse("strategy", shown(strategy), expected, "Leave it out for the likeliest to be fast.")
    return strategy


def check_spread_call(arguments: AttentionArguments, spread: Spread) -> Call:
    """Return the part of a call on one device, checked: arrays of rows and keys are shards of the whole.

    Ranges and cumulative lengths refer to the whole sequence. A mask or bias has, along rows and keys, 1, a
    shard or all of them.

    Raises: ValueError naming the argument.
    """
    call = check_arguments(replace(arguments, **_OF_THE_WHOLE))
    batch, q_local, q_heads, _ = call.query.shape
    k_local = call.key.shape[1]
    lengths = check_lengths(
        arguments.cum_seqlens_q, arguments.cum_seqlens_k, batch, spread.q_length, spread.k_length
    )
    start, end = check_ranges(arguments.kv_start, arguments.kv_end, batch, q_local, spread.k_length)
    local = batch, q_heads, q_local, k_local
    return replace(
        call,
        attention_mask=_check_pairs("attention_mask", arguments.attention_mask, local, spread),
        bias=_check_pairs("bias", arguments.bias, local, spread),
        cum_seqlens_q=lengths[0],
        cum_seqlens_k=lengths[1],
        kv_start=start,
        kv_end=end,
        positions=check_positions(
            arguments.q_offset,
            arguments.q_positions,
            arguments.kv_positions,
            arguments.origin,
            sequences=batch if lengths[0] is None else lengths[0].shape[0] - 1,
            batch=batch,
            q_length=q_local,
            k_length=k_local,
        ),
    )


def _check_pairs(name: str, x: Any, local: tuple[int, int, int, int], spread: Spread) -> jax.Array | None:
    """Check a mask or bias whose rows and keys are 1, those of a shard, or all."""
    check = check_mask if name == "attention_mask" else check_bias
    if not isinstance(x, jax.Array | np.ndarray) or not 2 <= x.ndim <= 4:
        return check(x, local)
    batch, heads, rows, keys = local
    check_parts(name, x, rows, keys, spread)
    own_rows, own_keys = (
        size if size > 1 else own for size, own in ((x.shape[-2], rows), (x.shape[-1], keys))
    )
    return check(x, (batch, heads, own_rows, own_keys))


def check_parts(name: str, x: Any, rows: int, keys: int, spread: Spread) -> None:
    """Refuse a mask or bias whose last axes are not 1, the rows and keys of a shard, or all of them.

    rows, keys: of a shard.

    Raises: ValueError with the name.
    """
    for axis, own in ((-2, rows), (-1, keys)):
        size, every = x.shape[axis], own * spread.devices
        if size not in (1, own, every):
            what = "rows" if axis == -2 else "keys"
            advice = "Split it like the sequence, or give it whole to every device."
            refuse(name, f"shape {x.shape}", f"1, {own} or {every} {what}: a shard's, or all", advice)
        # A single entry of a shard of one looks like one that all share.
        if size == 1 == own and spread.devices > 1 and spread.axis in varying_axes(jax.numpy.asarray(x)):
            refuse(name, f"shape {x.shape}, other entries on each device", f"all {every}", "Give it whole.")
