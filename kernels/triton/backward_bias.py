"""The Triton backward kernel of the bias: a program owns a tile of it.

It sums over all that the tile is broadcast over.
"""

import triton
import triton.language as tl

from attest.kernels.triton.gradient import Cotangents, load_row_terms, tile_gradient
from attest.kernels.triton.program import (
    Arrays,
    Keys,
    load_d_out_tile,
    load_own_keys,
    load_query_tile,
    load_rows,
)
from attest.kernels.triton.tile import key_order, pair_offset, tile_logits


@triton.jit
def backward_bias(
    query, key, value, mask, bias, first, last, q_ids, kv_ids, stands, slopes, ranges, seed, q_length,
    k_length,
    d_out, lse2, delta, weight, batches,
    d_bias,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Compute d_bias in its shape. Grid: (bias batches * bias heads * row blocks, or 1, * key blocks, or 1).

    A program sums over the batch entries, heads, rows and keys that its tile of the bias is broadcast over; a
    tile of logits that is hidden is not computed.
    """
    arrays = Arrays(
        query, key, value, mask, bias, first, last, q_ids, kv_ids, stands, slopes, ranges, seed, q_length,
        k_length,
    )  # fmt: skip
    cotangents = Cotangents(d_out, lse2, delta, weight)
    blocks = tl.cdiv(k_length, SPEC.shape.block_k)
    q_blocks = tl.cdiv(q_length, SPEC.shape.block_q)
    program = tl.program_id(0)
    rest = program
    q_order = tl.arange(0, SPEC.shape.block_q)
    k_order, group, word = key_order(SPEC.shape.block_k, SPEC.dropout is not None, False)
    own_keys = program * 0
    own_rows = program * 0
    own_head = program * 0
    own_batch = program * 0
    count_keys = blocks
    count_rows = q_blocks
    count_heads = SPEC.shape.heads
    count_batches = batches
    if SPEC.logits.bias.by_key:
        own_keys = rest % blocks
        rest = rest // blocks
        count_keys = 1
    if SPEC.logits.bias.by_query:
        own_rows = rest % q_blocks
        rest = rest // q_blocks
        count_rows = 1
    if SPEC.logits.bias.by_head:
        own_head = rest % SPEC.shape.heads
        rest = rest // SPEC.shape.heads
        count_heads = 1
    if SPEC.logits.bias.by_batch:
        own_batch = rest
        count_batches = 1

    total = tl.full([SPEC.shape.block_q, SPEC.shape.block_k], 0.0, tl.float32)
    for step in tl.range(0, count_batches * count_heads * count_rows * count_keys):
        block = own_keys + step % count_keys
        visited = step // count_keys
        block_q = own_rows + visited % count_rows
        head = own_head + (visited // count_rows) % count_heads
        batch = own_batch + visited // (count_rows * count_heads)
        keys = Keys(block * SPEC.shape.block_k, k_order, group, word)
        visit = True
        if SPEC.visibility.ranges:
            range_at = ranges + ((batch if SPEC.visibility.by_batch else 0) * q_blocks + block_q) * 4
            visit = (tl.load(range_at) <= block) & (block < tl.load(range_at + 3))
        if visit:
            rows = load_rows(arrays, batch, head, block_q * SPEC.shape.block_q, q_order, SPEC, True)
            Q = load_query_tile(query, rows, q_order, q_length, SPEC, not SPEC.shape.even_q)
            dO = load_d_out_tile(d_out, rows, q_order, q_length, SPEC, not SPEC.shape.even_q)
            K, V = load_own_keys(arrays, batch, head // SPEC.shape.group, keys, SPEC)
            terms = load_row_terms(cotangents, rows, rows.index < q_length, q_length, SPEC)
            u = tile_logits(Q, K, arrays, rows, keys, SPEC, SPEC.shape.even, True, False)
            total += tile_gradient(u, dO, V, terms, seed, rows, keys, SPEC, True)

    BIAS: tl.constexpr = SPEC.logits.bias
    plane_at = d_bias + pair_offset(own_batch, own_head, q_length, k_length, SPEC.shape.heads, BIAS)
    key_index = own_keys * SPEC.shape.block_k + k_order
    row_index = own_rows * SPEC.shape.block_q + q_order
    element = d_bias.dtype.element_ty
    if SPEC.logits.bias.by_query and SPEC.logits.bias.by_key:
        row = row_index[:, None]
        address = plane_at + row.to(tl.int64) * k_length + key_index[None, :]
        tl.store(address, total.to(element), mask=(row < q_length) & (key_index[None, :] < k_length))
    elif SPEC.logits.bias.by_query:
        tl.store(plane_at + row_index, tl.sum(total, 1).to(element), mask=row_index < q_length)
    elif SPEC.logits.bias.by_key:
        tl.store(plane_at + key_index, tl.sum(total, 0).to(element), mask=key_index < k_length)
    else:
        tl.store(plane_at, tl.sum(tl.sum(total, 1), 0).to(element))
