"""The Triton backward kernel of the bias: a program owns a tile of it.

It sums over all that the tile is broadcast over; the operands are explained in
`attest.kernels.triton.backward_query`.
"""

import triton
import triton.language as tl

from attest.kernels.triton.tile import (
    kept_pairs,
    key_order,
    load_rows,
    load_tile,
    offset,
    pair_offset,
    tile_logits,
    weights_of_lse,
)


@triton.jit
def backward_bias(
    query, key, value, mask, bias, first, last, q_ids, kv_ids, ranges, seed, d_out, lse2, delta, weight,
    batches, q_length, k_length,
    d_bias,
    D: tl.constexpr, DV: tl.constexpr, K_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, CAP: tl.constexpr, ROUND: tl.constexpr,
    MASK: tl.constexpr, MASK_BATCH: tl.constexpr, MASK_HEAD: tl.constexpr,
    BIAS_BATCH: tl.constexpr, BIAS_HEAD: tl.constexpr, BIAS_ROW: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, ROW_BATCH: tl.constexpr, SEGMENTS: tl.constexpr,
    RANGES: tl.constexpr, ALIGNED: tl.constexpr, EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """d_bias in the bias's shape. Grid: (bias batches * bias heads * row blocks, or 1, * key blocks).

    A program sums over the batch entries, heads and rows that its tile of the bias is broadcast over; a tile
    of logits that is hidden is not computed.
    """
    HEADS: tl.constexpr = K_HEADS * GROUP
    blocks = tl.cdiv(k_length, BLOCK_K)
    q_blocks = tl.cdiv(q_length, BLOCK_Q)
    program = tl.program_id(0)
    block = program % blocks
    rest = program // blocks
    key_start = block * BLOCK_K
    q_order = tl.arange(0, BLOCK_Q)
    k_order, group, word = key_order(BLOCK_K, DROPOUT, False)
    keys = (key_start + k_order)[None, :]
    own_rows = program * 0
    own_head = program * 0
    own_batch = program * 0
    count_rows = q_blocks
    count_heads = HEADS
    count_batches = batches
    if BIAS_ROW:
        own_rows = rest % q_blocks
        rest = rest // q_blocks
        count_rows = 1
    if BIAS_HEAD:
        own_head = rest % HEADS
        rest = rest // HEADS
        count_heads = 1
    if BIAS_BATCH:
        own_batch = rest
        count_batches = 1

    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for step in tl.range(0, count_batches * count_heads * count_rows):
        block_q = own_rows + step % count_rows
        head = own_head + (step // count_rows) % count_heads
        batch = own_batch + step // (count_rows * count_heads)
        visit = True
        if RANGES:
            range_at = ranges + ((batch if ROW_BATCH else 0) * q_blocks + block_q) * 4
            visit = (tl.load(range_at) <= block) & (block < tl.load(range_at + 3))
        if visit:
            row_start = block_q * BLOCK_Q
            row = row_start + q_order
            inside = row < q_length
            key_head = head // GROUP
            Q = load_tile(
                query + offset(batch, q_length, row_start, HEADS * D) + head * D,
                q_order, q_length - row_start, HEADS * D, D, BLOCK_D, not EVEN_Q,
            )  # fmt: skip
            dO = load_tile(
                d_out + offset(batch, q_length, row_start, HEADS * DV) + head * DV,
                q_order, q_length - row_start, HEADS * DV, DV, BLOCK_DV, not EVEN_Q,
            )  # fmt: skip
            K = load_tile(
                key + offset(batch, k_length, key_start, K_HEADS * D) + key_head * D,
                k_order, k_length - key_start, K_HEADS * D, D, BLOCK_D, not EVEN_K,
            )  # fmt: skip
            V = load_tile(
                value + offset(batch, k_length, key_start, K_HEADS * DV) + key_head * DV,
                k_order, k_length - key_start, K_HEADS * DV, DV, BLOCK_DV, not EVEN_K,
            )  # fmt: skip
            row_at = (batch * HEADS + head).to(tl.int64) * q_length + row
            L = tl.load(lse2 + row_at, mask=inside, other=float("inf"))[:, None]
            Delta = tl.load(delta + row_at, mask=inside, other=0.0)[:, None]
            if WEIGHTED:
                W = tl.load(weight + row_at, mask=inside, other=0.0)[:, None]
            first_key, last_key, row_ids = load_rows(
                first, last, q_ids, batch, row, q_length, FIRST, LAST, ROW_BATCH, SEGMENTS
            )
            mask_at = mask
            if MASK:
                mask_at = mask + pair_offset(
                    batch, head, q_length, k_length, HEADS, MASK_BATCH, MASK_HEAD, True
                )
            bias_at = bias + pair_offset(
                batch, head, q_length, k_length, HEADS, BIAS_BATCH, BIAS_HEAD, BIAS_ROW
            )
            u = tile_logits(
                Q, K, row_start, row[:, None], keys, q_length, k_length, first_key[:, None],
                last_key[:, None], row_ids[:, None], kv_ids + batch.to(tl.int64) * k_length, mask_at, bias_at,
                SCALE, CAP, ROUND, MASK, True, BIAS_ROW, FIRST, LAST, SEGMENTS, ALIGNED,
                EVEN_Q and EVEN_K, True, PRECISION,
            )  # fmt: skip
            P = weights_of_lse(u, L, UNIT)
            dP = tl.dot(dO, tl.trans(V), input_precision=PRECISION)
            if DROPOUT:
                kept = kept_pairs(
                    seed, batch, head, row[:, None], key_start, group[None, :], word[None, :], THRESHOLD
                )
                dP = tl.where(kept, dP * KEEP, 0.0)
            if WEIGHTED:
                dP = dP * W
            dS = P * (dP - Delta)
            if CAP != 0.0:
                dS = dS * (1.0 - u * u)
            total += tl.where(u == float("-inf"), 0.0, dS)

    plane_at = d_bias + pair_offset(
        own_batch, own_head, q_length, k_length, HEADS, BIAS_BATCH, BIAS_HEAD, BIAS_ROW
    )
    element = d_bias.dtype.element_ty
    if BIAS_ROW:
        row = own_rows * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
        address = plane_at + row.to(tl.int64) * k_length + keys
        tl.store(address, total.to(element), mask=(row < q_length) & (keys < k_length))
    else:
        key_index = key_start + k_order
        tl.store(plane_at + key_index, tl.sum(total, 0).to(element), mask=key_index < k_length)
