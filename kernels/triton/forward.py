"""The Triton forward kernel: out, lse and the row maximum, one block of queries a program.

Online softmax over the key blocks that some row of the block may see; the others are not loaded.

Papers: Milakov and Gimelshein, arXiv 1805.02867 (online softmax); Dao, arXiv 2307.08691.
"""

import triton
import triton.language as tl

from attest.kernels.triton.nonfinite import propagate_nonfinite
from attest.kernels.triton.tile import (
    LN2,
    LOG2E,
    finite_or_zero,
    kept_pairs,
    key_order,
    load_rows,
    load_tile,
    offset,
    pair_offset,
    row_unit,
    store_tile,
    tile_logits,
)


@triton.jit
def forward(
    query, key, value, mask, bias, first, last, q_ids, kv_ids, ranges, sinks, seed, q_length, k_length,
    out, lse, row_max,
    D: tl.constexpr, DV: tl.constexpr, K_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, CAP: tl.constexpr, ROUND: tl.constexpr,
    MASK: tl.constexpr, MASK_BATCH: tl.constexpr, MASK_HEAD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_BATCH: tl.constexpr, BIAS_HEAD: tl.constexpr, BIAS_ROW: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, ROW_BATCH: tl.constexpr, SEGMENTS: tl.constexpr,
    RANGES: tl.constexpr, ALIGNED: tl.constexpr, EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr, HIDES: tl.constexpr,
    POWER: tl.constexpr, HUGE: tl.constexpr, LOWEST: tl.constexpr,
    FIRST_PHASE: tl.constexpr, LAST_PHASE: tl.constexpr,
    DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, KEEP: tl.constexpr,
    SINKS: tl.constexpr, SINK_HEAD: tl.constexpr, BLOCK_SINKS: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (batch * heads * query blocks). Arrays as `attest.kernels.arguments.Call` has them; `ranges` as
    `attest.kernels.ranges.key_blocks` makes it; `first`, `last` as `attest.kernels.visibility.Rows` has them.

    out [B, Sq, Hq, DV], lse and row_max [B, Hq, Sq] float32: the maximum over visible keys alone, without the
    sinks, -inf where a row sees none.
    """
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

    q_at = query + offset(batch, q_length, row_start, HEADS * D) + head * D
    k_at = key + offset(batch, k_length, 0, K_HEADS * D) + key_head * D
    v_at = value + offset(batch, k_length, 0, K_HEADS * DV) + key_head * DV
    Q = load_tile(q_at, q_order, q_length - row_start, HEADS * D, D, BLOCK_D, not EVEN_Q)

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

    # The running maximum, in units of u, begins at the lowest number that is finite in bits: -inf - -inf
    # would be NaN where nothing is seen.
    m = tl.full([BLOCK_Q], LOWEST, tl.float32)
    norm = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    leaked = 0
    for CAREFUL in tl.static_range(0, 2 if HIDES else 1):
        if CAREFUL:
            # A hidden value that is not finite may have leaked as 0 * NaN. Then everything is done once more
            # without such values, and what they make NaN is marked below.
            leaked = tl.max(tl.max((acc - acc != 0.0).to(tl.int32), 1), 0)
            m = tl.where(leaked > 0, LOWEST, m)
            norm = tl.where(leaked > 0, 0.0, norm)
            acc = tl.where(leaked > 0, 0.0, acc)
        # First the full blocks, compared with nothing, then the partial ones.
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
                    V = finite_or_zero(V)
                u = tile_logits(
                    Q, K, row_start, row[:, None], keys, q_length, k_length, first_key[:, None],
                    last_key[:, None], row_ids[:, None], ids_at, mask_at, bias_at,
                    SCALE, CAP, ROUND, MASK, BIAS, BIAS_ROW, FIRST, LAST, SEGMENTS, ALIGNED,
                    EVEN_Q and EVEN_K, EDGE, PRECISION,
                )  # fmt: skip
                m_new = tl.maximum(m, tl.max(u, 1))
                unit = row_unit(m_new, UNIT, POWER, HUGE)
                P = tl.math.exp2(u * unit[:, None] - (m_new * unit)[:, None])
                alpha = tl.math.exp2((m - m_new) * UNIT)
                norm = norm * alpha + tl.sum(P, 1)
                m = m_new
                if DROPOUT:
                    kept = kept_pairs(
                        seed, batch, head, row[:, None], key_start, group[None, :], word[None, :], THRESHOLD
                    )
                    P = tl.where(kept, P, 0.0)
                acc = tl.dot(P.to(V.dtype), V, acc * alpha[:, None], input_precision=PRECISION)

    m = m * UNIT
    row_at = (batch * HEADS + head).to(tl.int64) * q_length + row
    tl.store(row_max + row_at, tl.where(norm == 0.0, float("-inf"), m * LN2), mask=inside)
    if SINKS > 0:
        slot = tl.arange(0, BLOCK_SINKS)
        sink_at = sinks + (head * SINKS if SINK_HEAD else 0) + slot
        sink = tl.load(sink_at, mask=slot < SINKS, other=float("-inf")).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, tl.max(sink, 0))
        alpha = tl.math.exp2(m - m_new)
        norm = norm * alpha + tl.sum(tl.math.exp2(sink[None, :] - m_new[:, None]), 1)
        acc = acc * alpha[:, None]
        m = m_new
    tl.store(lse + row_at, tl.where(norm == 0.0, float("-inf"), (m + tl.math.log2(norm)) * LN2), mask=inside)
    factor = tl.full([BLOCK_Q], KEEP, tl.float32)
    if NORMALIZE:
        factor = factor / tl.where(norm == 0.0, 1.0, norm)
    out_at = out + offset(batch, q_length, row_start, HEADS * DV) + head * DV
    store_tile(
        out_at, acc * factor[:, None], q_order, q_length - row_start, HEADS * DV, DV, BLOCK_DV, not EVEN_Q
    )

    if HIDES:
        if leaked > 0:
            propagate_nonfinite(
                query, k_at, v_at, mask_at, bias_at, first, last, q_ids, ids_at, seed, out, lse,
                batch, head, row_start, q_length, k_length, start, stop,
                HUGE, D, DV, K_HEADS, HEADS, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV, SCALE, UNIT, CAP, ROUND,
                MASK, BIAS, BIAS_ROW, FIRST, LAST, ROW_BATCH, SEGMENTS, ALIGNED, DROPOUT, THRESHOLD,
                PRECISION,
            )  # fmt: skip
