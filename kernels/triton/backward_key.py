"""The Triton backward kernel of key and value: a program owns a block of keys of a key head.

It sums dkey and dvalue over all the query heads that share the key head; the operands are explained in
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
    store_tile,
    tile_logits,
    weights_of_lse,
)


@triton.jit
def backward_key(
    query, key, value, mask, bias, first, last, q_ids, kv_ids, ranges, seed, d_out, lse2, delta, weight,
    q_length, k_length,
    d_key, d_value,
    D: tl.constexpr, DV: tl.constexpr, K_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, CAP: tl.constexpr, ROUND: tl.constexpr,
    MASK: tl.constexpr, MASK_BATCH: tl.constexpr, MASK_HEAD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_BATCH: tl.constexpr, BIAS_HEAD: tl.constexpr, BIAS_ROW: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, ROW_BATCH: tl.constexpr, SEGMENTS: tl.constexpr,
    RANGES: tl.constexpr, ALIGNED: tl.constexpr, EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr, FIRST_PHASE: tl.constexpr, LAST_PHASE: tl.constexpr,
    DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    WEIGHTED: tl.constexpr, SUM_KEY: tl.constexpr, SUM_VALUE: tl.constexpr,
):  # fmt: skip
    """d_key [B, Sk, Hkv, D], d_value [B, Sk, Hkv, DV]. Grid: (batch * key heads * key blocks).

    `ranges` as `attest.kernels.ranges.query_blocks` makes it. Tiles are held as [keys, queries], so that P
    and dS are already the left operands of the products that sum over queries. Keys past the end need no
    mask: what they would sum is not stored. Only what SUM_KEY and SUM_VALUE name is summed and stored.
    """
    HEADS: tl.constexpr = K_HEADS * GROUP
    blocks = tl.cdiv(k_length, BLOCK_K)
    program = tl.program_id(0)
    if BIAS and not BIAS_BATCH:
        batches = tl.num_programs(0) // (blocks * K_HEADS)
        batch = program % batches
        program = program // batches
    else:
        batch = program // (blocks * K_HEADS)
    block = program % blocks
    key_head = (program // blocks) % K_HEADS
    key_start = block * BLOCK_K
    q_order = tl.arange(0, BLOCK_Q)
    k_order, group, word = key_order(BLOCK_K, DROPOUT, True)
    keys = (key_start + k_order)[:, None]

    k_at = key + offset(batch, k_length, key_start, K_HEADS * D) + key_head * D
    v_at = value + offset(batch, k_length, key_start, K_HEADS * DV) + key_head * DV
    K = load_tile(k_at, k_order, k_length - key_start, K_HEADS * D, D, BLOCK_D, not EVEN_K)
    V = load_tile(v_at, k_order, k_length - key_start, K_HEADS * DV, DV, BLOCK_DV, not EVEN_K)

    q_blocks = tl.cdiv(q_length, BLOCK_Q)
    start = 0
    stop = q_blocks
    full_start = 0
    full_stop = q_blocks
    if RANGES:
        range_at = ranges + ((batch if ROW_BATCH else 0) * blocks + block) * 4
        start = tl.load(range_at)
        full_start = tl.load(range_at + 1)
        full_stop = tl.load(range_at + 2)
        stop = tl.load(range_at + 3)
    if MASK or BIAS:
        full_start = start
        full_stop = start
    ids_at = kv_ids
    if SEGMENTS:
        ids_at = kv_ids + batch.to(tl.int64) * k_length

    dK = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dV = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
    for EDGE in tl.static_range(FIRST_PHASE, LAST_PHASE):
        if EDGE:
            count = (full_start - start) + (stop - full_stop)
        else:
            count = full_stop - full_start
        for step in tl.range(0, count * GROUP):
            within = step
            head = key_head
            if GROUP > 1:
                within = step % count
                head = key_head * GROUP + step // count
            if EDGE:
                block_q = start + within
                block_q = tl.where(block_q < full_start, block_q, block_q - full_start + full_stop)
            else:
                block_q = full_start + within
            row_start = block_q * BLOCK_Q
            row = row_start + q_order
            inside = (row < q_length) | EVEN_Q
            Q = load_tile(
                query + offset(batch, q_length, row_start, HEADS * D) + head * D,
                q_order, q_length - row_start, HEADS * D, D, BLOCK_D, not EVEN_Q,
            )  # fmt: skip
            dO = load_tile(
                d_out + offset(batch, q_length, row_start, HEADS * DV) + head * DV,
                q_order, q_length - row_start, HEADS * DV, DV, BLOCK_DV, not EVEN_Q,
            )  # fmt: skip
            row_at = (batch * HEADS + head).to(tl.int64) * q_length + row
            L = tl.load(lse2 + row_at, mask=inside, other=float("inf"))
            Delta = tl.load(delta + row_at, mask=inside, other=0.0)
            if WEIGHTED:
                W = tl.load(weight + row_at, mask=inside, other=0.0)[None, :]
            first_key, last_key, row_ids = row, row, row
            mask_at = mask
            bias_at = bias
            if EDGE:
                first_key, last_key, row_ids = load_rows(
                    first, last, q_ids, batch, row, q_length, FIRST, LAST, ROW_BATCH, SEGMENTS
                )
                if MASK:
                    mask_at = mask + pair_offset(
                        batch, head, q_length, k_length, HEADS, MASK_BATCH, MASK_HEAD, True
                    )
                if BIAS:
                    bias_at = bias + pair_offset(
                        batch, head, q_length, k_length, HEADS, BIAS_BATCH, BIAS_HEAD, BIAS_ROW
                    )
            u = tile_logits(
                K, Q, row_start, row[None, :], keys, q_length, k_length, first_key[None, :],
                last_key[None, :], row_ids[None, :], ids_at, mask_at, bias_at,
                SCALE, CAP, ROUND, MASK, BIAS, BIAS_ROW, FIRST, LAST, SEGMENTS, ALIGNED,
                EVEN_Q and EVEN_K, EDGE, PRECISION,
            )  # fmt: skip
            P = weights_of_lse(u, L[None, :], UNIT)
            if EDGE:
                # A row whose lse is NaN must not reach keys that it does not see.
                P = tl.where(u == float("-inf"), 0.0, P)
            P_out = P
            if DROPOUT:
                kept = kept_pairs(
                    seed, batch, head, row[None, :], key_start, group[:, None], word[:, None], THRESHOLD
                )
                P_out = tl.where(kept, P * KEEP, 0.0)
            if WEIGHTED:
                P_out = P_out * W
            if SUM_VALUE:
                dV = tl.dot(P_out.to(dO.dtype), dO, dV, input_precision=PRECISION)
            if SUM_KEY:
                dP = tl.dot(V, tl.trans(dO), input_precision=PRECISION)
                if DROPOUT or WEIGHTED:
                    dS = P_out * dP - P * Delta[None, :]
                else:
                    dS = P * (dP - Delta[None, :])
                if CAP != 0.0:
                    dS = dS * (1.0 - u * u)
                if EDGE:
                    dS = tl.where(u == float("-inf"), 0.0, dS)
                dK = tl.dot(dS.to(Q.dtype), Q, dK, input_precision=PRECISION)

    if SUM_KEY:
        d_key_at = d_key + offset(batch, k_length, key_start, K_HEADS * D) + key_head * D
        store_tile(
            d_key_at, dK * SOFTMAX_SCALE, k_order, k_length - key_start, K_HEADS * D, D, BLOCK_D, not EVEN_K
        )
    if SUM_VALUE:
        d_value_at = d_value + offset(batch, k_length, key_start, K_HEADS * DV) + key_head * DV
        store_tile(d_value_at, dV, k_order, k_length - key_start, K_HEADS * DV, DV, BLOCK_DV, not EVEN_K)
