"""Both passes of ring attention on one device: its rows against the keys of every device.

Forward merges (out, lse) of the pairs exactly. Backward is written by hand: each pair gives gradients with
the lse of all keys; those of rows stay and are summed, those of keys go home and are summed there, in the
order of the offsets, so that the same ring has the same bits twice. All sums are float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attest.kernels.call.call import Call
from attest.kernels.contract import Forward, Passes, Settings
from attest.kernels.numerics.partial import join_sinks, merge_parts
from attest.kernels.numerics.row_terms import RowTerms
from attest.kernels.ring.pairs import KEY_AXES, Own, Pair, Ring, Run, Shard, computed, own_part, travelling
from attest.kernels.ring.schedule import Meeting
from attest.kernels.varying import vary_together


def forward(ring: Ring, call: Call) -> Forward:
    """Return out, lse and row maximum of the rows of this device; out is in the dtype of the query."""
    own = own_part(ring, call)

    def counted(sums: Forward | None, pair: Pair) -> Forward:
        found = computed(pair, partial(_forward, ring.passes, ring.unrounded))
        if sums is None and pair.lines.size == call.query.shape[1]:
            return found
        sums = _empty(own) if sums is None else sums
        merged = _merged(jax.tree.map(partial(_rows, pair.lines), sums), found)
        return jax.tree.map(partial(_put_rows, pair.lines), sums, merged)

    def step(sums: Forward | None, _: None, _offset: int, pairs: list[Pair]) -> tuple[Forward | None, None]:
        return reduce(counted, pairs, sums), None

    sums, _ = _over_offsets(ring, own, None, None, step)
    return _finished(ring, own, _empty(own) if sums is None else sums)


def backward(ring: Ring, call: Call, terms: RowTerms) -> dict[str, jax.Array]:
    """Return the float32 gradients of query, key, value and bias on this device, by name."""
    own = own_part(ring, call)
    settings = replace(ring.settings, unrounded=True)
    given = [name for name in ("query", "key", "value", "bias") if getattr(call, name) is not None]
    zeros = {name: jnp.zeros(getattr(call, name).shape, jnp.float32) for name in given}
    bias_stays = call.bias is not None and "bias" not in travelling(call)

    def step(done: _Sums, returning: _Sums, offset: int, pairs: list[Pair]) -> tuple[_Sums, _Sums]:
        done, sums = dict(done), dict[str, jax.Array]()
        for pair in pairs:
            of_rows = jax.tree.map(partial(_rows, pair.lines), vars(terms))
            found = computed(pair, partial(_backward, ring.passes, settings, of_rows))
            done["query"] = _added(done["query"], found["query"], {1: pair.lines})
            _add_keys(sums, pair, found)
            if bias_stays:
                place = pair.place_of("bias", done["bias"].shape)
                done["bias"] = _added(done["bias"], found["bias"], place)
        # Those of the step before travelled until now, while these were computed.
        returning, (_, sums) = lax.optimization_barrier((returning, vary_together((call, sums))))
        return _summed(done, returning), _sent_home(ring, offset, sums)

    done, returning = _over_offsets(ring, own, zeros, {}, step)
    return vary_together((call, _summed(done, returning)))[1]


def _summed(x: Mapping[str, jax.Array], y: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the sums by name of what either has."""
    return {**x, **{name: x[name] + more if name in x else more for name, more in y.items()}}


type _Sums = Mapping[str, jax.Array]


