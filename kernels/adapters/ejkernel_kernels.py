"""ejKernel's `flash_attention_call`, the kernel-level function of its Triton interface, and its `LN2`.

The page docs/reference/operations.md lists what differs.
"""

import math
from typing import Any

import jax

from attest.kernels.attention import flash_attention

# What a base-2 logsumexp is multiplied by; our lse is a natural logarithm already (S13).
LN2 = math.log(2.0)


def flash_attention_call(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    dropout_seed: Any = None,
    fwd_params: Any = None,
    bwd_params: Any = None,
    cum_seqlens_q: jax.Array | None = None,
    cum_seqlens_k: jax.Array | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Compute attention: out [B, Sq, Hq, Dv], in the dtype of query, on the fastest kernel that can.

    Arguments mean what they mean in `attest.flash_attention`; the order is ejKernel's. fwd_params and
    bwd_params are None, or `FwdParams` and `BwdParams` of `attest.kernels.operations`: sizes that the kernel
    which runs does not have are left out.

    Raises: what `attest.flash_attention` raises.
    """
    return flash_attention(
        query,
        key,
        value,
        attention_mask=attention_mask,
        bias=bias,
        softmax_scale=softmax_scale,
        dropout_prob=dropout_prob,
        causal=causal,
        dropout_seed=dropout_seed,
        fwd_params=fwd_params,
        bwd_params=bwd_params,
        cum_seqlens_q=cum_seqlens_q,
        cum_seqlens_k=cum_seqlens_k,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        softmax_aux=softmax_aux,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
    )
