"""The records of a Triton program, and what a program does before its loop over tiles.

Triton 3.6 takes named tuples inside a kernel and jax-triton 0.3.1 none as its arguments: a kernel has its
arrays as parameters of its own and gathers them in `Arrays`. A record of the spec gets a name, a
`tl.constexpr`, before it is passed on: Triton 3.6 does not take it otherwise.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attest.kernels.triton.tile import load_tile, pair_offset, row_pointer


class Arrays(NamedTuple):
    """The pointers and lengths of a launch. The query stands in for an array that is absent, never read.

    `query`, `key`, `value`, `mask`, `bias`, `q_ids` and `kv_ids` as `attest.kernels.call.call.Call` has them;
    `slopes` are its alibi_slopes. `first`, `last` and, as `stands`, position as
    `attest.kernels.visibility.intervals.Rows` has them; `seed` as `dropout_words` of
    `attest.kernels.numerics.philox` returns it.
    `ranges` as `attest.kernels.visibility.blocks.key_blocks` makes it, or `query_blocks` for `backward_key`.
    """

    query: Any
    key: Any
    value: Any
    mask: Any
    bias: Any
    first: Any
    last: Any
    q_ids: Any
    kv_ids: Any
    stands: Any
    slopes: Any
    ranges: Any
    seed: Any
    q_length: Any
    k_length: Any


class Rows(NamedTuple):
    """A block of R queries of a head, and where what it is compared with lies.

    start: its first row; index: [R] rows within the batch entry; first, last, ids: [R] int32, the interval of
    visible keys and the segment of each row; stand: [R] int32, where it stands among the keys, for ALiBi;
    slope: that of the head. kv_ids points at the batch entry; mask and bias at the plane.
    """

    batch: Any
    head: Any
    start: Any
    index: Any
    first: Any
    last: Any
    ids: Any
    stand: Any
    slope: Any
    kv_ids: Any
    mask: Any
    bias: Any


class Keys(NamedTuple):
    """A block of keys: its first key, then [K] int32 as `attest.kernels.triton.tile.key_order` has them.

    order: the key of each column, from the first; group, word: its place in a group of four.
    """

    start: Any
    order: Any
    group: Any
    word: Any


class Ranges(NamedTuple):
    """The blocks that a block visits: [start, stop), of which [full_start, full_stop) are full blocks."""

    start: Any
    full_start: Any
    full_stop: Any
    stop: Any


@triton.jit
def own_block(length, BLOCK: tl.constexpr, HEADS: tl.constexpr, SPEC: tl.constexpr):
    """Return batch entry, head, block of this program in a grid of (batch * HEADS * blocks of `length`)."""
    blocks = tl.cdiv(length, BLOCK)
    program = tl.program_id(0)
    if SPEC.logits.bias is not None and not SPEC.logits.bias.by_batch:
        # Batch entries that share a tile of the bias run together and read it once from memory.
        batches = tl.num_programs(0) // (blocks * HEADS)
        batch = program % batches
        program = program // batches
        block = program % blocks
        head = (program // blocks) % HEADS
    elif SPEC.shape.head_swizzle > 1:
        # The first blocks of all heads of a group, then the second ones; the last group may have fewer heads.
        group = program // (blocks * SPEC.shape.head_swizzle)
        rest = program % (blocks * SPEC.shape.head_swizzle)
        members = tl.minimum(
            SPEC.shape.head_swizzle, tl.num_programs(0) // blocks - group * SPEC.shape.head_swizzle
        )
        block = rest // members
        place = group * SPEC.shape.head_swizzle + rest % members
        batch = place // HEADS
        head = place % HEADS
    else:
        batch = program // (blocks * HEADS)
        head = (program // blocks) % HEADS
        block = program % blocks
    return batch, head, block


@triton.jit
def own_query_block(q_length, SPEC: tl.constexpr):
    """Return `own_block` of queries, the last block first: under causal order it has the most keys."""
    batch, head, block = own_block(q_length, SPEC.shape.block_q, SPEC.shape.heads, SPEC)
    return batch, head, tl.cdiv(q_length, SPEC.shape.block_q) - 1 - block


@triton.jit
def load_ranges(arrays, batch, block, blocks, visited, full, SPEC: tl.constexpr):
    """Load the `Ranges` of `block`, of `blocks`; without ranges, `visited` blocks, of which `full` are full.

    A mask or bias is compared with every pair: no block is full then.
    """
    start = 0
    stop = visited
    full_start = 0
    full_stop = full
    if SPEC.visibility.ranges:
        range_at = arrays.ranges + ((batch if SPEC.visibility.by_batch else 0) * blocks + block) * 4
        start = tl.load(range_at)
        full_start = tl.load(range_at + 1)
        full_stop = tl.load(range_at + 2)
        stop = tl.load(range_at + 3)
    if SPEC.pairwise:
        full_start = start
        full_stop = start
    return Ranges(start, full_start, full_stop, stop)


@triton.jit
def load_key_ranges(arrays, batch, block, SPEC: tl.constexpr):
    """Load the `Ranges` of keys that a block of queries visits."""
    blocks = tl.cdiv(arrays.q_length, SPEC.shape.block_q)
    k_length = arrays.k_length
    visited, full = tl.cdiv(k_length, SPEC.shape.block_k), k_length // SPEC.shape.block_k
    return load_ranges(arrays, batch, block, blocks, visited, full, SPEC)


@triton.jit
def in_own_part(ranges, k_length, SPEC: tl.constexpr):
    """Return the blocks of `ranges` in the part of the keys of this program, along axis 1 of the grid."""
    if SPEC.shape.key_parts > 1:
        size = tl.cdiv(tl.cdiv(k_length, SPEC.shape.block_k), SPEC.shape.key_parts)
        low = tl.program_id(1) * size
        high = low + size
        ranges = Ranges(
            tl.minimum(tl.maximum(ranges.start, low), high),
            tl.minimum(tl.maximum(ranges.full_start, low), high),
            tl.minimum(tl.maximum(ranges.full_stop, low), high),
            tl.minimum(tl.maximum(ranges.stop, low), high),
        )
    return ranges


@triton.jit
def visits(ranges, EDGE: tl.constexpr):
    """Return how many blocks the loop over partial blocks visits, or the loop over full ones if not EDGE."""
    if EDGE:
        count = (ranges.full_start - ranges.start) + (ranges.stop - ranges.full_stop)
    else:
        count = ranges.full_stop - ranges.full_start
    return count


@triton.jit
def visited_block(ranges, step, EDGE: tl.constexpr):
    """Return the block that a loop visits at a step: the partial ones lie on both sides of the full ones."""
    if EDGE:
        block = ranges.start + step
        block = tl.where(block < ranges.full_start, block, block - ranges.full_start + ranges.full_stop)
    else:
        block = ranges.full_start + step
    return block


@triton.jit
def load_rows(arrays, batch, head, start, order, SPEC: tl.constexpr, EDGE: tl.constexpr):
    """Load the `Rows` `start` + `order` of a head; nothing is visible past the length.

    Without EDGE its tiles are compared with nothing, so that intervals and segments are not loaded.
    """
    q_length, k_length = arrays.q_length, arrays.k_length
    index = start + order
    inside = index < q_length
    first = tl.zeros_like(index)
    last = tl.zeros_like(index)
    ids = tl.zeros_like(index)
    stand = tl.zeros_like(index)
    slope = 0.0
    kv_ids = arrays.kv_ids
    mask = arrays.mask
    bias = arrays.bias
    plane = (batch if SPEC.visibility.by_batch else 0) * q_length + index
    if SPEC.logits.alibi:
        stand = tl.load(arrays.stands + plane, mask=inside, other=0)
        slopes = arrays.slopes + (batch if SPEC.logits.slopes_by_batch else 0) * SPEC.shape.heads
        slope = tl.load(slopes + head)
    if EDGE:
        if SPEC.visibility.first:
            first = tl.load(arrays.first + plane, mask=inside, other=k_length)
        if SPEC.visibility.last:
            last = tl.load(arrays.last + plane, mask=inside, other=-1)
        if SPEC.visibility.segments:
            ids = tl.load(arrays.q_ids + batch * q_length + index, mask=inside, other=-1)
            kv_ids = kv_ids + batch.to(tl.int64) * k_length
        if SPEC.visibility.mask is not None:
            MASK: tl.constexpr = SPEC.visibility.mask
            mask = mask + pair_offset(batch, head, q_length, k_length, SPEC.shape.heads, MASK)
        if SPEC.logits.bias is not None:
            BIAS: tl.constexpr = SPEC.logits.bias
            bias = bias + pair_offset(batch, head, q_length, k_length, SPEC.shape.heads, BIAS)
    return Rows(batch, head, start, index, first, last, ids, stand, slope, kv_ids, mask, bias)


@triton.jit
def load_query_tile(query, rows, order, q_length, SPEC: tl.constexpr, CHECK: tl.constexpr):
    """Load the tile [R, D] of `rows` of query, `order` from their first; CHECK as in `load_tile`."""
    QUERY: tl.constexpr = SPEC.shape.query
    at = row_pointer(query, rows.batch, rows.head, q_length, rows.start, QUERY)
    return load_tile(at, order, q_length - rows.start, QUERY, CHECK)


@triton.jit
def load_d_out_tile(d_out, rows, order, q_length, SPEC: tl.constexpr, CHECK: tl.constexpr):
    """Load the tile [R, DV] of `rows` of the cotangent of out; see `load_query_tile`."""
    OUT: tl.constexpr = SPEC.shape.out
    at = row_pointer(d_out, rows.batch, rows.head, q_length, rows.start, OUT)
    return load_tile(at, order, q_length - rows.start, OUT, CHECK)


@triton.jit
def key_pointers(arrays, batch, key_head, start, SPEC: tl.constexpr):
    """Return pointers to key `start` of a key head and to its value."""
    KEY: tl.constexpr = SPEC.shape.key
    VALUE: tl.constexpr = SPEC.shape.value
    key = row_pointer(arrays.key, batch, key_head, arrays.k_length, start, KEY)
    value = row_pointer(arrays.value, batch, key_head, arrays.k_length, start, VALUE)
    return key, value


@triton.jit
def load_key_tile(k_at, keys, k_length, SPEC: tl.constexpr, CHECK: tl.constexpr):
    """Load the tile [K, D] of `keys`; `k_at` points at the first key; CHECK as in `load_tile`."""
    KEY: tl.constexpr = SPEC.shape.key
    at = k_at + keys.start.to(tl.int64) * KEY.stride
    return load_tile(at, keys.order, k_length - keys.start, KEY, CHECK)


@triton.jit
def load_value_tile(v_at, keys, k_length, SPEC: tl.constexpr, CHECK: tl.constexpr):
    """Load the tile [K, DV] of the values of `keys`, as `load_key_tile` loads that of the keys."""
    VALUE: tl.constexpr = SPEC.shape.value
    at = v_at + keys.start.to(tl.int64) * VALUE.stride
    return load_tile(at, keys.order, k_length - keys.start, VALUE, CHECK)


@triton.jit
def load_own_keys(arrays, batch, key_head, keys, SPEC: tl.constexpr):
    """Load K and V of the block of keys that a program owns."""
    k_length = arrays.k_length
    k_at, v_at = key_pointers(arrays, batch, key_head, keys.start, SPEC)
    limit = k_length - keys.start
    KEY: tl.constexpr = SPEC.shape.key
    VALUE: tl.constexpr = SPEC.shape.value
    K = load_tile(k_at, keys.order, limit, KEY, not SPEC.shape.even_k)
    V = load_tile(v_at, keys.order, limit, VALUE, not SPEC.shape.even_k)
    return K, V
