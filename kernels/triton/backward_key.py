"""The Triton backward kernel of key and value: a program owns a block of keys of a key head.

It sums dkey and dvalue over all the query heads that share the key head.
"""

import triton
import triton.language as tl

from attest.kernels.triton.gradient import Cotangents, load_row_terms, through_cap, weights_of_lse
from attest.kernels.triton.program import (
    Arrays,
    Keys,
    load_d_out_tile,
    load_own_keys,
    load_query_tile,
    load_ranges,
    load_rows,
    own_block,
    visited_block,
    visits,
)
from attest.kernels.triton.tile import by_row, kept_pairs, key_order, row_pointer, store_tile, tile_logits


@triton.jit
def backward_key(
    query, key, value, mask, bias, first, last, q_ids, kv_ids, stands, slopes, ranges, seed, q_length,
    k_length,
    d_out, lse2, delta, weight,
    d_key, d_value,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Compute d_key [B, Sk, Hkv, D], d_value [B, Sk, Hkv, DV]. Grid: (batch * key heads * key blocks).

    Tiles are held as [keys, queries], so that P and dS are already the left operands of the products that sum
    over queries. Keys past the end need no mask: what they would sum is not stored. Only what
    SPEC.gradients.key and SPEC.gradients.value name is summed and stored.
    """
    arrays = Arrays(
        query, key, value, mask, bias, first, last, q_ids, kv_ids, stands, slopes, ranges, seed, q_length,
        k_length,
    )  # fmt: skip
    cotangents = Cotangents(d_out, lse2, delta, weight)
    batch, key_head, block = own_block(k_length, SPEC.shape.block_k, SPEC.shape.k_heads, SPEC)
    q_order = tl.arange(0, SPEC.shape.block_q)
    k_order, group, word = key_order(SPEC.shape.block_k, SPEC.dropout is not None, True)
    keys = Keys(block * SPEC.shape.block_k, k_order, group, word)
    K, V = load_own_keys(arrays, batch, key_head, keys, SPEC)
    q_blocks = tl.cdiv(q_length, SPEC.shape.block_q)
    visited = load_ranges(
        arrays, batch, block, tl.cdiv(k_length, SPEC.shape.block_k), q_blocks, q_blocks, SPEC
    )

    dK = tl.full([SPEC.shape.block_k, SPEC.shape.key.block], 0.0, tl.float32)
    dV = tl.full([SPEC.shape.block_k, SPEC.shape.value.block], 0.0, tl.float32)
    for EDGE in tl.static_range(0 if SPEC.loops.full else 1, 2 if SPEC.loops.partial else 1):
        count = visits(visited, EDGE)
        for step in tl.range(0, count * SPEC.shape.group):
            within = step
            head = key_head
            if SPEC.shape.group > 1:
                within = step % count
                head = key_head * SPEC.shape.group + step // count
            row_start = visited_block(visited, within, EDGE) * SPEC.shape.block_q
            rows = load_rows(arrays, batch, head, row_start, q_order, SPEC, EDGE)
            Q = load_query_tile(query, rows, q_order, q_length, SPEC, not SPEC.shape.even_q)
            dO = load_d_out_tile(d_out, rows, q_order, q_length, SPEC, not SPEC.shape.even_q)
            inside = (rows.index < q_length) | SPEC.shape.even_q
            terms = load_row_terms(cotangents, rows, inside, q_length, SPEC)
            u = tile_logits(K, Q, arrays, rows, keys, SPEC, SPEC.shape.even, EDGE, True)
            P = weights_of_lse(u, by_row(terms.lse2, True), SPEC)
            if EDGE:
                # A row whose lse is NaN must not reach keys that it does not see.
                P = tl.where(u == float("-inf"), 0.0, P)
            P_out = P
            if SPEC.dropout is not None:
                P_out = tl.where(kept_pairs(seed, rows, keys, SPEC, True), P * SPEC.kept_scale, 0.0)
            if SPEC.gradients.weighted:
                P_out = P_out * by_row(terms.weight, True)
            if SPEC.gradients.value:
                dV = tl.dot(P_out.to(dO.dtype), dO, dV, input_precision=SPEC.logits.precision)
            if SPEC.gradients.key:
                Delta = by_row(terms.delta, True)
                dP = tl.dot(V, tl.trans(dO), input_precision=SPEC.logits.precision)
                if SPEC.dropout is not None or SPEC.gradients.weighted:
                    dS = P_out * dP - P * Delta
                else:
                    dS = P * (dP - Delta)
                dS = through_cap(dS, u, SPEC, EDGE)
                dK = tl.dot(dS.to(Q.dtype), Q, dK, input_precision=SPEC.logits.precision)

    if SPEC.gradients.key:
        KEY: tl.constexpr = SPEC.shape.key
        d_key_at = row_pointer(d_key, batch, key_head, k_length, keys.start, KEY)
        dK = dK * SPEC.gradients.scale
        store_tile(d_key_at, dK, k_order, k_length - keys.start, KEY, not SPEC.shape.even_k)
    if SPEC.gradients.value:
        VALUE: tl.constexpr = SPEC.shape.value
        d_value_at = row_pointer(d_value, batch, key_head, k_length, keys.start, VALUE)
        store_tile(d_value_at, dV, k_order, k_length - keys.start, VALUE, not SPEC.shape.even_k)
