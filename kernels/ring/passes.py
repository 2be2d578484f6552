"""Both passes of ring attention on one device: its rows against the keys of every device.

Forward merges (out, lse) of the pairs exactly. Backward is written by hand: each pair gives gradients with
the lse of all keys; those of rows stay and are summed, those of keys go home and are summed there, in the
order of the offsets, so that the same ring has the same bits twice. All sums are float32.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attest.kernels.arguments import Call
from attest.kernels.cotangents import RowTerms
from attest.kernels.implementation import Forward, Passes, Settings
from attest.kernels.partial import merge_parts
from attest.kernels.ring.pairs import KEY_AXES, Own, Pair, Ring, Shard, computed, own_part, travelling
from attest.kernels.ring.schedule import Meeting
from attest.kernels.varying import vary_together


def forward(ring: Ring, call: Call) -> Forward:
    """Return out, lse and row maximum of the rows of this device; out is in the dtype of the query."""
    own = own_part(ring, call)
    parts: dict[int, Forward] = {}
    for _, pairs in visited(ring, own):
        for pair, meetings in pairs:
            found = computed(pair, meetings, partial(_forward, ring.passes, ring.unrounded))
            before = parts.get(pair.q_piece)
            parts[pair.q_piece] = found if before is None else _merged(before, found)
    for piece in range(ring.schedule.pieces):
        parts.setdefault(piece, _empty(ring, own))
    whole = [parts[piece] for piece in range(ring.schedule.pieces)]
    out = jnp.concatenate([part.out for part in whole], 1)
    lse = jnp.concatenate([part.lse for part in whole], 2)
    row_max = jnp.concatenate([part.row_max for part in whole], 2)
    return _finished(ring, own, Forward(out, lse, row_max))


def backward(ring: Ring, call: Call, terms: RowTerms) -> dict[str, jax.Array]:
    """Return the float32 gradients of query, key, value and bias on this device, by name."""
    own = own_part(ring, call)
    settings = replace(ring.settings, unrounded=True)
    rows: dict[int, jax.Array] = {}
    home: dict[str, jax.Array] = {}
    returning: dict[str, jax.Array] = {}
    given = ("key", "value") if call.bias is None else ("key", "value", "bias")
    result = {name: jnp.zeros(getattr(call, name).shape, jnp.float32) for name in given}
    bias_stays = call.bias is not None and "bias" not in travelling(call)
    for offset, pairs in visited(ring, own):
        sums: dict[str, jax.Array] = {}
        if pairs:
            # What came home must be added before more is computed: else XLA may keep all of it to the end.
            shard, home = lax.optimization_barrier((dict(pairs[0][0].shard), home))
            pairs = [(replace(pair, shard=shard), meetings) for pair, meetings in pairs]
        for pair, meetings in pairs:
            of_rows = jax.tree.map(lambda x, pair=pair: _piece(x, pair.lines), vars(terms))
            found = computed(pair, meetings, partial(_backward, ring.passes, settings, of_rows))
            rows[pair.q_piece] = rows.get(pair.q_piece, 0) + found["query"]
            _add_keys(sums, pair, found)
            if bias_stays:
                place = pair.place_of("bias", result["bias"].shape)
                result["bias"] = _added(result["bias"], found["bias"], (2, 3), place)
        _, returned = vary_together((call, sums))
        # One step later, so that gradients travel while the next ones are computed.
        home = _summed(home, returning)
        returning = _sent_home(ring, offset, returned)
    home = _summed(home, returning)
    size = ring.schedule.q_piece
    empty = jnp.zeros((call.query.shape[0], size, *call.query.shape[2:]), jnp.float32)
    query = jnp.concatenate([rows.get(piece, empty) for piece in range(ring.schedule.pieces)], 1)
    return vary_together((call, result | home | {"query": query}))[1]


def _summed(x: Mapping[str, jax.Array], y: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The sums by name of what either has."""
    return {**x, **{name: x[name] + more if name in x else more for name, more in y.items()}}


type _Pairs = list[tuple[Pair, tuple[Meeting, ...]]]


def visited(ring: Ring, own: Own) -> Iterator[tuple[int, _Pairs]]:
    """Yield each offset with the pairs of pieces that meet; the next keys are sent before it is yielded."""
    schedule, shard = ring.schedule, travelling(own.call)
    if ring.gathers:
        meetings = tuple(schedule.meeting(device, 0, 0, 0) for device in range(schedule.devices))
        if set(meetings) != {Meeting.HIDDEN}:
            gathered = {
                name: lax.all_gather(x, ring.name, axis=KEY_AXES[name], tiled=True)
                for name, x in shard.items()
            }
            yield 0, [(Pair(ring, own, gathered, 0, 0, 0), meetings)]
        return
    arriving = [_send(ring, shard, chain, 0) for chain in schedule.chains]
    yield 0, _pairs_at(ring, own, shard, 0)
    for chain, first in zip(schedule.chains, arriving, strict=True):
        here = first
        for step, offset in enumerate(chain):
            following = _send(ring, here, chain, step + 1) if step + 1 < len(chain) else here
            yield offset, _pairs_at(ring, own, here, offset)
            here = following


