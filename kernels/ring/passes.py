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
from attest.kernels.ring.pairs import KEY_AXES, Own, Pair, Ring, Run, Shard, computed, own_part, travelling
from attest.kernels.ring.schedule import Meeting
from attest.kernels.varying import vary_together


def forward(ring: Ring, call: Call) -> Forward:
    """Return out, lse and row maximum of the rows of this device; out is in the dtype of the query."""
    own = own_part(ring, call)
    sums: Forward | None = None
    for _, pairs in visited(ring, own):
        for pair in pairs:
            found = computed(pair, partial(_forward, ring.passes, ring.unrounded))
            if sums is None and pair.lines.size == call.query.shape[1]:
                sums = found
                continue
            sums = _empty(own) if sums is None else sums
            merged = _merged(jax.tree.map(partial(_rows, pair.lines), sums), found)
            sums = jax.tree.map(partial(_put_rows, pair.lines), sums, merged)
    return _finished(ring, own, _empty(own) if sums is None else sums)


def backward(ring: Ring, call: Call, terms: RowTerms) -> dict[str, jax.Array]:
    """Return the float32 gradients of query, key, value and bias on this device, by name."""
    own = own_part(ring, call)
    settings = replace(ring.settings, unrounded=True)
    home: dict[str, jax.Array] = {}
    returning: dict[str, jax.Array] = {}
    given = [name for name in ("query", "key", "value", "bias") if getattr(call, name) is not None]
    result = {name: jnp.zeros(getattr(call, name).shape, jnp.float32) for name in given}
    bias_stays = call.bias is not None and "bias" not in travelling(call)
    for offset, pairs in visited(ring, own):
        sums: dict[str, jax.Array] = {}
        if pairs:
            # What came home must be added before more is computed: else XLA may keep all of it to the end.
            shard, home = lax.optimization_barrier((dict(pairs[0].shard), home))
            pairs = [replace(pair, shard=shard) for pair in pairs]
        for pair in pairs:
            of_rows = jax.tree.map(partial(_rows, pair.lines), vars(terms))
            found = computed(pair, partial(_backward, ring.passes, settings, of_rows))
            result["query"] = _added(result["query"], found["query"], {1: pair.lines})
            _add_keys(sums, pair, found)
            if bias_stays:
                place = pair.place_of("bias", result["bias"].shape)
                result["bias"] = _added(result["bias"], found["bias"], place)
        _, returned = vary_together((call, sums))
        # One step later, so that gradients travel while the next ones are computed.
        home = _summed(home, returning)
        returning = _sent_home(ring, offset, returned)
    home = _summed(home, returning)
    return vary_together((call, result | home))[1]


def _summed(x: Mapping[str, jax.Array], y: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The sums by name of what either has."""
    return {**x, **{name: x[name] + more if name in x else more for name, more in y.items()}}


def visited(ring: Ring, own: Own) -> Iterator[tuple[int, list[Pair]]]:
    """Yield each offset with the pairs of pieces that meet; the next keys are sent before it is yielded."""
    schedule, shard = ring.schedule, travelling(own.call)
    if ring.gathers:
        meetings = tuple(schedule.meeting(device, 0, 0, 0) for device in range(schedule.devices))
        if set(meetings) != {Meeting.HIDDEN}:
            gathered = {
                name: lax.all_gather(x, ring.name, axis=KEY_AXES[name], tiled=True)
                for name, x in shard.items()
            }
            yield 0, [Pair(ring, own, gathered, 0, 0, 0, meetings)]
        return
    arriving = [_send(ring, shard, chain, 0) for chain in schedule.chains]
    yield 0, _pairs_at(ring, own, shard, 0)
    for chain, first in zip(schedule.chains, arriving, strict=True):
        here = first
        for step, offset in enumerate(chain):
            following = _send(ring, here, chain, step + 1) if step + 1 < len(chain) else here
            yield offset, _pairs_at(ring, own, here, offset)
            here = following


def _pairs_at(ring: Ring, own: Own, shard: Shard, offset: int) -> list[Pair]:
    devices = ring.schedule.devices
    source = lax.rem(own.device - offset + devices, devices)

    def own_entry(by_device: tuple[int, ...]) -> Any:
        alike = len(set(by_device)) == 1
        return by_device[0] if alike else jnp.array(by_device, jnp.int32)[own.device]

    return [
        Pair(ring, own, shard, source, own_entry(slot.q_pieces), own_entry(slot.k_pieces), slot.meetings)
        for slot in ring.schedule.slots(offset)
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
        sums[name] = _added(sums.get(name, zeros), found[name], {1: pair.columns})
    if "bias" in pair.shard:
        zeros = jnp.zeros(pair.shard["bias"].shape, jnp.float32)
        place = pair.place_of("bias", zeros.shape)
        sums["bias"] = _added(sums.get("bias", zeros), found["bias"], place)


def _added(x: jax.Array, more: jax.Array, place: Mapping[int, Run]) -> jax.Array:
    """x with an array added at a place, by axis."""
    if more.shape == x.shape:
        return x + more
    first = [jnp.asarray(place[axis].first if axis in place else 0, jnp.int32) for axis in range(x.ndim)]
    return lax.dynamic_update_slice(x, lax.dynamic_slice(x, first, more.shape) + more, first)


def _rows(lines: Run, x: jax.Array) -> jax.Array:
    """Some rows of [B, Sq, H, D] or [B, H, Sq]."""
    return lines.of(x, 1 if x.ndim == 4 else 2)


def _put_rows(lines: Run, x: jax.Array, part: jax.Array) -> jax.Array:
    """x with other rows at a place."""
    if part.shape == x.shape:
        return part
    return lax.dynamic_update_slice_in_dim(x, part, lines.first, 1 if x.ndim == 4 else 2)


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


def _empty(own: Own) -> Forward:
    """The results of rows that see no keys."""
    batch, rows, heads, _ = own.call.query.shape
    nothing = jnp.full((batch, heads, rows), -jnp.inf, jnp.float32)
    out = jnp.zeros((batch, rows, heads, own.call.value.shape[3]), jnp.float32)
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
