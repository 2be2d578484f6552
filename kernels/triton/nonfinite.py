"""Propagation of visible values that are not finite to the outputs that they make NaN.

The forward kernel leaves such values out, since a row that does not see them must not read them even as
0 * NaN (clause S4). The rows that do give them weight become NaN here, in the channels of those values. In a
call without such values nothing of this runs.
"""

import triton
import triton.language as tl

from attest.kernels.triton.tile import (
    LAST_BITS,
    LOG2E,
    kept_pairs,
    key_order,
    load_rows,
    load_tile,
    offset,
    tile_logits,
)

# Rows and keys at a time: few, so that what is seldom run takes no registers from what is always run.
_FEW = tl.constexpr(16)


@triton.jit
def propagate_nonfinite(
    query, key, value, mask, bias, first, last, q_ids, kv_ids, seed, out, lse,
    batch, head, block_start, q_length, k_length, start, stop,
    HUGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K_HEADS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, CAP: tl.constexpr, ROUND: tl.constexpr, MASK: tl.constexpr,
    BIAS: tl.constexpr, BIAS_ROW: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    ROW_BATCH: tl.constexpr, SEGMENTS: tl.constexpr, ALIGNED: tl.constexpr, DROPOUT: tl.constexpr,
    THRESHOLD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store NaN into the block of `out` that begins at row `block_start`, wherever it is due.

    `key`, `value`, `mask`, `bias` and `kv_ids` point at the batch entry and head; the key blocks are
    [start, stop).
    """
    # What is read and written from here on, other threads have stored.
    tl.debug_barrier()
    q_order = tl.arange(0, _FEW)
    k_order, group, word = key_order(_FEW, False, False)
    for some in tl.range(0, BLOCK_Q // _FEW):
        row_start = block_start + some * _FEW
        row = row_start + q_order
        inside = row < q_length
        q_at = query + offset(batch, q_length, row_start, HEADS * D) + head * D
        Q = load_tile(q_at, q_order, q_length - row_start, HEADS * D, D, BLOCK_D, True)
        first_key, last_key, row_ids = load_rows(
            first, last, q_ids, batch, row, q_length, FIRST, LAST, ROW_BATCH, SEGMENTS
        )
        row_at = (batch * HEADS + head).to(tl.int64) * q_length + row
        L = tl.load(lse + row_at, mask=inside, other=0.0) * LOG2E
        L = tl.where(L == float("-inf"), 0.0, L)
        # A weight of a huge logit must not vanish by what the two are rounded by.
        L = tl.where(tl.abs(L) > HUGE, L - tl.abs(L) * LAST_BITS, L)
        out_at = out + offset(batch, q_length, row_start, HEADS * DV) + head * DV
        hits = tl.zeros([_FEW, BLOCK_DV], tl.float32)
        for step in tl.range(start * BLOCK_K // _FEW, stop * BLOCK_K // _FEW, num_stages=1):
            key_start = step * _FEW
            keys = (key_start + k_order)[None, :]
            K = load_tile(
                key + key_start.to(tl.int64) * (K_HEADS * D), k_order, k_length - key_start,
                K_HEADS * D, D, BLOCK_D, True,
            )  # fmt: skip
            u = tile_logits(
                Q, K, row_start, row[:, None], keys, q_length, k_length, first_key[:, None],
                last_key[:, None], row_ids[:, None], kv_ids, mask, bias, SCALE, CAP, ROUND, MASK, BIAS,
                BIAS_ROW, FIRST, LAST, SEGMENTS, ALIGNED, False, True, PRECISION,
            )  # fmt: skip
            weighs = tl.math.exp2(u * UNIT - L[:, None]) != 0.0
            if DROPOUT:
                weighs = weighs & kept_pairs(
                    seed, batch, head, row[:, None], key_start, group[None, :], word[None, :], THRESHOLD
                )
            V = load_tile(
                value + key_start.to(tl.int64) * (K_HEADS * DV), k_order, k_length - key_start,
                K_HEADS * DV, DV, BLOCK_DV, True,
            )  # fmt: skip
            nonfinite = tl.where(V - V == 0.0, 0.0, 1.0).to(V.dtype)
            hits = tl.dot(weighs.to(V.dtype), nonfinite, hits, input_precision=PRECISION)
        columns = tl.arange(0, BLOCK_DV)[None, :]
        due = (hits > 0.0) & inside[:, None] & (columns < DV)
        address = out_at + tl.arange(0, _FEW)[:, None] * (HEADS * DV) + columns
        nan = tl.full([_FEW, BLOCK_DV], float("nan"), tl.float32)
        tl.store(address, nan.to(out.dtype.element_ty), mask=due)