def _pairs_at(ring: Ring, own: Own, shard: Shard, offset: int) -> _Pairs:
    devices = ring.schedule.devices
    source = lax.rem(own.device - offset + devices, devices)
    return [
        (Pair(ring, own, shard, source, q_piece, k_piece), meetings)
        for (q_piece, k_piece), meetings in ring.schedule.meetings.get(offset % devices, {}).items()
    ]


def _send(ring: Ring, shard: Shard, chain: tuple[int, ...], step: int) -> dict[str, jax.Array]:
    perm = ring.schedule.sends(chain, step)
    return {name: lax.ppermute(x, ring.name, perm) for name, x in shard.items()}


def _sent_home(ring: Ring, offset: int, sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The gradients of the own keys that the device which lies an offset behind has."""
    if ring.gathers:
        return {
            name: lax.psum_scatter(x, ring.name, scatter_dimension=KEY_AXES[name], tiled=True)
            for name, x in sums.items()
        }
    if not offset:
        return dict(sums)
    perm = ring.schedule.returns(offset)
    return {name: lax.ppermute(x, ring.name, perm) for name, x in sums.items()}


def _add_keys(sums: dict[str, jax.Array], pair: Pair, found: Mapping[str, jax.Array]) -> None:
    """Add the gradients of a pair to those of the keys of a shard."""
    for name in ("key", "value"):
        zeros = jnp.zeros(pair.shard[name].shape, jnp.float32)
        place = ((pair.columns.start, pair.columns.stop - pair.columns.start),)
        sums[name] = _added(sums.get(name, zeros), found[name], (1,), place)
    if "bias" in pair.shard:
        zeros = jnp.zeros(pair.shard["bias"].shape, jnp.float32)
        place = pair.place_of("bias", zeros.shape)
        sums["bias"] = _added(sums.get("bias", zeros), found["bias"], (2, 3), place)


def _added(
    x: jax.Array, more: jax.Array, axes: tuple[int, ...], places: tuple[tuple[Any, int], ...]
) -> jax.Array:
    """x with an array added at a place: the first index and the size along each of some axes."""
    first = [jnp.int32(0)] * x.ndim
    for axis, (start, _) in zip(axes, places, strict=True):
        first[axis] = jnp.asarray(start, jnp.int32)
    if more.shape == x.shape:
        return x + more
    return lax.dynamic_update_slice(x, lax.dynamic_slice(x, first, more.shape) + more, first)


def _piece(x: jax.Array, lines: slice) -> jax.Array:
    """The rows of a piece: [B, Sq, H, D] or [B, H, Sq]."""
    return x[:, lines] if x.ndim == 4 else x[:, :, lines]


# Jitted, so that calls of pairs that are alike are traced and lowered once.
@partial(jax.jit, static_argnums=(0, 1))
def _forward(passes: Passes, settings: Settings, call: Call) -> Forward:
    return passes.forward(settings, call)._replace(kept=None)


@partial(jax.jit, static_argnums=(0, 1))
def _backward(passes: Passes, settings: Settings, terms: dict[str, Any], call: Call) -> dict[str, jax.Array]:
    found = passes.backward(settings, call, RowTerms(**terms), None)
    return {name: x.astype(jnp.float32) for name, x in found._asdict().items() if x is not None}


def _merged(a: Forward, b: Forward) -> Forward:
    out, lse = merge_parts(jnp.stack((a.out, b.out)), jnp.stack((a.lse, b.lse)))
    return Forward(out, lse, jnp.maximum(a.row_max, b.row_max))


def _empty(ring: Ring, own: Own) -> Forward:
    """The part of a piece whose rows see no keys on any device."""
    batch, _, heads, _ = own.call.query.shape
    size = ring.schedule.q_piece
    nothing = jnp.full((batch, heads, size), -jnp.inf, jnp.float32)
    out = jnp.zeros((batch, size, heads, own.call.value.shape[3]), jnp.float32)
    return vary_together((own.call, Forward(out, nothing, nothing)))[1]


def _finished(ring: Ring, own: Own, sums: Forward) -> Forward:
    """The results of all keys: with sinks, which are counted once, and rounded."""
    call, (out, lse, row_max, _) = own.call, sums
    if call.softmax_aux is not None:
        sinks = jax.nn.logsumexp(call.softmax_aux.astype(jnp.float32), axis=-1)[None, :, None]
        both = jnp.logaddexp(lse, sinks)
        share = jnp.where(lse == -jnp.inf, jnp.float32(0), jnp.exp(lse - both))
        out = jnp.where(_by_row(share) == 0, jnp.float32(0), out * _by_row(share))
        lse = both
        padding = own.rows.padding
        if padding is not None:
            lse = jnp.where(padding[:, None, :], -jnp.inf, lse)
    if not ring.settings.normalize_output:
        largest = row_max
        if call.softmax_aux is not None:
            largest = jnp.maximum(row_max, call.softmax_aux.astype(jnp.float32).max(axis=-1)[None, :, None])
        norm = jnp.where(row_max == -jnp.inf, jnp.float32(0), jnp.exp(lse - largest))
        out = out * _by_row(norm)
    return Forward(out.astype(ring.settings.result_dtype(call.query.dtype)), lse, row_max)


def _by_row(x: jax.Array) -> jax.Array:
    """[B, H, Sq] as [B, Sq, H, 1]."""
    return x.swapaxes(1, 2)[..., None]
