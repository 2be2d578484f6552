"""Flash attention in NumPy, forward and backward, as an outsider would write it; it compiles nothing.

All heads and rows are computed at once, block of keys after block of keys. Sums are float32; the weights and
their cotangents are cast to the inputs' dtype before they are multiplied.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attest.conformance.mutants.kernels.arguments import Options
from attest.conformance.mutants.kernels.pairs import Rows, describe_rows, keep
from attest.conformance.mutants.kernels.variants import Variant

Arrays = dict[str, Any]
F32 = np.float32
ALL = slice(None)
SUM_PARTS = 4


@dataclass(frozen=True)
class Call:
    """One call: float32 arrays [B, Hq, S, D], the heads of keys repeated for each query head."""

    variant: Variant
    options: Options
    arrays: Arrays
    query: Any
    key: Any
    value: Any
    rows: Rows
    kept: Any
    dtype: Any

    def key_blocks(self) -> Iterator[slice]:
        """The blocks of keys in their order."""
        size, length = self.variant.key_block, self.key.shape[2]
        starts = range(0, length, size)
        for start in reversed(starts) if self.variant.reverse_keys else starts:
            yield slice(start, min(start + size, length))

    def row_blocks(self) -> Iterator[slice]:
        """The blocks of rows in the order of the backward pass."""
        size, length = self.variant.query_block, self.query.shape[2]
        starts = range(0, length, size)
        for start in reversed(starts) if self.variant.reverse_rows else starts:
            yield slice(start, min(start + size, length))


def prepare(variant: Variant, options: Options, arrays: Arrays) -> Call:
    """Lay a call's arrays out by heads."""
    query, key, value = (arrays[name].astype(F32).transpose(0, 2, 1, 3) for name in ("query", "key", "value"))
    group = query.shape[1] // key.shape[1]
    shape = (query.shape[0], query.shape[2], key.shape[2])
    lengths = None
    if "cum_seqlens_q" in arrays:
        lengths = (arrays["cum_seqlens_q"], arrays["cum_seqlens_k"])
    rows = describe_rows(np, shape, options.causal, options.window, lengths, arrays.get("q_segment_ids"))
    rows = Rows(*(np.broadcast_to(x, shape[:2]) for x in (rows.first, rows.last, rows.padding)))
    key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
    kept = None
    if options.rate:
        kept = _kept(arrays["dropout_seed"], options.rate, (*query.shape[:2], *shape[1:]))
    return Call(variant, options, arrays, query, key, value, rows, kept, arrays["query"].dtype)


