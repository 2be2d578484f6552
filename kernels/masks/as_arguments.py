"""A MaskInfo as arguments of `attest.flash_attention`: structure as structure, and the rest as a mask."""

import math
from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from attest.kernels.call.axes import behind_batch
from attest.kernels.call.options import refuse
from attest.kernels.masks.conditions import Conditions
from attest.kernels.masks.segments import hide_keys
from attest.kernels.masks.sizes import Sizes, sizes_of
from attest.kernels.masks.visible_pairs import chunk_of, positions_of, same_chunk, within

_INT32 = 2**31 - 1


def flash_attention_arguments(
    info: Conditions, query: Any, key: Any, *, alibi: bool = False
) -> dict[str, Any]:
    """Return the keyword arguments of `attest.flash_attention` that make exactly the pairs of `info` visible.

    query [..., Sq, Hq, D] and key [..., Sk, Hkv, D] are read for their shapes alone. Padding rows remain
    padding (S9). Only what no other argument says becomes a mask. Positions are among them only where
    something reads them. alibi: whether ALiBi does (S25).

    Raises: ValueError naming the array of `info` whose size is not that of the call.
    """
    for name, x in (("query", query), ("key", key)):
        if len(x.shape) < 3:
            refuse(name, f"shape {x.shape}", "[..., length, heads, head_dim]", "Pass the arrays of the call.")
    leading = tuple(query.shape[:-3])
    sizes = sizes_of(
        info,
        batch=math.prod(leading),
        heads=query.shape[-2],
        q_length=query.shape[-3],
        kv_length=key.shape[-3],
    )
    info = replace(info, kv_lengths=_clipped(info, sizes))
    chunk, rest = _chunk(info)
    ids, rest = _segment_ids(rest, sizes)
    arguments: dict[str, Any] = {} if chunk is None else {"chunk_size": chunk}
    if ids is not None:
        arguments["q_segment_ids"], arguments["kv_segment_ids"] = ids
    mask = _dense(rest, sizes)
    if mask is not None:
        arguments["attention_mask"] = mask
    arguments |= _lengths(rest, sizes)
    arguments |= order_arguments(rest, sizes, alibi or chunk is not None)
    ranges = {"kv_start": rest.kv_start, "kv_end": rest.kv_end}
    arguments |= {name: ends for name, ends in ranges.items() if ends is not None}
    return arguments if len(leading) == 1 else _with_leading(arguments, leading)


def _clipped(info: Conditions, sizes: Sizes) -> jax.Array | None:
    """Return lengths that the keys hold; a longer one hides nothing."""
    if info.kv_lengths is None:
        return None
    return jnp.clip(info.kv_lengths, 0, sizes.keys())


def _chunk(info: Conditions) -> tuple[int | None, Conditions]:
    """Return the size of chunks that the call is given, and what it leaves open.

    None where keys have positions, which few implementations take: ids make the same pairs visible there.
    """
    if not info.chunk_sizes or info.kv_positions is not None:
        return None, info
    chunk, *others = info.chunk_sizes
    return chunk_argument(chunk), replace(info, chunk_sizes=tuple(others))


def chunk_argument(chunk: int) -> int:
    """Return the size of chunks as a call takes it: positions reach less far than what it leaves out."""
    return min(chunk, _INT32)


