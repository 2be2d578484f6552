"""Calls with few queries, as in decoding: the heads of a group as rows of one tile, and sums in parts.

A tile of the matrix unit has 64 rows or more. Where a call has a few queries, the query heads that read one
key head become rows of one tile, so that keys and values are read once for all of them. And where there are
fewer tiles than multiprocessors, each takes a part of the keys, and `numerics/partial.py` merges the sums.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from attest.kernels.call.call import Call
from attest.kernels.call.positions import Positions
from attest.kernels.contract import Forward
from attest.kernels.numerics.exponents import LOG2E
from attest.kernels.numerics.partial import Partial, merge_sums
from attest.kernels.visibility.intervals import Rows

_LN2 = 1.0 / LOG2E
# Up to so many rows, the query heads of a key head are packed.
_ROWS = 64


def has_few_queries(call: Call) -> bool:
    """Return whether the queries of each key head fit one tile together, and their heads may be packed.

    Not with a bias or ALiBi, which belong to query heads. The references of a bias are in nats, besides: its
    lowest values are not finite in bits, as those of `Partial` are.
    """
    group = call.query.shape[2] // call.key.shape[2]
    return call.query.shape[1] * group <= _ROWS and call.bias is None and call.alibi_slopes is None


def pack_heads(call: Call, rows: Rows) -> tuple[Call, Rows]:
    """Return the call with key heads alone, and with the query heads of each as further rows.

    [B, S, Hkv * G, D] becomes [B, G * S, Hkv, D], head by head. What a row sees by order, windows, chunks,
    lengths, positions and ranges is in the rows that are returned, and no longer in the call. Sinks are left
    out: `finish` adds them.
    """
    group = call.query.shape[2] // call.key.shape[2]

    def by_row(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.tile(x, (1, group))

    first = _restricting(rows.first, lambda first: first <= 0)
    last = _restricting(rows.last, lambda last: last >= call.key.shape[1] - 1)

    packed = replace(
        call,
        query=_packed(call.query, group),
        attention_mask=_packed_pairs(call.attention_mask, call.query.shape[1], group),
        bias=_packed_pairs(call.bias, call.query.shape[1], group),
        q_segment_ids=by_row(call.q_segment_ids),
        cum_seqlens_q=None,
        cum_seqlens_k=None,
        softmax_aux=None,
        positions=Positions(origin=call.positions.origin),
        kv_start=None,
        kv_end=None,
        causal=False,
        sliding_window=(None, None),
        chunk_size=None,
    )
    return packed, Rows(by_row(first), by_row(last), by_row(rows.padding))


def _restricting(bound: jax.Array | None, open_: Callable[[jax.Array], jax.Array]) -> jax.Array | None:
    """Return a bound; None where it is known while tracing that no row is restricted by it."""
    if bound is None or isinstance(bound, Tracer):
        return bound
    return None if bool(open_(bound).all()) else bound


def _packed(x: jax.Array, group: int) -> jax.Array:
    batch, length, heads, dim = x.shape
    x = x.reshape(batch, length, heads // group, group, dim).transpose(0, 3, 1, 2, 4)
    return x.reshape(batch, group * length, heads // group, dim)


def _packed_pairs(x: jax.Array | None, rows: int, group: int) -> jax.Array | None:
    """Return a mask or bias [B or 1, Hq or 1, S or 1, Sk or 1] for packed rows."""
    if x is None or group == 1:
        return x
    batch, heads, length, keys = x.shape
    if heads > 1:
        x = jnp.broadcast_to(x, (batch, heads, rows, keys))
        return x.reshape(batch, heads // group, group * rows, keys)
    return x if length == 1 else jnp.tile(x, (1, 1, group, 1))


def finish(parts: Partial, call: Call, dtype: Any) -> Forward:
    """Return the forward pass of the call whose heads were packed: normalised, and with its sinks.

    dtype: of out.
    """
    merged = merge_sums(parts)
    group = call.query.shape[2] // call.key.shape[2]
    total, norm, reference = (_unpacked(x[0], group) for x in merged)
    row_max, largest = reference * _LN2, reference
    if call.softmax_aux is not None:
        sinks = call.softmax_aux.astype(jnp.float32)
        together = (jax.nn.logsumexp(sinks, axis=-1) * LOG2E)[None, :, None]
        largest = jnp.maximum(reference, together)
        share = _share(reference, largest)
        norm = norm * share + _share(together, largest)
        total = total * share[..., None]
    empty = norm == 0
    lse = jnp.where(empty, -jnp.inf, largest * _LN2 + jnp.log(norm))
    out = total / jnp.where(empty, jnp.float32(1), norm)[..., None]
    return Forward(out.swapaxes(1, 2).astype(dtype), lse, row_max)


def _share(reference: jax.Array, largest: jax.Array) -> jax.Array:
    """Return exp2(reference - largest), 1 where both are -inf."""
    return jnp.where(reference >= largest, jnp.float32(1), jnp.exp2(reference - largest))


def _unpacked(x: jax.Array, group: int) -> jax.Array:
    """Return [B, Hkv, G * S, ...] as [B, Hkv * G, S, ...]."""
    batch, heads, rows, *rest = x.shape
    return x.reshape(batch, heads * group, rows // group, *rest)
