"""One tile of rows and keys of the kernel in pure JAX: its logits, what it sees, its roundings and sums."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from attest.conformance.mutants.kernels.arguments import Options
from attest.conformance.mutants.kernels.pairs import Rows, describe_rows, keep
from attest.conformance.mutants.kernels.variants import Variant

Arrays = dict[str, Any]
LOG2_E = 1.4426950408889634
DIFFERENTIATED = ("query", "key", "value", "bias", "softmax_aux")


@dataclass(frozen=True)
class Call:
    """One call as its tiles see it: float32 arrays [B, H, S, D] padded to whole tiles, and sizes."""

    variant: Variant
    options: Options
    arrays: Arrays
    query: Any
    key: Any
    value: Any
    dtype: Any
    rows: Rows
    rows_in: int
    keys_in: int

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def row_tiles(self) -> int:
        """Tiles of rows; at least one."""
        return self.query.shape[2] // self.rows_in

    @property
    def key_tiles(self) -> int:
        """Blocks of keys; at least one."""
        return self.key.shape[2] // self.keys_in


def prepare(variant: Variant, options: Options, arrays: Arrays) -> Call:
    """Return a call with its arrays padded to whole tiles."""
    query, key, value = (
        arrays[name].astype(jnp.float32).transpose(0, 2, 1, 3) for name in DIFFERENTIATED[:3]
    )
    rows_in, keys_in = variant.query_block, variant.key_block
    q_len, kv_len = query.shape[2], key.shape[2]
    lengths = None
    if "cum_seqlens_q" in arrays:
        lengths = (arrays["cum_seqlens_q"], arrays["cum_seqlens_k"])
    ids = arrays.get("q_segment_ids")
    rows = describe_rows(jnp, (query.shape[0], q_len, kv_len), options.causal, options.window, lengths, ids)
    whole = (query.shape[0], q_len)
    padded = Rows(
        pad(jnp.broadcast_to(rows.first, whole), 1, rows_in, kv_len),
        pad(jnp.broadcast_to(rows.last, whole), 1, rows_in, -1),
        pad(jnp.broadcast_to(rows.padding, whole), 1, rows_in, True),
    )
    tiled = {name: arrays[name] for name in arrays if name not in DIFFERENTIATED[:3]}
    for name in ("attention_mask", "bias"):
        if name in tiled:
            own_rows = tiled[name].shape[2] == q_len
            tiled[name] = pad(pad(tiled[name], 3, keys_in, 0), 2, rows_in if own_rows else 1, 0)
    for name, size in (("q_segment_ids", rows_in), ("kv_segment_ids", keys_in)):
        if name in tiled:
            tiled[name] = pad(tiled[name], 1, size, -1)
    query = pad(query, 2, rows_in, 0)
    key, value = pad(key, 2, keys_in, 0), pad(value, 2, keys_in, 0)
    return Call(variant, options, tiled, query, key, value, arrays["query"].dtype, padded, rows_in, keys_in)


def pad(array: Any, axis: int, size: int, fill: Any) -> Any:
    """Return an array with an axis padded to full blocks, at least one."""
    length = array.shape[axis]
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, max(-(-length // size), 1) * size - length)
    return jnp.pad(array, widths, constant_values=fill)


def take(array: Any, places: tuple[Any, ...], sizes: tuple[int, ...]) -> Any:
    """Take a slice of the last two axes of [B or 1, H or 1, R or 1, C] at (batch, head, row, column)."""
    starts = [
        jnp.int32(0) if length == 1 else jnp.asarray(place, jnp.int32)
        for place, length in zip(places, array.shape, strict=True)
    ]
    taken = (1, 1, *(min(size, length) for size, length in zip(sizes, array.shape[2:], strict=True)))
    return lax.dynamic_slice(array, starts, taken)[0, 0]


def vector(array: Any, batch: Any, place: Any, size: int) -> Any:
    """Take a slice of [B, S] at (batch, place)."""
    starts = (jnp.asarray(batch, jnp.int32), jnp.asarray(place, jnp.int32))
    return lax.dynamic_slice(array, starts, (1, size))[0]


def row_tile(call: Call, array: Any, batch: Any, head: Any, i: Any) -> Any:
    """Take tile i of rows of a query head."""
    return take(array, (batch, head, i * call.rows_in, 0), (call.rows_in, array.shape[3]))


def key_tile(call: Call, array: Any, batch: Any, head: Any, j: Any) -> Any:
    """Take block j of the keys, or their values, that a query head reads."""
    return take(array, (batch, head // call.group, j * call.keys_in, 0), (call.keys_in, array.shape[3]))


def _visible(call: Call, batch: Any, head: Any, i: Any, j: Any) -> Any:
    """Return which pairs of a tile are seen, the bias aside."""
    row, key = i * call.rows_in, j * call.keys_in
    keys = key + jnp.arange(call.keys_in, dtype=jnp.int32)
    first = vector(call.rows.first, batch, row, call.rows_in)
    last = vector(call.rows.last, batch, row, call.rows_in)
    visible = (first[:, None] <= keys[None, :]) & (keys[None, :] <= last[:, None])
    arrays = call.arrays
    if "q_segment_ids" in arrays:
        q_ids = vector(arrays["q_segment_ids"], batch, row, call.rows_in)
        kv_ids = vector(arrays["kv_segment_ids"], batch, key, call.keys_in)
        visible = visible & (q_ids[:, None] == kv_ids[None, :]) & (kv_ids >= 0)[None, :]
    if "attention_mask" in arrays:
        sizes = (call.rows_in, call.keys_in)
        visible = visible & take(arrays["attention_mask"], (batch, head, row, key), sizes).astype(bool)
    return visible


def logits_of(call: Call, batch: Any, head: Any, i: Any, j: Any) -> tuple[Any, Any, Any]:
    """Return of one tile the logits, -inf where hidden; the slope of the cap; which pairs are seen."""
    options = call.options
    query, key = row_tile(call, call.query, batch, head, i), key_tile(call, call.key, batch, head, j)
    logits = _products(call.variant, query, key) * jnp.float32(options.scale)
    visible = _visible(call, batch, head, i, j)
    if "bias" in call.arrays:
        sizes = (call.rows_in, call.keys_in)
        place = (batch, head, i * call.rows_in, j * call.keys_in)
        bias = take(call.arrays["bias"], place, sizes).astype(jnp.float32)
        visible = visible & (bias != -jnp.inf)
        logits = logits + bias
    slope = None
    if options.cap is not None:
        bent = _tanh(call.variant, logits / jnp.float32(options.cap))
        logits = jnp.float32(options.cap) * bent
        slope = 1 - bent * bent
    # Stored, so that no compiler fuses the last product into a difference with the rounded maximum.
    return lax.optimization_barrier(jnp.where(visible, logits, -jnp.inf)), slope, visible


def _products(variant: Variant, query: Any, key: Any) -> Any:
    half = query.shape[1] // 2
    if variant.sums == "split" and half:
        return query[:, half:] @ key[:, half:].T + query[:, :half] @ key[:, :half].T
    return query @ key.T


def _tanh(variant: Variant, x: Any) -> Any:
    if variant.tanh == "expm1":
        part = jnp.expm1(-2 * jnp.abs(x))
        return jnp.sign(x) * (-part / (2 + part))
    return jnp.tanh(x)


def exp(variant: Variant, logits: Any, reference: Any) -> Any:
    """Return the exponentials of logits - reference, at most 1 but where the reference lags behind."""
    if variant.exponential == "exp2":
        return jnp.exp2((logits - reference) * jnp.float32(LOG2_E))
    return jnp.exp(logits - reference)


def dropped(call: Call, weights: Any, batch: Any, head: Any, i: Any, j: Any) -> Any:
    """Return the weights that dropout keeps, without its factor."""
    if call.options.rate == 0:
        return weights
    rows = i * call.rows_in + jnp.arange(call.rows_in, dtype=jnp.int32)
    seed, rate = call.arrays["dropout_seed"], call.options.rate
    kept = keep(jnp, _repeat, seed, rate, (batch, head), rows, j * call.keys_in, call.keys_in)
    return jnp.where(kept, weights, 0)


def _repeat(count: int, step: Callable[[Any], Any], state: Any) -> Any:
    return lax.fori_loop(0, count, lambda _, state: step(state), state)


def factor(options: Options) -> Any:
    """Return the factor of the weights that dropout keeps."""
    return jnp.float32(1 / (1 - options.rate))


def cast(call: Call, weights: Any) -> Any:
    """Return weights as the matrix unit takes them; the barrier keeps XLA from undoing the cast."""
    return lax.optimization_barrier(weights.astype(call.dtype)).astype(jnp.float32)


def weigh(weights: Any, values: Any) -> Any:
    """Multiply weights by values, where a weight of 0 takes nothing, NaN and inf included."""
    finite = jnp.isfinite(values)
    touched = (weights != 0).astype(jnp.float32) @ (~finite).astype(jnp.float32)
    return jnp.where(touched > 0, jnp.nan, weights @ jnp.where(finite, values, 0))


def finite(x: Any) -> Any:
    """Return x with 0 for what is not finite."""
    return jnp.where(jnp.isfinite(x), x, 0)


def row_sum(variant: Variant, weights: Any) -> Any:
    """Sum the keys of each row, in one way or the other."""
    if variant.sums == "split":
        return weights.reshape(weights.shape[0], 4, -1).sum(axis=1).sum(axis=1)
    return weights.sum(axis=1)


def add(variant: Variant, total: Any, lost: Any, term: Any) -> tuple[Any, Any]:
    """Return total + term, and what the addition lost, which only the compensated sum carries on."""
    if variant.sums != "kahan":
        return total + term, lost
    term = term - lost
    summed = lax.optimization_barrier(total + term)
    return summed, (summed - total) - term
