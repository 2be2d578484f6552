"""The blocks that a program of the Hopper kernels visits, full and partial.

A span is start, full_start, full_stop, stop, as `attest.kernels.visibility.blocks` has them: from arrays, or,
where causal order alone decides, computed here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from attest.kernels.pallas.mosaic_gpu.blocks import ROWS
from attest.kernels.pallas.mosaic_gpu.schedule.integers import div, maximum, minimum, rem, unknown
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec

type Span = tuple[Any, Any, Any, Any]
type Arrays = Mapping[str, Any]


def locate(tile: Any, blocks: int, heads: int) -> tuple[Any, Any, Any]:
    """Return the batch row, the head and the block of a program's tile."""
    rest = div(tile, blocks)
    return div(rest, heads), rem(rest, heads), rem(tile, blocks)


def key_span(spec: KernelSpec, arrays: Arrays, batch: Any, block: Any) -> Span:
    """Return the key blocks that a block of queries visits."""
    shape = spec.shape
    if spec.visibility.uses_ranges:
        return _from_ranges(spec, arrays, batch, block)
    k_block, k_length = shape.k_block, shape.k_length
    zero, full = np.int32(0), np.int32(k_length // k_block)
    if not spec.visibility.causal:
        return _unknown(zero, zero, full, np.int32(shape.k_blocks))
    lowest = block * shape.q_block + (k_length - shape.q_length)  # the last key that the first row sees
    highest = minimum(lowest + shape.q_block - 1, k_length - 1)
    stop = maximum(div(highest + k_block, k_block), 0)
    whole = minimum(div(maximum(lowest + 1, 0), k_block), full)
    return _unknown(zero, zero, minimum(whole, stop), stop)


def part_span(spec: KernelSpec, part: Any, span: Span) -> Span:
    """Return the blocks of a span that are in a part of the keys; one of the part if none is."""
    shape = spec.shape
    if shape.key_parts == 1:
        return span
    low = part * shape.part_blocks
    high = minimum(low + shape.part_blocks, shape.k_blocks)
    start, full_start, full_stop, stop = span
    start = jnp.clip(start, low, high - 1)
    stop = jnp.clip(stop, start, high)
    full_start = jnp.clip(full_start, start, stop)
    return _unknown(start, full_start, jnp.clip(full_stop, full_start, stop), stop)


def rows_span(spec: KernelSpec, span: Span, row: Any) -> Span:
    """Return the key blocks that 64 rows from `row` on need, of those that their block of queries visits.

    In causal order the first rows of a block need fewer than the last. One at least, all hidden or not.
    """
    if spec.visibility.uses_ranges or not spec.visibility.causal or spec.shape.q_block == ROWS:
        return span
    alone = spec.with_blocks(ROWS, spec.shape.k_block)
    start, full_start, full_stop, stop = key_span(alone, {}, None, div(row, ROWS))
    return start, full_start, full_stop, minimum(maximum(stop, start + 1), span[3])


def query_span(spec: KernelSpec, arrays: Arrays, batch: Any, block: Any) -> Span:
    """Return the query blocks that visit a block of keys."""
    shape = spec.shape
    if spec.visibility.uses_ranges:
        return _from_ranges(spec, arrays, batch, block)
    zero, stop = np.int32(0), np.int32(shape.q_blocks)
    if not spec.visibility.causal:
        return _unknown(zero, zero, stop, stop)
    # The first row that sees the first key, and the first that sees all.
    first = block * shape.k_block - (shape.k_length - shape.q_length)
    all_seen = first + shape.k_block - 1
    q_block = shape.q_block
    start = minimum(div(maximum(first, 0), q_block), stop)
    whole = minimum(div(maximum(all_seen, 0) + q_block - 1, q_block), stop)
    return _unknown(start, whole, stop, stop)


def over_keys(
    spec: KernelSpec, span: Span, begin: Any, body: Callable[[bool, Any, Any], Any], carry: Any
) -> Any:
    """Return carry after body(compared, block, carry) for the key blocks of a span, from `begin` on."""
    trailing = spec.visibility.causal or spec.visibility.uses_ranges or spec.shape.ragged
    return _over(spec, span, begin, body, carry, leading=spec.visibility.uses_ranges, trailing=trailing)


def over_queries(spec: KernelSpec, span: Span, body: Callable[[bool, Any, Any], Any], carry: Any) -> Any:
    """Return carry after body(compared, block, carry) for the query blocks of a span.

    Rows past the end of the queries need no comparing: their P is 0.
    """
    leading = spec.visibility.causal or spec.visibility.uses_ranges
    return _over(spec, span, span[0], body, carry, leading=leading, trailing=spec.visibility.uses_ranges)


def _over(
    spec: KernelSpec,
    span: Span,
    begin: Any,
    body: Callable[[bool, Any, Any], Any],
    carry: Any,
    *,
    leading: bool,
    trailing: bool,
) -> Any:
    _, full_start, full_stop, stop = span

    def loop(compared: bool, begin: Any, end: Any, carry: Any) -> Any:
        return lax.fori_loop(begin, end, lambda j, carry: body(compared, j, carry), carry)

    if leading:
        carry = loop(True, begin, full_start, carry)
        begin = maximum(begin, full_start)
    if not trailing:
        return loop(False, begin, stop, carry)
    carry = loop(False, begin, full_stop, carry)
    return loop(True, maximum(begin, full_stop), stop, carry)


def _unknown(*span: Any) -> Span:
    """Return a span of which the compiler knows nothing.

    Of short ones it unrolls the loops and spills registers for it, or takes the waits out of the producer's,
    where they never wait: such a kernel has faulted on an H200.
    """
    start, full_start, full_stop, stop = unknown(*span)
    return start, full_start, full_stop, stop


def _from_ranges(spec: KernelSpec, arrays: Arrays, batch: Any, block: Any) -> Span:
    entry = batch if spec.visibility.by_batch else 0
    # In jax.shard_map what is loaded varies over its axes, and what a kernel computes is not said to: a loop
    # that counts from a loaded number would end with another type.
    start, full_start, full_stop, stop = (arrays["ranges"][entry, block, i] + 0 for i in range(4))
    return start, full_start, full_stop, stop