def _kept(seed: Any, rate: float, shape: tuple[int, ...]) -> Any:
    """Which weights dropout keeps, [B, Hq, Sq, Sk]."""
    rows, quads = np.arange(shape[2], dtype=np.int32), -(-shape[3] // 4)
    planes = [
        [keep(np, _repeat, seed, rate, (batch, head), rows, 0, 4 * quads) for head in range(shape[1])]
        for batch in range(shape[0])
    ]
    return np.array(planes)[..., : shape[3]]


def _repeat(count: int, step: Callable[[Any], Any], state: Any) -> Any:
    for _ in range(count):
        state = step(state)
    return state


def _visible(call: Call, rows: slice, keys: slice) -> Any:
    place = np.arange(call.key.shape[2])[keys]
    first, last = call.rows.first[:, rows, None], call.rows.last[:, rows, None]
    visible = (first <= place) & (place <= last)
    arrays = call.arrays
    if "q_segment_ids" in arrays:
        ids = arrays["q_segment_ids"][:, rows, None], arrays["kv_segment_ids"][:, None, keys]
        visible = visible & (ids[0] == ids[1]) & (ids[1] >= 0)
    visible = visible[:, None]
    if "attention_mask" in arrays:
        visible = visible & (arrays["attention_mask"][:, :, rows, keys] != 0)
    return visible


def _logits(call: Call, rows: slice, keys: slice) -> tuple[Any, Any, Any]:
    """The logits of a tile, -inf where hidden; the slope of the cap, or None; which pairs are seen."""
    query, key = call.query[:, :, rows], call.key[:, :, keys].swapaxes(2, 3)
    half = query.shape[3] // 2
    if call.variant.sums == "split" and half:
        logits = query[..., half:] @ key[:, :, half:] + query[..., :half] @ key[:, :, :half]
    else:
        logits = query @ key
    logits = logits * F32(call.options.scale)
    visible = _visible(call, rows, keys)
    if "bias" in call.arrays:
        bias = call.arrays["bias"]
        bias = bias[:, :, rows if bias.shape[2] > 1 else ALL, keys].astype(F32)
        visible = visible & (bias != -np.inf)
        logits = logits + bias
    slope = None
    if call.options.cap is not None:
        bent = _tanh(call.variant, logits / F32(call.options.cap))
        logits = F32(call.options.cap) * bent
        slope = 1 - bent * bent
    return np.where(visible, logits, F32(-np.inf)), slope, visible


def _tanh(variant: Variant, x: Any) -> Any:
    if variant.tanh == "double":
        return np.tanh(x.astype(np.float64)).astype(F32)
    if variant.tanh == "expm1":
        part = np.expm1(F32(-2) * np.abs(x))
        return np.sign(x) * (-part / (2 + part))
    return np.tanh(x)


def _exp(variant: Variant, difference: Any) -> Any:
    if variant.exponential == "exp2":
        return np.exp2(difference * F32(np.log2(np.e)))
    return np.exp(difference)


def _finite(x: Any) -> Any:
    return np.where(np.isfinite(x), x, F32(0))


def _cast(call: Call, weights: Any) -> Any:
    return weights.astype(call.dtype).astype(F32)


def _weigh(weights: Any, values: Any) -> Any:
    """weights @ values, where a weight of 0 takes nothing, NaN and inf included."""
    known = np.isfinite(values)
    if known.all():
        return weights @ values
    touched = (weights != 0).astype(F32) @ (~known).astype(F32)
    return np.where(touched > 0, F32(np.nan), weights @ np.where(known, values, F32(0)))


def _dropped(call: Call, weights: Any, rows: slice, keys: slice) -> Any:
    return weights if call.kept is None else np.where(call.kept[:, :, rows, keys], weights, F32(0))


def _factor(options: Options) -> Any:
    return F32(1 / (1 - options.rate))


def _row_sum(variant: Variant, weights: Any) -> Any:
    if variant.sums == "split":
        parts = [weights[..., k::SUM_PARTS].sum(axis=3, dtype=F32) for k in range(SUM_PARTS)]
        return (parts[0] + parts[1]) + (parts[2] + parts[3])
    return weights.sum(axis=3, dtype=F32)


def _add(variant: Variant, total: Any, lost: Any, term: Any) -> tuple[Any, Any]:
    """total + term, and what the addition lost, which only the compensated sum carries on."""
    if variant.sums != "kahan":
        return total + term, lost
    term = term - lost
    summed = total + term
    return summed, (summed - total) - term


def _online(call: Call, blocks: list[slice], given: Any = None) -> tuple[Any, Any, Any, Any]:
    """Walk over blocks of keys: (reference, sum of exponentials, weighted values, row maximum).

    given: (reference, sum) of an earlier pass, which the weights then have from the start.
    """
    variant = call.variant
    lanes = call.query.shape[:3]
    top = np.full(lanes, -np.inf, F32)
    reference = top if given is None else given[0]
    total, lost = np.zeros(lanes, F32), np.zeros(lanes, F32)
    acc = lost_acc = np.zeros((*lanes, call.value.shape[3]), F32)
    for keys in blocks:
        logits, _, _ = _logits(call, ALL, keys)
        top = np.maximum(top, logits.max(axis=3, initial=-np.inf))
        moved = np.where(top > reference + F32(variant.lazy), top, reference)
        if variant.above:
            moved = np.maximum(reference, top + F32(variant.above))
        if given:
            moved = given[0]
        shift = _finite(moved)
        weights = _exp(variant, logits - shift[..., None])
        rescale = _exp(variant, reference - shift)
        total, lost = _add(variant, total * rescale, lost * rescale, _row_sum(variant, weights))
        if variant.normalised_first and given:
            weights = weights / given[1][..., None]
        if variant.dropout_first:
            weights = weights * _factor(call.options)
        values = _weigh(_cast(call, _dropped(call, weights, ALL, keys)), call.value[:, :, keys])
        acc, lost_acc = _add(variant, acc * rescale[..., None], lost_acc * rescale[..., None], values)
        reference = moved
    return reference, total, acc, top


def _merged(parts: list[Any]) -> tuple[Any, Any, Any, Any]:
    """Partial results over ranges of keys as one."""
    reference, total, acc, top = parts[0]
    for part in parts[1:]:
        joined = np.maximum(reference, part[0])
        a, b = np.exp(reference - _finite(joined)), np.exp(part[0] - _finite(joined))
        total, acc = a * total + b * part[1], a[..., None] * acc + b[..., None] * part[2]
        reference, top = joined, np.maximum(top, part[3])
    return reference, total, acc, top


def forward(call: Call) -> tuple[Any, Any, Any, Any]:
    """out [B, Hq, Sq, Dv] and, each [B, Hq, Sq], lse and the maxima over visible keys and with the sinks."""
    options, variant = call.options, call.variant
    blocks = list(call.key_blocks())
    each = -(-len(blocks) // variant.splits) or 1
    ranges = [blocks[start : start + each] for start in range(0, max(len(blocks), 1), each)]
    reference, total, acc, top = _merged([_online(call, part) for part in ranges])
    highest = top
    if "softmax_aux" in call.arrays:
        sinks = np.atleast_2d(call.arrays["softmax_aux"]).astype(F32)[None, :, None, :]
        most = sinks.max(axis=3)
        highest, joined = np.maximum(top, most), np.maximum(reference, most)
        rescale = np.exp(reference - _finite(joined))
        total = total * rescale + np.exp(sinks - _finite(joined)[..., None]).sum(axis=3, dtype=F32)
        reference, acc = joined, acc * rescale[..., None]
    safe = np.where(total == 0, F32(1), total)
    if variant.passes == 2:
        _, _, acc, _ = _online(call, blocks, given=(reference, safe))
    if options.rate and not variant.dropout_first:
        acc = acc * _factor(options)
    if not options.normalized:
        acc = acc * np.exp(_finite(reference) - _finite(highest))[..., None]
    if options.normalized != (variant.normalised_first and variant.passes == 2):
        acc = acc / safe[..., None] if options.normalized else acc * safe[..., None]
    lse = np.where(call.rows.padding[:, None], F32(-np.inf), _finite(reference) + np.log(total))
    return acc.astype(call.dtype), lse, top, highest


def backward(call: Call, saved: tuple[Any, Any, Any, Any], d_out: Any, d_lse: Any) -> Arrays:
    """The gradients by name in float32, those of key and value summed over their group."""
    out, lse, top, highest = saved
    if call.variant.lse_again:
        other = replace(call.variant, reverse_keys=not call.variant.reverse_keys)
        lse = forward(replace(call, variant=other))[1]
    d_out = d_out.astype(F32).transpose(0, 2, 1, 3)
    sees = top != -np.inf
    delta = -np.where(lse == -np.inf, F32(0), d_lse.astype(F32))
    weight = np.ones_like(lse)
    if call.options.normalized:
        delta = delta + np.where(sees, _rowsum(call, d_out, out, lse), F32(0))
    else:
        weight = np.where(sees, np.exp(lse - np.where(sees, highest, F32(0))), F32(0))
    gradients = _walk(call, d_out, lse, delta, weight)
    if "softmax_aux" in call.arrays:
        gradients["softmax_aux"] = _sink_gradient(call, lse, delta)
    return gradients


def _rowsum(call: Call, d_out: Any, out: Any, lse: Any) -> Any:
    if call.variant.delta == "out":
        return (d_out * out.astype(F32)).sum(axis=3, dtype=F32)
    total = np.zeros_like(lse)
    for keys in call.key_blocks():
        P, dP, _, visible = _tile(call, d_out, lse, ALL, keys)
        total = total + np.where(visible, P * dP, F32(0)).sum(axis=3, dtype=F32)
    return total


def _tile(call: Call, d_out: Any, lse: Any, rows: slice, keys: slice) -> tuple[Any, Any, Any, Any]:
    """P recomputed from the lse, dP with dropout's factors, the slope of the cap and what is seen."""
    logits, slope, visible = _logits(call, rows, keys)
    P = np.where(visible, _exp(call.variant, np.minimum(logits - lse[:, :, rows, None], 0)), F32(0))
    dP = d_out[:, :, rows] @ call.value[:, :, keys].swapaxes(2, 3)
    return P, _dropped(call, dP, rows, keys) * _factor(call.options), slope, visible


def _walk(call: Call, d_out: Any, lse: Any, delta: Any, weight: Any) -> Arrays:
    scale = F32(call.options.scale)
    d_query, d_key, d_value = (np.zeros_like(x) for x in (call.query, call.key, call.value))
    bias = call.arrays.get("bias")
    d_bias: Any = None if bias is None else np.zeros(bias.shape, F32)
    for keys in call.key_blocks():
        for rows in call.row_blocks():
            P, dP, slope, visible = _tile(call, d_out, lse, rows, keys)
            dS = P * (weight[:, :, rows, None] * dP - delta[:, :, rows, None])
            dS = np.where(visible, dS if slope is None else dS * slope, F32(0))
            kept = _dropped(call, P * weight[:, :, rows, None], rows, keys) * _factor(call.options)
            kept = _cast(call, np.where(visible, kept, F32(0)))
            rounded = _cast(call, dS)
            d_value[:, :, keys] += _weigh(kept.swapaxes(2, 3), d_out[:, :, rows])
            d_key[:, :, keys] += _weigh(rounded.swapaxes(2, 3), call.query[:, :, rows]) * scale
            d_query[:, :, rows] += _weigh(rounded, call.key[:, :, keys]) * scale
            if d_bias is not None:
                into = d_bias[:, :, rows if d_bias.shape[2] > 1 else ALL, keys]
                summed = tuple(axis for axis in (0, 1, 2) if into.shape[axis] == 1)
                into += dS.sum(axis=summed, keepdims=True, dtype=F32)
    kv_heads = call.arrays["key"].shape[2]
    gradients = {"query": d_query}
    for name, gradient in (("key", d_key), ("value", d_value)):
        group = gradient.shape[1] // kv_heads
        grouped = gradient.reshape(len(gradient), kv_heads, group, *gradient.shape[2:])
        gradients[name] = grouped.sum(axis=2, dtype=F32)
    return gradients if d_bias is None else gradients | {"bias": d_bias}


def _sink_gradient(call: Call, lse: Any, delta: Any) -> Any:
    aux = call.arrays["softmax_aux"]
    sinks = np.atleast_2d(aux).astype(F32)
    padding = (lse == -np.inf)[..., None]
    P = np.exp(sinks[None, :, None, :] - np.where(padding, F32(0), lse[..., None]))
    per_head = -np.where(padding, F32(0), P * delta[..., None]).sum(axis=(0, 2), dtype=F32)
    return (per_head.sum(axis=0) if len(sinks) == 1 else per_head).reshape(aux.shape)
