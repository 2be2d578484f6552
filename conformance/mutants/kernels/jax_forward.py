"""The forward pass of the kernel in pure JAX: the online softmax over blocks of keys."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from attest.conformance.mutants.kernels.jax_tiles import (
    Call,
    add,
    cast,
    dropped,
    exp,
    factor,
    finite,
    key_tile,
    logits_of,
    row_sum,
    vector,
    weigh,
)


def forward(call: Call) -> tuple[Any, Any, Any, Any]:
    """Return out [B, Hq, S, Dv], and lse and the maxima without and with the sinks, each [B, Hq, S]."""
    batch, heads, length, _ = call.query.shape
    programs = jnp.arange(batch * heads * call.row_tiles, dtype=jnp.int32)
    out, *rows = lax.map(lambda index: _program(call, index), programs)
    lse, top, highest = (row.reshape(batch, heads, length) for row in rows)
    return out.reshape(batch, heads, length, -1), lse, top, highest


def _blocks_of(call: Call, batch: Any, i: Any) -> tuple[Any, Any]:
    """Return the first block of keys that a tile of rows may see, and the first behind the last."""
    first = vector(call.rows.first, batch, i * call.rows_in, call.rows_in).min() // call.keys_in
    last = vector(call.rows.last, batch, i * call.rows_in, call.rows_in).max() // call.keys_in + 1
    return jnp.maximum(first, 0), jnp.minimum(last, call.key_tiles)


def _sinks(call: Call, head: Any) -> Any:
    aux = jnp.atleast_2d(call.arrays["softmax_aux"]).astype(jnp.float32)
    return aux[jnp.int32(0) if aux.shape[0] == 1 else head]


def _online(call: Call, batch: Any, head: Any, i: Any, blocks: tuple[Any, Any], given: Any = None) -> Any:
    """Compute over blocks of keys (reference, sum of exponentials, weighted values, row maximum).

    given: (reference, sum) of an earlier pass, which the weights then have from the start.
    """
    variant, options = call.variant, call.options
    start, stop = blocks
    zero = jnp.zeros(call.rows_in, jnp.float32)
    none = jnp.zeros((call.rows_in, call.value.shape[3]), jnp.float32)

    def step(n: Any, carry: Any) -> Any:
        j = stop - 1 - (n - start) if variant.reverse_keys else n
        top, reference, total, lost, acc, lost_acc = carry
        logits, _, _ = logits_of(call, batch, head, i, j)
        top = jnp.maximum(top, logits.max(axis=1))
        moved = jnp.where(top > reference + jnp.float32(variant.lazy), top, reference)
        if variant.above:
            moved = jnp.maximum(reference, top + jnp.float32(variant.above))
        if given is not None:
            moved = given[0]
        shift = finite(moved)
        weights = exp(variant, logits, shift[:, None])
        rescale = exp(variant, reference, shift)
        total, lost = add(variant, total * rescale, lost * rescale, row_sum(variant, weights))
        if variant.normalised_first and given is not None:
            weights = weights / given[1][:, None]
        if variant.dropout_first:
            weights = weights * factor(options)
        weights = cast(call, dropped(call, weights, batch, head, i, j))
        values = weigh(weights, key_tile(call, call.value, batch, head, j))
        acc, lost_acc = add(variant, acc * rescale[:, None], lost_acc * rescale[:, None], values)
        return top, moved, total, lost, acc, lost_acc

    reference = jnp.full(call.rows_in, -jnp.inf, jnp.float32) if given is None else given[0]
    top = jnp.full(call.rows_in, -jnp.inf, jnp.float32)
    done = lax.fori_loop(start, stop, step, (top, reference, zero, zero, none, none))
    return done[1], done[2], done[4], done[0]


def _merge(first: Any, second: Any) -> Any:
    """Merge two partial results of one tile (split keys)."""
    reference = jnp.maximum(first[0], second[0])
    a, b = (jnp.exp(part[0] - finite(reference)) for part in (first, second))
    total = a * first[1] + b * second[1]
    acc = a[:, None] * first[2] + b[:, None] * second[2]
    return reference, total, acc, jnp.maximum(first[3], second[3])


def _program(call: Call, index: Any) -> tuple[Any, Any, Any, Any]:
    """Compute out, lse, and the maxima over visible keys and with the sinks, of one tile of rows."""
    options, variant = call.options, call.variant
    head_tile, i = index // call.row_tiles, index % call.row_tiles
    batch, head = head_tile // call.query.shape[1], head_tile % call.query.shape[1]
    start, stop = _blocks_of(call, batch, i)
    length = -(-jnp.maximum(stop - start, 0) // variant.splits)
    parts = [
        _online(call, batch, head, i, (start + n * length, jnp.minimum(start + (n + 1) * length, stop)))
        for n in range(variant.splits)
    ]
    state = parts[0]
    for part in parts[1:]:
        state = _merge(state, part)
    reference, total, acc, top = state
    highest = top
    if "softmax_aux" in call.arrays:
        sinks = _sinks(call, head)
        highest = jnp.maximum(top, sinks.max())
        joined = jnp.maximum(reference, sinks.max())
        rescale = jnp.exp(reference - finite(joined))
        exponentials = jnp.exp(sinks[None, :] - finite(joined)[:, None])
        reference, total, acc = joined, total * rescale + exponentials.sum(axis=1), acc * rescale[:, None]
    safe = jnp.where(total == 0, 1, total)
    if variant.passes == 2:
        _, _, acc, _ = _online(call, batch, head, i, (start, stop), given=(reference, safe))
    if options.rate and not variant.dropout_first:
        acc = acc * factor(options)
    if not options.normalized:
        acc = acc * jnp.exp(finite(reference) - finite(highest))[:, None]
    if options.normalized != (variant.normalised_first and variant.passes == 2):
        acc = acc / safe[:, None] if options.normalized else acc * safe[:, None]
    padding = vector(call.rows.padding, batch, i * call.rows_in, call.rows_in)
    lse = jnp.where(padding, -jnp.inf, finite(reference) + jnp.log(total))
    return acc.astype(call.dtype), lse, top, highest
