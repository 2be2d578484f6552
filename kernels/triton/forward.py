"""The Triton forward kernel: out, lse and the row maximum, one block of queries a program.

Online softmax over the key blocks that some row of the block may see; the others are not loaded.

Papers: Milakov and Gimelshein, arXiv 1805.02867 (online softmax); Dao, arXiv 2307.08691.
"""

import triton
import triton.language as tl

from attest.kernels.triton.nonfinite import propagate_nonfinite
from attest.kernels.triton.program import (
    Arrays,
    Keys,
    in_own_part,
    key_pointers,
    load_key_ranges,
    load_key_tile,
    load_query_tile,
    load_rows,
    load_value_tile,
    own_query_block,
    visited_block,
    visits,
)
from attest.kernels.triton.tile import (
    LN2,
    LOG2E,
    finite_or_zero,
    kept_pairs,
    key_order,
    offset,
    row_unit,
    store_tile,
    tile_logits,
)


@triton.jit
def forward(
    query, key, value, mask, bias, first, last, q_ids, kv_ids, stands, slopes, ranges, seed, q_length,
    k_length, sinks,
    out, lse, row_max,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Compute out, by a grid of (batch * heads * query blocks, parts); `program.Arrays` names the arrays.

    out [B, Sq, Hq, DV], lse and row_max [B, Hq, Sq] float32: the maximum over visible keys alone, without the
    sinks, -inf where a row sees none. All three are of a part of the keys after the other, where SPEC.parts
    is not 1.
    """
    arrays = Arrays(
        query, key, value, mask, bias, first, last, q_ids, kv_ids, stands, slopes, ranges, seed, q_length,
        k_length,
    )  # fmt: skip
    batch, head, block = own_query_block(q_length, SPEC)
    key_head = head // SPEC.group
    q_order = tl.arange(0, SPEC.block_q)
    k_order, group, word = key_order(SPEC.block_k, SPEC.dropout, False)
    rows = load_rows(arrays, batch, head, block * SPEC.block_q, q_order, SPEC, True)
    inside = rows.index < q_length
    Q = load_query_tile(query, rows, q_order, q_length, SPEC, not SPEC.even_q)
    k_at, v_at = key_pointers(arrays, batch, key_head, 0, SPEC)
    visited = in_own_part(load_key_ranges(arrays, batch, block, SPEC), k_length, SPEC)
    if SPEC.parts > 1:
        # Rows of all heads and batch entries in the parts before.
        rows_of_part = (tl.num_programs(0) // tl.cdiv(q_length, SPEC.block_q)) * q_length
        before = tl.program_id(1).to(tl.int64) * rows_of_part
        out += before * SPEC.value_dim
        lse += before
        row_max += before

    # The running maximum, in units of u, begins at the lowest number that is finite in bits: -inf - -inf
    # would be NaN where nothing is seen.
    m = tl.full([SPEC.block_q], SPEC.lowest, tl.float32)
    norm = tl.full([SPEC.block_q], 0.0, tl.float32)
    acc = tl.full([SPEC.block_q, SPEC.block_dv], 0.0, tl.float32)
    leaked = 0
    for CAREFUL in tl.static_range(0, 2 if SPEC.hides else 1):
        if CAREFUL:
            # A hidden value that is not finite may have leaked as 0 * NaN. Then everything is done once more
            # without such values, and what they make NaN is marked below.
            leaked = tl.max(tl.max((acc - acc != 0.0).to(tl.int32), 1), 0)
            m = tl.where(leaked > 0, SPEC.lowest, m)
            norm = tl.where(leaked > 0, 0.0, norm)
            acc = tl.where(leaked > 0, 0.0, acc)
        # First the full blocks, compared with nothing, then the partial ones.
        for EDGE in tl.static_range(0 if SPEC.full_loop else 1, 2 if SPEC.partial_loop else 1):
            count = visits(visited, EDGE)
            if CAREFUL:
                count = count * leaked
            for step in tl.range(0, count, num_stages=1 if CAREFUL else None):
                keys = Keys(visited_block(visited, step, EDGE) * SPEC.block_k, k_order, group, word)
                K = load_key_tile(k_at, keys, k_length, SPEC, EDGE and not SPEC.even_k)
                V = load_value_tile(v_at, keys, k_length, SPEC, EDGE and not SPEC.even_k)
                if EDGE and CAREFUL:
                    V = finite_or_zero(V)
                u = tile_logits(Q, K, arrays, rows, keys, SPEC, SPEC.even_q and SPEC.even_k, EDGE, False)
                m_new = tl.maximum(m, tl.max(u, 1))
                unit = row_unit(m_new, SPEC)
                P = tl.math.exp2(u * unit[:, None] - (m_new * unit)[:, None])
                alpha = tl.math.exp2((m - m_new) * SPEC.unit)
                norm = norm * alpha + tl.sum(P, 1)
                m = m_new
                if SPEC.dropout:
                    P = tl.where(kept_pairs(seed, rows, keys, SPEC, False), P, 0.0)
                acc = tl.dot(P.to(V.dtype), V, acc * alpha[:, None], input_precision=SPEC.precision)

    # In nats, since the lowest logits are not finite in bits.
    m = m * SPEC.nats
    row_at = (batch * SPEC.heads + head).to(tl.int64) * q_length + rows.index
    tl.store(row_max + row_at, tl.where(norm == 0.0, float("-inf"), m), mask=inside)
    if SPEC.sinks > 0:
        slot = tl.arange(0, SPEC.block_sinks)
        sink_at = sinks + (head * SPEC.sinks if SPEC.sink_head else 0) + slot
        sink = tl.load(sink_at, mask=slot < SPEC.sinks, other=float("-inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(sink, 0))
        alpha = tl.math.exp2((m - m_new) * LOG2E)
        norm = norm * alpha + tl.sum(tl.math.exp2((sink[None, :] - m_new[:, None]) * LOG2E), 1)
        acc = acc * alpha[:, None]
        m = m_new
    tl.store(lse + row_at, tl.where(norm == 0.0, float("-inf"), m + tl.math.log2(norm) * LN2), mask=inside)
    factor = tl.full([SPEC.block_q], SPEC.keep, tl.float32)
    if SPEC.normalize:
        factor = factor / tl.where(norm == 0.0, 1.0, norm)
    out_at = out + offset(batch, q_length, rows.start, SPEC.out_stride) + head * SPEC.value_dim
    store_tile(
        out_at, acc * factor[:, None], q_order, q_length - rows.start, SPEC.out_stride, SPEC.value_dim,
        SPEC.block_dv, not SPEC.even_q,
    )  # fmt: skip

    if SPEC.hides:
        if leaked > 0:
            propagate_nonfinite(arrays, out, lse, k_at, v_at, batch, head, rows.start, visited, SPEC)
