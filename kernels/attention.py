"""The public attention functions, which run the fastest implementation that supports the call."""

from attest.kernels.annotations import Lse, Out
from attest.kernels.arguments import AttentionArguments, with_arguments
from attest.kernels.prepare import computed


@with_arguments(AttentionArguments)
def flash_attention(arguments: AttentionArguments) -> Out:
    """Compute attention in memory linear in the length: out [B, Sq, Hq, Dv], in the dtype of query.

    Args:
        query: [B, Sq, Hq, D] of float32, bfloat16 or float16. There may be several batch dimensions or none,
            the same ones for all arguments and results (S27).
        key: [B, Sk, Hkv, D], the dtype of query. Query head h reads key head h // (Hq / Hkv) (S15).
        value: [B, Sk, Hkv, Dv], the dtype of query.
        attention_mask: [B or 1, Hq or 1, Sq or 1, Sk or 1], bool or integer; non-zero may attend (S5). The
            first axes may be left out: [Sq, Sk], [Hq or 1, Sq, Sk]. A mask of keys is [B, 1, 1, Sk]. Axes of
            size 1 are broadcast without a copy.
        bias: [B or 1, Hq or 1, Sq or 1, Sk or 1], float; added to the scaled logits before the cap (S2). -inf
            hides a key. The first axes may be left out.
        softmax_scale: what the products of query and key are multiplied by; 1 / sqrt(D) by default (S1).
        dropout_prob: the share of the weights that is dropped, from 0 to below 1 (S12).
        causal: whether a row sees no later key; the last row is aligned with the last key (S6).
        dropout_seed: an int in [0, 2**64), a uint32 [2] of its low and high words, or a typed JAX random
            key. Needed for dropout.
        cum_seqlens_q: [n + 1] int32 or int64, cumulative lengths from 0. With B = 1 the sequences are packed
            one after another; with B = n each batch entry holds one, padded (S9).
        cum_seqlens_k: the same of the keys.
        sliding_window: how many keys to the left and to the right a row sees; one number is both; None on a
            side is no limit (S7).
        fwd_params: block sizes of the forward pass: those of the implementation that `platform` names, or an
            `attest.kernels.operations.FwdParams`, which every implementation reads. They change results only
            by rounding (S18).
        bwd_params: the same of the backward pass, or an `attest.kernels.operations.BwdParams`.
        config: a configuration of one implementation, in place of fwd_params and bwd_params: the `Config` of
            its module, such as `attest.kernels.triton.Config`. The call runs the implementation of this
            class. See `attest.kernels.config`.
        logits_soft_cap: c in c * tanh(logits / c) (S3).
        softmax_aux: float sink logits (S11): [1, n], shared by all heads, or [Hq, n]. [n] is shared too, and
            refused where it could be one sink a head.
        normalize_output: False returns the numerator sum_j exp(t_j - m) v_j, where t_j are the visible capped
            logits and m is the largest of them and of the sinks.
        precision: that of every product and of a soft cap; see the page of each implementation.
        logits_dtype: the dtype that scaled products are rounded to before bias and cap; float32 by default.
        q_segment_ids: [B, Sq] integer; a row sees the keys with its own id. Negative is padding (S8).
        kv_segment_ids: [B, Sk] integer.
        q_offset: the position of the first row, an integer or one for each sequence; row i is at
            position i + q_offset. Causal order, windows and chunks compare positions (S23). By default the
            last row has the position of the last key.
        q_positions: [B or 1, Sq] integer positions of the rows, in place of q_offset.
        kv_positions: [B or 1, Sk] integer positions of the keys; by default key j of a sequence is at
            position j.
        origin: where a call on a part of larger arrays begins in them: batch entry, query head, row and key,
            the key a multiple of 4. Dropout then drops the same weights as in the whole call (S12, S23).
        chunk_size: the number of positions in a chunk; a row sees only keys of its chunk (S24).
        kv_start: [B or 1, Sq] int32 or int64, the first key that a row may see, counted in key (S28). Blocks
            of keys outside of all ranges are skipped.
        kv_end: [B or 1, Sq] int32 or int64, the key after the last one that a row may see.
        alibi_slopes: float32 [Hq], or [B or 1, Hq] with all batch dimensions: slope * |position of the row -
            position of the key| is subtracted where the bias is added (S25). A constant: its derivative is
            refused.
        dropout_shared: "b", "h" or "bh": one mask of dropout serves all batch entries, all heads, or both, as
            with Flax's `broadcast_dropout`; by default each has its own. On a shared axis, the index is 0
            and origin has no effect (S29). Each entry of an axis of `jax.vmap` is a separate call, whose
            batch entries count from 0.
        mask_info: an `attest.kernels.operations.MaskInfo`, whose conditions apply in addition to the
            other arguments. With several batch dimensions its arrays have one, of all entries.
        platform: "mosaic_gpu", "triton", "pallas_tpu" or "xla"; by default the fastest that supports the
            call on the device of the arrays, or on JAX's default device where they are traced. Compiling
            the program for another device is refused if another implementation would be chosen
            there. An `attest.kernels.contract.Implementation` of your own runs on any device.
        mask: refused; attention_mask is the name here. A layer of Flax's linen gives these two names to its
            `attention_fn`, and silently ignores arguments that the function does not have. Give it
            `attest.kernels.adapters.flax_linen.dot_product_attention`, which has all of them.
        dropout_rng: refused; dropout_seed is the name here.

    A row that sees no key has out 0, gradients 0 and lse -inf, or the logsumexp of its sinks; padding has
    -inf with sinks, too (S9 to S11). Hidden keys contribute nothing, whatever is stored in them (S4).
    Batch and heads may be sharded over a mesh: no array is gathered. On an explicit mesh a sequence may not.
    Numerics are those of the implementation that runs. The clauses S1 to S29 are in
    docs/reference/semantics.md.

    Differentiable once in reverse mode, in query, key, value, bias and softmax_aux. A policy of
    `jax.checkpoint` that saves the names "flash_attention_out" and "flash_attention_lse" avoids a second
    forward pass.

    Raises:
        ValueError: an argument is malformed; the message names it (S20).
        NotImplementedError: the platform that is named does not support the call; the message says why and
            names those that do. Also where no platform is named and none supports this version of JAX, and
            for a second derivative, one in forward mode, or one by alibi_slopes.
    """
    return computed("flash_attention", arguments)[0]


@with_arguments(AttentionArguments)
def flash_attention_with_lse(arguments: AttentionArguments) -> tuple[Out, Lse]:
    """Compute attention and its logsumexp: out as `flash_attention` does, lse [B, Hq, Sq] float32.

    The lse is the natural logarithm of the sum of exp over the visible logits and the sinks (S13). Both
    results are differentiable. The arguments and the errors are those of `flash_attention`.
    """
    return computed("flash_attention", arguments)
