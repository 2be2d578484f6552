"""The Triton backward kernel of the query: a program owns a block of queries and sums dquery.

P is recomputed from the lse. Three kernels, this one, `backward_key` and `backward_bias`, so that every sum
has one owner and nothing is added atomically (clause S17).

`lse2` is the lse in bits, +inf for rows that see no key, whose P is then 0; `delta` is rowsum(dO * O) less
the cotangent of lse; `weight`, if WEIGHTED, is what out was not divided by. dS = P * (dP - delta), through
the cap 1 - tanh^2 (clauses S3, S14, S15).

Paper: Dao, arXiv 2307.08691.
"""

import triton
import triton.language as tl

from attest.kernels.triton.tile import (
    finite_or_zero,
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
def backward_query(
    query, key, value, mask, bias, first, last, q_ids, kv_ids, ranges, seed, d_out, lse2, delta, weight,
    q_length, k_length,
    d_query,
    D: tl.constexpr, DV: tl.constexpr, K_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, CAP: tl.constexpr, ROUND: tl.constexpr,
    MASK: tl.constexpr, MASK_BATCH: tl.constexpr, MASK_HEAD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_BATCH: tl.constexpr, BIAS_HEAD: tl.constexpr, BIAS_ROW: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, ROW_BATCH: tl.constexpr, SEGMENTS: tl.constexpr,
    RANGES: tl.constexpr, ALIGNED: tl.constexpr, EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr, HIDES: tl.constexpr, FIRST_PHASE: tl.constexpr, LAST_PHASE: tl.constexpr,
    DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """d_query [B, Sq, Hq, D]. Grid: (batch * heads * query blocks); blocks as in the forward kernel."""
    HEADS: tl.constexpr = K_HEADS * GROUP
    blocks = tl.cdiv(q_length, BLOCK_Q)
    program = tl.program_id(0)
    if BIAS and not BIAS_BATCH:
        # Batch entries that share a tile of the bias run together and read it once from memory.
        batches = tl.num_programs(0) // (blocks * HEADS)
        batch = program % batches
        program = program // batches
    else:
        batch = program // (blocks * HEADS)
    # Under causal order the last blocks of rows have the most keys: they start first.
    block = blocks - 1 - program % blocks
    head = (program // blocks) % HEADS
    row_start = block * BLOCK_Q
    q_order = tl.arange(0, BLOCK_Q)
    k_order, group, word = key_order(BLOCK_K, DROPOUT, False)
    row = row_start + q_order
    inside = row < q_length
    key_head = head // GROUP

    k_at = key + offset(batch, k_length, 0, K_HEADS * D) + key_head * D
    v_at = value + offset(batch, k_length, 0, K_HEADS * DV) + key_head * DV
    q_at = query + offset(batch, q_length, row_start, HEADS * D) + head * D
    o_at = d_out + offset(batch, q_length, row_start, HEADS * DV) + head * DV
    Q = load_tile(q_at, q_order, q_length - row_start, HEADS * D, D, BLOCK_D, not EVEN_Q)
    dO = load_tile(o_at, q_order, q_length - row_start, HEADS * DV, DV, BLOCK_DV, not EVEN_Q)
    row_at = (batch * HEADS + head).to(tl.int64) * q_length + row
    L = tl.load(lse2 + row_at, mask=inside, other=float("inf"))[:, None]
    Delta = tl.load(delta + row_at, mask=inside, other=0.0)[:, None]
    if WEIGHTED:
        W = tl.load(weight + row_at, mask=inside, other=0.0)[:, None]

    first_key, last_key, row_ids = load_rows(
        first, last, q_ids, batch, row, q_length, FIRST, LAST, ROW_BATCH, SEGMENTS
    )
    ids_at = kv_ids
    mask_at = mask
    bias_at = bias
    if SEGMENTS:
        ids_at = kv_ids + batch.to(tl.int64) * k_length
    if MASK:
        mask_at = mask + pair_offset(batch, head, q_length, k_length, HEADS, MASK_BATCH, MASK_HEAD, True)
    if BIAS:
        bias_at = bias + pair_offset(batch, head, q_length, k_length, HEADS, BIAS_BATCH, BIAS_HEAD, BIAS_ROW)

    start = 0
    stop = tl.cdiv(k_length, BLOCK_K)
    full_start = 0
    full_stop = k_length // BLOCK_K
    if RANGES:
        range_at = ranges + ((batch if ROW_BATCH else 0) * blocks + block) * 4
        start = tl.load(range_at)
        full_start = tl.load(range_at + 1)
        full_stop = tl.load(range_at + 2)
        stop = tl.load(range_at + 3)
    if MASK or BIAS:
        full_start = start
        full_stop = start

    dQ = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    leaked = 0
    for CAREFUL in tl.static_range(0, 2 if HIDES else 1):
        if CAREFUL:
            # A hidden key that is not finite may have leaked as 0 * NaN: then once more, without such keys.
            leaked = tl.max(tl.max((dQ - dQ != 0.0).to(tl.int32), 1), 0)
            dQ = tl.where(leaked > 0, 0.0, dQ)
        for EDGE in tl.static_range(FIRST_PHASE, LAST_PHASE):
            if EDGE:
                count = (full_start - start) + (stop - full_stop)
            else:
                count = full_stop - full_start
            if CAREFUL:
                count = count * leaked
            for step in tl.range(0, count, num_stages=1 if CAREFUL else None):
                if EDGE:
                    block_k = start + step
                    block_k = tl.where(block_k < full_start, block_k, block_k - full_start + full_stop)
                else:
                    block_k = full_start + step
                key_start = block_k * BLOCK_K
                keys = (key_start + k_order)[None, :]
                K = load_tile(
                    k_at + key_start.to(tl.int64) * (K_HEADS * D), k_order, k_length - key_start,
                    K_HEADS * D, D, BLOCK_D, EDGE and not EVEN_K,
                )  # fmt: skip
                V = load_tile(
                    v_at + key_start.to(tl.int64) * (K_HEADS * DV), k_order, k_length - key_start,
                    K_HEADS * DV, DV, BLOCK_DV, EDGE and not EVEN_K,
                )  # fmt: skip
                if EDGE and CAREFUL:
                    K = finite_or_zero(K)
                u = tile_logits(
                    Q, K, row_start, row[:, None], keys, q_length, k_length, first_key[:, None],
                    last_key[:, None], row_ids[:, None], ids_at, mask_at, bias_at,
                    SCALE, CAP, ROUND, MASK, BIAS, BIAS_ROW, FIRST, LAST, SEGMENTS, ALIGNED,
                    EVEN_Q and EVEN_K, EDGE, PRECISION,
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
                if EDGE:
                    dS = tl.where(u == float("-inf"), 0.0, dS)
                dQ = tl.dot(dS.to(K.dtype), K, dQ, input_precision=PRECISION)

    d_query_at = d_query + offset(batch, q_length, row_start, HEADS * D) + head * D
    store_tile(
        d_query_at, dQ * SOFTMAX_SCALE, q_order, q_length - row_start, HEADS * D, D, BLOCK_D, not EVEN_Q
    )
