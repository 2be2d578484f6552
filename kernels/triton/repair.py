"""Decides what becomes of rows into which a hidden value that is not finite has leaked, as 0 * NaN (clause S4).

The forward kernel sees the NaN in its sums and does those rows again, here, with care and a few at a time: once
over the finite values alone, and once over where the others are, which makes NaN of the channels of the rows
that give them weight. In a call without such values nothing of this runs.
"""

import triton
import triton.language as tl

from kernels.triton.tile import LOG2E, kept_pairs, load_rows, load_tile, offset, tile_logits

_FEW = tl.constexpr(16)


@triton.jit
def repair_rows(
    query, key, value, mask, bias, first, last, q_ids, kv_ids, seed, out, lse, row_max,
    batch, head, block_start, q_length, k_length, start, stop, sink_max,
    D: tl.constexpr, DV: tl.constexpr, K_HEADS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, CAP: tl.constexpr, ROUND: tl.constexpr, MASK: tl.constexpr,
    BIAS: tl.constexpr, BIAS_ROW: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    ROW_BATCH: tl.constexpr, SEGMENTS: tl.constexpr, ALIGNED: tl.constexpr, DROPOUT: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores the block of `out` that begins at row `block_start` anew, from its lse and row_max.

    `key`, `value`, `mask`, `bias` and `kv_ids` point at the batch entry and head; the key blocks are
    [start, stop).
    """
    for some in tl.range(0, BLOCK_Q // _FEW):
        # What is read and written from here on, other threads may have stored.
        tl.debug_barrier()
        row_start = block_start + some * _FEW
        row = row_start + tl.arange(0, _FEW)
        inside = row < q_length
        q_at = query + offset(batch, q_length, row_start, HEADS * D) + head * D
        Q = load_tile(q_at, q_length - row_start, HEADS * D, _FEW, D, BLOCK_D, True)
        first_key, last_key, row_ids = load_rows(
            first, last, q_ids, batch, row, q_length, FIRST, LAST, ROW_BATCH, SEGMENTS
        )
        row_at = (batch * HEADS + head).to(tl.int64) * q_length + row
        L = tl.load(lse + row_at, mask=inside, other=0.0) * LOG2E
        L = tl.where(L == float("-inf"), 0.0, L)
        factor = tl.full([_FEW], KEEP, tl.float32)
        if not NORMALIZE:
            m = tl.maximum(tl.load(row_max + row_at, mask=inside, other=0.0) * LOG2E, sink_max)
            factor = factor * tl.math.exp2(L - m)
        out_at = out + offset(batch, q_length, row_start, HEADS * DV) + head * DV
        for marking in tl.range(0, 2):
            acc = tl.zeros([_FEW, BLOCK_DV], tl.float32)
            for block_k in tl.range(start, stop):
                key_start = block_k * BLOCK_K
                keys = (key_start + tl.arange(0, BLOCK_K))[None, :]
                K = load_tile(
                    key + key_start.to(tl.int64) * (K_HEADS * D), k_length - key_start,
                    K_HEADS * D, BLOCK_K, D, BLOCK_D, True,
                )  # fmt: skip
                products = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
                u = tile_logits(
                    products, row_start, row[:, None], keys, q_length, k_length, first_key[:, None],
                    last_key[:, None], row_ids[:, None], kv_ids, mask, bias, SCALE, CAP, ROUND, MASK, BIAS,
                    BIAS_ROW, FIRST, LAST, SEGMENTS, ALIGNED, True,
                )  # fmt: skip
                P = tl.math.exp2(u * UNIT - L[:, None])
                if DROPOUT:
                    kept = kept_pairs(
                        seed, batch, head, row_start, key_start, _FEW, BLOCK_K, THRESHOLD, False
                    )
                    P = tl.where(kept, P, 0.0)
                V = load_tile(
                    value + key_start.to(tl.int64) * (K_HEADS * DV), k_length - key_start,
                    K_HEADS * DV, BLOCK_K, DV, BLOCK_DV, True,
                )  # fmt: skip
                finite = V - V == 0.0
                if marking == 1:
                    P = tl.where(P != 0.0, 1.0, 0.0)
                    V = tl.where(finite, 0.0, 1.0).to(V.dtype)
                else:
                    V = tl.where(finite, V, 0.0).to(V.dtype)
                acc = tl.dot(P.to(V.dtype), V, acc, input_precision=PRECISION)
            tile = acc * factor[:, None]
            if marking == 1:
                tile = tl.full([_FEW, BLOCK_DV], float("nan"), tl.float32)
            columns = tl.arange(0, BLOCK_DV)[None, :]
            chosen = ((acc > 0.0) | (marking == 0)) & inside[:, None] & (columns < DV)
            tl.debug_barrier()
            address = out_at + tl.arange(0, _FEW)[:, None] * (HEADS * DV) + columns
            tl.store(address, tile.to(out.dtype.element_ty), mask=chosen)
