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
    row_pointer,
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
    sinks, -inf where a row sees none. All three are of a part of the keys after the other, where
    SPEC.shape.key_parts is not 1.
    """
    arrays = Arrays(
        query, key, value, mask, bias, first, last, q_ids, kv_ids, stands, slopes, ranges, seed, q_length,
        k_length,
    )  # fmt: skip
    batch, head, block = own_query_block(q_length, SPEC)
    key_head = head // SPEC.shape.group
    q_order = tl.arange(0, SPEC.shape.block_q)
    k_order, group, word = key_order(SPEC.shape.block_k, SPEC.dropout is not None, False)
    rows = load_rows(arrays, batch, head, block * SPEC.shape.block_q, q_order, SPEC, True)
    inside = rows.index < q_length
    Q = load_query_tile(query, rows, q_order, q_length, SPEC, not SPEC.shape.even_q)
    k_at, v_at = key_pointers(arrays, batch, key_head, 0, SPEC)
    visited = in_own_part(load_key_ranges(arrays, batch, block, SPEC), k_length, SPEC)
    if SPEC.shape.key_parts > 1:
        # Rows of all heads and batch entries in the parts before.
        rows_of_part = (tl.num_programs(0) // tl.cdiv(q_length, SPEC.shape.block_q)) * q_length
        before = tl.program_id(1).to(tl.int64) * rows_of_part
        out += before * SPEC.shape.value_dim
        lse += before
        row_max += before

    # The running maximum, in units of u, begins at the lowest number that is finite in bits: -inf - -inf
    # would be NaN where nothing is seen.
    m = tl.full([SPEC.shape.block_q], SPEC.softmax.lowest, tl.float32)
    norm = tl.full([SPEC.shape.block_q], 0.0, tl.float32)
    acc = tl.full([SPEC.shape.block_q, SPEC.shape.value.block], 0.0, tl.float32)
    leaked = 0
    for CAREFUL in tl.static_range(0, 2 if SPEC.loops.hides else 1):
        if CAREFUL:
            # A hidden value that is not finite may have leaked as 0 * NaN. Then everything is done once more
            # without such values, and what they make NaN is marked below.
            leaked = tl.max(tl.max((acc - acc != 0.0).to(tl.int32), 1), 0)
            m = tl.where(leaked > 0, SPEC.softmax.lowest, m)
            norm = tl.where(leaked > 0, 0.0, norm)
            acc = tl.where(leaked > 0, 0.0, acc)
        # First the full blocks, compared with nothing, then the partial ones.
        for EDGE in tl.static_range(0 if SPEC.loops.full else 1, 2 if SPEC.loops.partial else 1):
            count = visits(visited, EDGE)
            if CAREFUL:
                count = count * leaked
            for step in tl.range(0, count, num_stages=1 if CAREFUL else None):
                keys = Keys(visited_block(visited, step, EDGE) * SPEC.shape.block_k, k_order, group, word)
                K = load_key_tile(k_at, keys, k_length, SPEC, EDGE and not SPEC.shape.even_k)
                V = load_value_tile(v_at, keys, k_length, SPEC, EDGE and not SPEC.shape.even_k)
                if EDGE and CAREFUL:
                    V = finite_or_zero(V)
                u = tile_logits(Q, K, arrays, rows, keys, SPEC, SPEC.shape.even, EDGE, False)
                m_new = tl.maximum(m, tl.max(u, 1))
                unit = row_unit(m_new, SPEC)
                P = tl.math.exp2(u * unit[:, None] - (m_new * unit)[:, None])
                alpha = tl.math.exp2((m - m_new) * SPEC.logits.unit)
                norm = norm * alpha + tl.sum(P, 1)
                m = m_new
                if SPEC.dropout is not None:
                    P = tl.where(kept_pairs(seed, rows, keys, SPEC, False), P, 0.0)
                acc = tl.dot(P.to(V.dtype), V, acc * alpha[:, None], input_precision=SPEC.logits.precision)

    # In nats, since the lowest logits are not finite in bits.
    m = m * SPEC.logits.nats
    row_at = (batch * SPEC.shape.heads + head).to(tl.int64) * q_length + rows.index
    tl.store(row_max + row_at, tl.where(norm == 0.0, float("-inf"), m), mask=inside)
    if SPEC.softmax.sinks > 0:
        slot = tl.arange(0, SPEC.softmax.block_sinks)
        sink_at = sinks + (head * SPEC.softmax.sinks if SPEC.softmax.sinks_by_head else 0) + slot
        sink = tl.load(sink_at, mask=slot < SPEC.softmax.sinks, other=float("-inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(sink, 0))
        alpha = tl.math.exp2((m - m_new) * LOG2E)
        norm = norm * alpha + tl.sum(tl.math.exp2((sink[None, :] - m_new[:, None]) * LOG2E), 1)
        acc = acc * alpha[:, None]
        m = m_new
    tl.store(lse + row_at, tl.where(norm == 0.0, float("-inf"), m + tl.math.log2(norm) * LN2), mask=inside)
    factor = tl.full([SPEC.shape.block_q], SPEC.kept_scale, tl.float32)
    if SPEC.softmax.normalize:
        factor = factor / tl.where(norm == 0.0, 1.0, norm)
    OUT: tl.constexpr = SPEC.shape.out
    out_at = row_pointer(out, batch, head, q_length, rows.start, OUT)
    acc = acc * factor[:, None]
    store_tile(out_at, acc, q_order, q_length - rows.start, OUT, not SPEC.shape.even_q)

    if SPEC.loops.hides:
        if leaked > 0:
            propagate_nonfinite(arrays, out, lse, k_at, v_at, batch, head, rows.start, visited, SPEC)
