"""Propagation of visible values that are not finite to the outputs that they make NaN.

The forward kernel leaves such values out, since a row that does not see them must not read them even as
0 * NaN (clause S4). The rows that do give them weight become NaN here, in the channels of those values. In a
call without such values nothing of this runs.
"""

import triton
import triton.language as tl

from attest.kernels.triton.program import (
    Keys,
    load_key_tile,
    load_query_tile,
    load_rows,
    load_value_tile,
)
from attest.kernels.triton.tile import LAST_BITS, LOG2E, kept_pairs, key_order, row_pointer, tile_logits

# Rows and keys at a time: few, so that what is seldom run takes no registers from what is always run.
_FEW = tl.constexpr(16)


@triton.jit
def propagate_nonfinite(
    arrays, out, lse, k_at, v_at, batch, head, block_start, visited, SPEC: tl.constexpr,
):  # fmt: skip
    """Store NaN into the block of `out` that begins at row `block_start`, wherever it is due.

    `k_at` and `v_at` point at the key head; `visited` are the `Ranges` of key blocks.
    """
    # What is read and written from here on, other threads have stored.
    tl.debug_barrier()
    q_length, k_length = arrays.q_length, arrays.k_length
    q_order = tl.arange(0, _FEW)
    k_order, group, word = key_order(_FEW, False, False)
    for some in tl.range(0, SPEC.shape.block_q // _FEW):
        rows = load_rows(arrays, batch, head, block_start + some * _FEW, q_order, SPEC, True)
        inside = rows.index < q_length
        Q = load_query_tile(arrays.query, rows, q_order, q_length, SPEC, True)
        row_at = (batch * SPEC.shape.heads + head).to(tl.int64) * q_length + rows.index
        L = tl.load(lse + row_at, mask=inside, other=0.0) * LOG2E
        L = tl.where(L == float("-inf"), 0.0, L)
        # A weight of a huge logit must not vanish by what the two are rounded by.
        L = tl.where(tl.abs(L) > SPEC.softmax.huge, L - tl.abs(L) * LAST_BITS, L)
        OUT: tl.constexpr = SPEC.shape.out
        out_at = row_pointer(out, batch, head, q_length, rows.start, OUT)
        hits = tl.full([_FEW, SPEC.shape.value.block], 0.0, tl.float32)
        start, stop = visited.start * SPEC.shape.block_k // _FEW, visited.stop * SPEC.shape.block_k // _FEW
        for step in tl.range(start, stop, num_stages=1):
            key_start = step * _FEW
            keys = Keys(key_start, k_order, group, word)
            K = load_key_tile(k_at, keys, k_length, SPEC, True)
            u = tile_logits(Q, K, arrays, rows, keys, SPEC, False, True, False)
            weighs = tl.math.exp2(u * SPEC.logits.unit - L[:, None]) != 0.0
            if SPEC.dropout is not None:
                weighs = weighs & kept_pairs(arrays.seed, rows, keys, SPEC, False)
            V = load_value_tile(v_at, keys, k_length, SPEC, True)
            nonfinite = tl.where(V - V == 0.0, 0.0, 1.0).to(V.dtype)
            hits = tl.dot(weighs.to(V.dtype), nonfinite, hits, input_precision=SPEC.logits.precision)
        columns = tl.arange(0, SPEC.shape.value.block)[None, :]
        due = (hits > 0.0) & inside[:, None] & (columns < SPEC.shape.value_dim)
        address = out_at + q_order[:, None] * SPEC.shape.out.stride + columns
        nan = tl.full([_FEW, SPEC.shape.value.block], float("nan"), tl.float32)
        tl.store(address, nan.to(out.dtype.element_ty), mask=due)
