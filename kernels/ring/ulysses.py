"""The strategy "ulysses": each device gets the whole sequence of some heads, by an exchange of all with all.

One ordinary call then computes them, so that every clause holds as it does on one device. Paper: Jacobs et
al., arXiv 2309.14509.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from attest.kernels.call.call import Call
from attest.kernels.call.options import refuse
from attest.kernels.call.positions import moved_origin
from attest.kernels.ring.arguments import Spread

# The arrays of rows and of keys that have no heads, and the axis along which they are shards.
_ROWS = {"q_segment_ids": 1, "kv_start": 1, "kv_end": 1}
_KEYS = {"kv_segment_ids": 1}


def check_heads(call: Call, devices: int) -> None:
    """Refuse heads that devices cannot share out.

    Raises: ValueError naming the argument.
    """
    heads, key_heads = call.query.shape[2], call.key.shape[2]
    advice = "Use strategy='ring' or 'zigzag'."
    if heads % devices:
        refuse("query", f"{heads} heads over {devices} devices", "a multiple of the devices", advice)
    if key_heads % devices and devices % key_heads:
        expected = "a multiple or a divisor of the devices"
        refuse("key", f"{key_heads} heads over {devices} devices", expected, advice)


def ulysses(
    attend: Callable[[Call], tuple[jax.Array, jax.Array]], call: Call, spread: Spread
) -> tuple[jax.Array, jax.Array]:
    """Return out and lse of the own rows. attend: computes a call of whole sequences.

    call: as `check_spread_call` returns it.
    """
    check_heads(call, spread.devices)
    out, lse = attend(_of_own_heads(call, spread))
    shard = call.query.shape[1]
    missing = shard * spread.devices - spread.q_length
    out = jnp.pad(out, ((0, 0), (0, missing), (0, 0), (0, 0)))
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
    if missing:
        out, lse = lax.optimization_barrier((out, lse))  # see `_of_own_heads`
    out = lax.all_to_all(out, spread.axis, split_axis=1, concat_axis=2, tiled=True)
    return out, lax.all_to_all(lse, spread.axis, split_axis=2, concat_axis=1, tiled=True)


def _of_own_heads(call: Call, spread: Spread) -> Call:
    """Return the call of all rows and keys of the heads of this device."""
    axis, devices = spread.axis, spread.devices
    heads = call.query.shape[2] // devices
    first = lax.axis_index(axis) * heads
    q_local, k_local = call.query.shape[1], call.key.shape[1]

    def exchanged(x: jax.Array, length: int) -> jax.Array:
        x = lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)
        if length == x.shape[1]:
            return x
        # Else XLA may exchange what is computed and the zeros of padding in two layouts, which it refuses
        # itself. Here that is in the backward pass, whose exchange is the transposed one.
        return lax.optimization_barrier(x)[:, :length]

    def gathered(x: jax.Array | None, along: int, length: int) -> jax.Array | None:
        if x is None:
            return None
        return lax.slice_in_dim(lax.all_gather(x, axis, axis=along, tiled=True), 0, length, axis=along)

    def own(x: jax.Array | None, along: int) -> jax.Array | None:
        """Return the heads of this device, of an array with an axis of heads or of one that all share."""
        if x is None or x.shape[along] == 1:
            return x
        return lax.dynamic_slice_in_dim(x, first, heads, along)

    def pairs(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        for along, local, length in ((2, q_local, spread.q_length), (3, k_local, spread.k_length)):
            if x.shape[along] == 1:
                continue
            split = x.shape[along] == local and devices > 1
            whole = lax.all_gather(x, axis, axis=along, tiled=True) if split else x
            x = lax.slice_in_dim(whole, 0, length, axis=along)
        return own(x, 1)

    keys = {"key": call.key, "value": call.value}
    if call.key.shape[2] % devices:
        # Several devices read a head: its gradients are summed in float32 and rounded once.
        copies = devices // call.key.shape[2]
        keys = {name: jnp.repeat(x.astype(jnp.float32), copies, axis=2) for name, x in keys.items()}
    positions = replace(
        call.positions,
        q=gathered(call.positions.q, 1, spread.q_length),
        kv=gathered(call.positions.kv, 1, spread.k_length),
        origin=_origin(call, first),
    )
    return replace(
        call,
        query=exchanged(call.query, spread.q_length),
        **{name: exchanged(x, spread.k_length) for name, x in keys.items()},
        **{name: gathered(getattr(call, name), along, spread.q_length) for name, along in _ROWS.items()},
        **{name: gathered(getattr(call, name), along, spread.k_length) for name, along in _KEYS.items()},
        attention_mask=pairs(call.attention_mask),
        bias=pairs(call.bias),
        softmax_aux=own(call.softmax_aux, 0),
        alibi_slopes=own(call.alibi_slopes, 1),
        positions=positions,
    )


def _origin(call: Call, first_head: jax.Array) -> jax.Array | None:
    """Return where the heads of this device begin, for dropout."""
    if call.dropout_seed is None:
        return call.positions.origin
    return moved_origin(call.positions.origin, (0, first_head, 0, 0))