def _over_offsets[Done, UnderWay](
    ring: Ring,
    own: Own,
    done: Done,
    under_way: UnderWay,
    step: Callable[[Done, UnderWay, int, list[Pair]], tuple[Done, UnderWay]],
) -> tuple[Done, UnderWay]:
    """Return what `step` makes of (done, under_way) at each offset, with the pairs of pieces that meet there.

    The next keys travel while a step computes. done: what must be there before keys are sent on; without that
    XLA sends all of them at once, before anything is computed, and holds all of them, or adds what came home
    at the end alone. under_way: gradients on their way home.
    """
    schedule, shard = ring.schedule, travelling(own.call)
    if ring.gathers:
        meetings = tuple(schedule.meeting(device, 0, 0, 0) for device in range(schedule.devices))
        if set(meetings) != {Meeting.HIDDEN}:
            gathered = {
                name: lax.all_gather(x, ring.name, axis=KEY_AXES[name], tiled=True)
                for name, x in shard.items()
            }
            return step(done, under_way, 0, [Pair(ring, own, gathered, 0, 0, 0, meetings)])
        return done, under_way
    packed = _packed(shard)
    arriving = [_send(ring, packed, chain, 0) for chain in schedule.chains]
    done, under_way = step(done, under_way, 0, _pairs_at(ring, own, shard, 0))
    for chain, first in zip(schedule.chains, arriving, strict=True):
        here = first
        for number, offset in enumerate(chain):
            here, done = lax.optimization_barrier((here, done))
            following = _send(ring, here, chain, number + 1) if number + 1 < len(chain) else here
            done, under_way = step(done, under_way, offset, _pairs_at(ring, own, _unpacked(here), offset))
            here = following
    return done, under_way


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


type _Packed = Mapping[tuple[str, ...], jax.Array]


def _packed(arrays: Mapping[str, jax.Array]) -> dict[tuple[str, ...], jax.Array]:
    """Return the arrays by name, equal ones packed as one: a GPU has one exchange under way at a time."""
    alike: dict[Any, list[str]] = {}
    for name, x in arrays.items():
        alike.setdefault((x.shape, x.dtype), []).append(name)
    return {
        tuple(names): jnp.stack([arrays[name] for name in names]) if len(names) > 1 else arrays[names[0]]
        for names in alike.values()
    }


def _unpacked(packed: _Packed) -> dict[str, jax.Array]:
    return {
        name: x if len(names) == 1 else x[number]
        for names, x in packed.items()
        for number, name in enumerate(names)
    }


def _send(ring: Ring, packed: _Packed, chain: tuple[int, ...], step: int) -> _Packed:
    perm = ring.schedule.sends(chain, step)
    return {names: lax.ppermute(x, ring.name, perm) for names, x in packed.items()}


def _sent_home(ring: Ring, offset: int, sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the gradients of the own keys that the device which lies an offset behind has."""
    if ring.gathers:
        return {
            name: lax.psum_scatter(x, ring.name, scatter_dimension=KEY_AXES[name], tiled=True)
            for name, x in sums.items()
        }
    if not offset:
        return dict(sums)
    perm = ring.schedule.returns(offset)
    return _unpacked({names: lax.ppermute(x, ring.name, perm) for names, x in _packed(sums).items()})


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
    """Return x with an array added at a place, by axis."""
    if more.shape == x.shape:
        return x + more
    first = [jnp.asarray(place[axis].first if axis in place else 0, jnp.int32) for axis in range(x.ndim)]
    return lax.dynamic_update_slice(x, lax.dynamic_slice(x, first, more.shape) + more, first)


def _rows(lines: Run, x: jax.Array) -> jax.Array:
    """Return some rows of [B, Sq, H, D] or [B, H, Sq]."""
    return lines.of(x, 1 if x.ndim == 4 else 2)


def _put_rows(lines: Run, x: jax.Array, part: jax.Array) -> jax.Array:
    """Return x with other rows at a place."""
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
    """Return the results of rows that see no keys."""
    batch, rows, heads, _ = own.call.query.shape
    nothing = jnp.full((batch, heads, rows), -jnp.inf, jnp.float32)
    out = jnp.zeros((batch, rows, heads, own.call.value.shape[3]), jnp.float32)
    return vary_together((own.call, Forward(out, nothing, nothing)))[1]


def _finished(ring: Ring, own: Own, sums: Forward) -> Forward:
    """Return the results of all keys: with sinks, which are counted once, and rounded."""
    call, (out, lse, row_max, _) = own.call, sums
    if call.softmax_aux is not None:
        out, lse = join_sinks(out, lse, call.softmax_aux)
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
    """Return [B, H, Sq] as [B, Sq, H, 1]."""
    return x.swapaxes(1, 2)[..., None]
