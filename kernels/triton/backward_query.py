"""The Triton backward kernel of the query: a program owns a block of queries and sums dquery.

Three kernels, this one, `backward_key` and `backward_bias`, so that every sum has one owner and nothing is
added atomically (clause S17). Their terms and gradients are in `attest.kernels.triton.gradient`.

Paper: Dao, arXiv 2307.08691.
"""

import triton
import triton.language as tl

from attest.kernels.triton.gradient import Cotangents, load_row_terms, tile_gradient
from attest.kernels.triton.program import (
    Arrays,
    Keys,
    key_pointers,
    load_d_out_tile,
    load_key_ranges,
    load_key_tile,
    load_query_tile,
    load_rows,
    load_value_tile,
    own_query_block,
    visited_block,
    visits,
)
from attest.kernels.triton.tile import finite_or_zero, key_order, row_pointer, store_tile, tile_logits


@triton.jit
def backward_query(
    query, key, value, mask, bias, first, last, q_ids, kv_ids, stands, slopes, ranges, seed, q_length,
    k_length,
    d_out, lse2, delta, weight,
    d_query,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Compute d_query [B, Sq, Hq, D]. Grid: (batch * heads * query blocks); blocks as in the forward pass."""
    arrays = Arrays(
        query, key, value, mask, bias, first, last, q_ids, kv_ids, stands, slopes, ranges, seed, q_length,
        k_length,
    )  # fmt: skip
    batch, head, block = own_query_block(q_length, SPEC)
    key_head = head // SPEC.shape.group
    q_order = tl.arange(0, SPEC.shape.block_q)
    k_order, group, word = key_order(SPEC.shape.block_k, SPEC.dropout is not None, False)
    rows = load_rows(arrays, batch, head, block * SPEC.shape.block_q, q_order, SPEC, True)
    Q = load_query_tile(query, rows, q_order, q_length, SPEC, not SPEC.shape.even_q)
    dO = load_d_out_tile(d_out, rows, q_order, q_length, SPEC, not SPEC.shape.even_q)
    cotangents = Cotangents(d_out, lse2, delta, weight)
    terms = load_row_terms(cotangents, rows, rows.index < q_length, q_length, SPEC)
    k_at, v_at = key_pointers(arrays, batch, key_head, 0, SPEC)
    visited = load_key_ranges(arrays, batch, block, SPEC)

    dQ = tl.full([SPEC.shape.block_q, SPEC.shape.query.block], 0.0, tl.float32)
    leaked = 0
    for CAREFUL in tl.static_range(0, 2 if SPEC.loops.hides else 1):
        if CAREFUL:
            # A hidden key that is not finite may have leaked as 0 * NaN: then once more, without such keys.
            leaked = tl.max(tl.max((dQ - dQ != 0.0).to(tl.int32), 1), 0)
            dQ = tl.where(leaked > 0, 0.0, dQ)
        for EDGE in tl.static_range(0 if SPEC.loops.full else 1, 2 if SPEC.loops.partial else 1):
            count = visits(visited, EDGE)
            if CAREFUL:
                count = count * leaked
            for step in tl.range(0, count, num_stages=1 if CAREFUL else None):
                keys = Keys(visited_block(visited, step, EDGE) * SPEC.shape.block_k, k_order, group, word)
                K = load_key_tile(k_at, keys, k_length, SPEC, EDGE and not SPEC.shape.even_k)
                V = load_value_tile(v_at, keys, k_length, SPEC, EDGE and not SPEC.shape.even_k)
                if EDGE and CAREFUL:
                    K = finite_or_zero(K)
                u = tile_logits(Q, K, arrays, rows, keys, SPEC, SPEC.shape.even, EDGE, False)
                dS = tile_gradient(u, dO, V, terms, seed, rows, keys, SPEC, EDGE)
                dQ = tl.dot(dS.to(K.dtype), K, dQ, input_precision=SPEC.logits.precision)

    QUERY: tl.constexpr = SPEC.shape.query
    d_query_at = row_pointer(d_query, batch, head, q_length, rows.start, QUERY)
    dQ = dQ * SPEC.gradients.scale
    store_tile(d_query_at, dQ, q_order, q_length - rows.start, QUERY, not SPEC.shape.even_q)