def _segment_ids(info: Conditions, sizes: Sizes) -> tuple[tuple[jax.Array, jax.Array] | None, Conditions]:
    """Return the segment ids [B, Sq] and [B, Sk] of the call, and what they leave open."""
    q_ids, kv_ids, rest = info.q_segment_ids, info.kv_segment_ids, info
    if q_ids is None and info.chunk_sizes:
        chunk, *others = info.chunk_sizes
        q_ids, kv_ids = _chunk_ids(chunk, *positions_of(info, sizes))
        rest = replace(rest, chunk_sizes=tuple(others))
    mask = info.attention_mask
    of_keys = mask is not None and mask.shape[1:3] == (1, 1)
    # Lengths given with cumulative ones, or with ids, become ids; by themselves they are lengths.
    entries = (sizes.batch or 0) * sizes.keys()
    by_ids = q_ids is not None or of_keys or info.cum_seqlens_q is not None or entries > _INT32
    hides = of_keys or (info.kv_lengths is not None and by_ids)
    if q_ids is None and not hides:
        return None, rest
    if q_ids is None or kv_ids is None:
        q_ids = jnp.zeros((1, sizes.queries()), jnp.int32)
        kv_ids = jnp.zeros((1, sizes.keys()), jnp.int32)
    if mask is not None and of_keys:
        kv_ids = hide_keys(kv_ids, mask[:, 0, 0])
        rest = replace(rest, attention_mask=None)
    if info.kv_lengths is not None:
        kv_ids = hide_keys(kv_ids, within(info.kv_lengths, sizes.keys()))
        rest = replace(rest, kv_lengths=None)
    batch = sizes.batch or 0
    whole = [jnp.broadcast_to(x, (batch, x.shape[1])) for x in (q_ids, kv_ids)]
    return (whole[0], whole[1]), replace(rest, q_segment_ids=None, kv_segment_ids=None)


def _chunk_ids(chunk: int, rows: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the chunks of positions as ids, counted from the first, as a negative id would be padding."""
    numbers = [chunk_of(x, chunk) for x in (rows, keys)]
    first = reduce(jnp.minimum, (x.min(axis=1, keepdims=True, initial=_INT32) for x in numbers))
    return numbers[0] - first, numbers[1] - first


def _dense(rest: Conditions, sizes: Sizes) -> jax.Array | None:
    """Return the mask and the chunks that are left, [B or 1, Hq or 1, Sq or 1, Sk or 1] bool."""
    masks = [] if rest.attention_mask is None else [rest.attention_mask]
    if rest.chunk_sizes:
        places = positions_of(rest, sizes)
        masks += [same_chunk(chunk, *places) for chunk in rest.chunk_sizes]
    return reduce(jnp.logical_and, masks) if masks else None


def _lengths(rest: Conditions, sizes: Sizes) -> dict[str, Any]:
    if rest.cum_seqlens_q is not None:
        return {"cum_seqlens_q": rest.cum_seqlens_q, "cum_seqlens_k": rest.cum_seqlens_k}
    if rest.kv_lengths is None:
        return {}
    batch = sizes.batch or 0
    lengths = jnp.broadcast_to(rest.kv_lengths, (batch,))
    zero = jnp.zeros(1, jnp.int32)
    return {
        "cum_seqlens_q": jnp.arange(batch + 1, dtype=jnp.int32) * jnp.int32(sizes.queries()),
        "cum_seqlens_k": jnp.concatenate([zero, jnp.cumsum(lengths, dtype=jnp.int32)]),
    }


def order_arguments(rest: Conditions, sizes: Sizes, placed: bool) -> dict[str, Any]:
    """Return causal order, the window, and the positions, if these or `placed` say that something reads them.

    sizes: of the call; they are read where there are lengths of keys.
    """
    order: dict[str, Any] = {}
    if rest.causal:
        order["causal"] = True
    if rest.sliding_window != (None, None):
        order["sliding_window"] = rest.sliding_window
    if not (order or placed):
        return {}
    if rest.q_positions is not None:
        order["q_positions"] = rest.q_positions
    elif rest.q_offset is not None:
        order["q_offset"] = rest.q_offset.reshape(()) if rest.q_offset.shape == (1,) else rest.q_offset
    elif rest.kv_lengths is not None:
        # Cumulative lengths would align the last row with the last key of each length (S6).
        order["q_offset"] = sizes.keys() - sizes.queries()
    if rest.kv_positions is not None:
        order["kv_positions"] = rest.kv_positions
    return order


def _with_leading(arguments: dict[str, Any], leading: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments with the batch dimensions of the call in place of one (S27)."""
    result = dict(arguments)
    for name, x in arguments.items():
        behind = behind_batch(name)
        of_sequences = name == "q_offset" and "cum_seqlens_q" in arguments
        if behind is None or not isinstance(x, jax.Array) or x.ndim == 0 or of_sequences:
            continue
        dimensions = leading if x.shape[0] == math.prod(leading) else (1,) * len(leading)
        result[name] = x.reshape(*dimensions, *x.shape[x.ndim - behind :])
    return result
