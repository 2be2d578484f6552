"""The public attention functions, which run the first implementation that supports the call."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from attest.kernels.annotations import (
    AlibiSlopes,
    AttentionMask,
    Bias,
    CumSeqlens,
    DropoutSeed,
    DropoutShared,
    Flag,
    Key,
    KVPositions,
    KVRange,
    KVSegmentIds,
    Lse,
    Number,
    Origin,
    Out,
    QOffset,
    QPositions,
    QSegmentIds,
    Query,
    Sinks,
    Size,
    SlidingWindow,
    Value,
)
from attest.kernels.call.call import check_call
from attest.kernels.call.leading_axes import merged, split
from attest.kernels.call.options import check_dtype, check_flag, without_names_of_flax
from attest.kernels.call.symbolic import check_symbolic
from attest.kernels.choice.choose import check_supported, chosen, traits_of
from attest.kernels.choice.fastest import sizes_of
from attest.kernels.choice.lowering import refused_elsewhere
from attest.kernels.choice.neutral import split_sizes, with_sizes
from attest.kernels.differentiate import attend
from attest.kernels.implementation import Implementation, Passes, Settings
from attest.kernels.masks.given import with_mask_info
from attest.kernels.masks.mask_info import MaskInfo


def flash_attention(
    query: Query,
    key: Key,
    value: Value,
    attention_mask: AttentionMask | None = None,
    bias: Bias | None = None,
    softmax_scale: Number | None = None,
    dropout_prob: Number = 0.0,
    causal: Flag = False,
    dropout_seed: DropoutSeed | None = None,
    cum_seqlens_q: CumSeqlens | None = None,
    cum_seqlens_k: CumSeqlens | None = None,
    sliding_window: SlidingWindow | None = None,
    fwd_params: Any = None,
    bwd_params: Any = None,
    logits_soft_cap: Number | None = None,
    softmax_aux: Sinks | None = None,
    normalize_output: Flag = True,
    precision: Any = None,
    logits_dtype: Any = None,
    *,
    q_segment_ids: QSegmentIds | None = None,
    kv_segment_ids: KVSegmentIds | None = None,
    q_offset: QOffset | None = None,
    q_positions: QPositions | None = None,
    kv_positions: KVPositions | None = None,
    origin: Origin | None = None,
    chunk_size: Size | None = None,
    kv_start: KVRange | None = None,
    kv_end: KVRange | None = None,
    alibi_slopes: AlibiSlopes | None = None,
    dropout_shared: DropoutShared | None = None,
    mask_info: MaskInfo | None = None,
    config: Any = None,
    platform: str | Implementation | None = None,
    mask: None = None,
    dropout_rng: None = None,
) -> Out:
    """Compute attention in memory linear in the length: out [B, Sq, Hq, Dv], in the dtype of query.

    Args:
        query: [B, Sq, Hq, D] of float32, bfloat16 or float16. There may be several batch dimensions or none,
            the same ones for all arguments and results (S27).
        key: [B, Sk, Hkv, D], the dtype of query. Query head h reads key head h // (Hq / Hkv) (S15).
        value: [B, Sk, Hkv, Dv], the dtype of query.
        attention_mask: [B or 1, Hq or 1, Sq or 1, Sk or 1], bool or integer; non-zero may attend (S5). The
            first axes may be left out: [Sq, Sk], [Hq or 1, Sq, Sk]. A mask of keys is [B, 1, 1, Sk]. An axis
            of 1 is read as it is, not expanded.
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
            `attest.kernels.operations.FwdParams`, which every implementation reads. Results depend on them by
            rounding alone (S18).
        bwd_params: the same of the backward pass, or an `attest.kernels.operations.BwdParams`.
        config: a configuration of one implementation, in place of fwd_params and bwd_params: the `Config` of
            its module, such as `attest.kernels.triton.Config`. It names the implementation, as platform does.
            See `attest.kernels.config`.
        logits_soft_cap: c in c * tanh(logits / c) (S3).
        softmax_aux: float sink logits (S11): [1, n], shared by all heads, or [Hq, n]. [n] is shared too, and
            refused where it could be one sink a head.
        normalize_output: False returns the numerator sum_j exp(t_j - m) v_j, where t_j are the visible capped
            logits and m is the largest of them and of the sinks.
        precision: that of every product; each implementation's page says what it takes.
        logits_dtype: the dtype that scaled products are rounded to before bias and cap; float32 by default.
        q_segment_ids: [B, Sq] integer; a row sees the keys with its own id. Negative is padding (S8).
        kv_segment_ids: [B, Sk] integer.
        q_offset: the position of the first row, an integer or one for each sequence; row i stands at i +
            q_offset. Causal order, windows and chunks compare positions (S23). By default the last row stands
            where the last key does.
        q_positions: [B or 1, Sq] integer positions of the rows, in place of q_offset.
        kv_positions: [B or 1, Sk] integer positions of the keys; by default key j of a sequence stands at j.
        origin: where a call on a part of larger arrays begins in them: batch entry, query head, row and key,
            the key a multiple of 4. Dropout then drops the pairs that it drops in the whole (S12, S23).
        chunk_size: how many positions a chunk has; a row sees the keys of its own chunk alone (S24).
        kv_start: [B or 1, Sq] int32 or int64, the first key that a row may see, counted in key (S28). Blocks
            of keys outside of all ranges are skipped.
        kv_end: [B or 1, Sq] int32 or int64, the key after the last one that a row may see.
        alibi_slopes: float32 [Hq], or [B or 1, Hq] with all batch dimensions: slope * |position of the row -
            position of the key| is subtracted where the bias is added (S25). A constant: its derivative is
            refused.
        dropout_shared: "b", "h" or "bh": one mask of dropout serves all batch entries, all heads, or both, as
            with Flax's `broadcast_dropout`; by default each has its own. The coordinates that are shared
            count as 0, and so does origin on them (S29). An axis of `jax.vmap` is no batch entry: each of its
            calls begins at 0.
        mask_info: an `attest.kernels.operations.MaskInfo`, whose conditions count beside all others. With
            several batch dimensions its arrays have one, of all entries.
        platform: "mosaic_gpu", "triton", "pallas_tpu" or "xla"; by default the fastest that supports the
            call on the device of the arrays, or on JAX's default device where they are traced. Compiling
            the program for another device is then refused if the fastest one is another there. An
            `attest.kernels.implementation.Implementation` of your own runs on any device.
        mask: refused; attention_mask is the name here. A layer of Flax's linen gives these two names to its
            `attention_fn`, and drops in silence what the function has no parameter for. Give it
            `attest.kernels.adapters.flax_linen.dot_product_attention`, which has all of them.
        dropout_rng: refused; dropout_seed is the name here.

    A row that sees no key has out 0, gradients 0 and lse -inf, or the logsumexp of its sinks; padding has
    -inf with sinks, too (S9 to S11). Hidden keys contribute nothing, whatever is stored in them (S4).
    Batch and heads may be sharded over a mesh: no array is gathered. On an explicit mesh a sequence may not.
    Numerics are those of the implementation that runs. The clauses S1 to S29 are in
    docs/reference/semantics.md.

    Differentiable once in reverse mode, in query, key, value, bias and softmax_aux. A policy of
    `jax.checkpoint` that saves the names "flash_attention_out" and "flash_attention_lse" spares the forward
    pass a second run.

    Raises:
        ValueError: an argument is malformed; the message names it (S20).
        NotImplementedError: the platform that is named does not support the call; the message says why and
            names those that do. Also where no platform is named and none supports this version of JAX, and
            for a second derivative, one in forward mode, or one by alibi_slopes.
    """
    return flash_attention_with_lse(**locals())[0]


def flash_attention_with_lse(
    query: Query,
    key: Key,
    value: Value,
    attention_mask: AttentionMask | None = None,
    bias: Bias | None = None,
    softmax_scale: Number | None = None,
    dropout_prob: Number = 0.0,
    causal: Flag = False,
    dropout_seed: DropoutSeed | None = None,
    cum_seqlens_q: CumSeqlens | None = None,
    cum_seqlens_k: CumSeqlens | None = None,
    sliding_window: SlidingWindow | None = None,
    fwd_params: Any = None,
    bwd_params: Any = None,
    logits_soft_cap: Number | None = None,
    softmax_aux: Sinks | None = None,
    normalize_output: Flag = True,
    precision: Any = None,
    logits_dtype: Any = None,
    *,
    q_segment_ids: QSegmentIds | None = None,
    kv_segment_ids: KVSegmentIds | None = None,
    q_offset: QOffset | None = None,
    q_positions: QPositions | None = None,
    kv_positions: KVPositions | None = None,
    origin: Origin | None = None,
    chunk_size: Size | None = None,
    kv_start: KVRange | None = None,
    kv_end: KVRange | None = None,
    alibi_slopes: AlibiSlopes | None = None,
    dropout_shared: DropoutShared | None = None,
    mask_info: MaskInfo | None = None,
    config: Any = None,
    platform: str | Implementation | None = None,
    mask: None = None,
    dropout_rng: None = None,
) -> tuple[Out, Lse]:
    """Compute attention and its logsumexp: out as `flash_attention` does, lse [B, Hq, Sq] float32.

    The lse is the natural logarithm of the sum of exp over the visible logits and the sinks (S13). Both
    results are differentiable. The arguments and the errors are those of `flash_attention`.
    """
    return computed("flash_attention", dict(locals()))


def computed(function: str, arguments: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Return out and lse of a call on its arguments, which are those of `flash_attention`, all by name.

    function: the name of the public function, with which messages about derivatives begin.

    Raises: as `flash_attention`.
    """
    rest = without_names_of_flax(arguments)
    platform, mask_info = rest.pop("platform"), rest.pop("mask_info")
    arguments, leading = merged(rest)
    arguments = with_mask_info(arguments, mask_info)
    check_symbolic(arguments)
    arguments, sizes = split_sizes(arguments)
    traits = traits_of(arguments)
    # Block sizes are those of one implementation.
    looked_up = None if platform is not None or any(sizes.values()) else sizes_of(arguments, traits.dropout)
    choice = chosen(arguments, traits, platform, looked_up)
    passes = choice.load()
    call = check_call(**{name: x for name, x in arguments.items() if name not in SETTINGS})
    # Now the call is well-formed; block sizes may depend on the device.
    check_supported(choice)
    arguments = with_sizes(arguments, sizes, choice.implementation, call, named=choice.device is None)
    settings = replace(settings_of(passes, arguments), function=function)
    if choice.device is not None:
        passes = refused_elsewhere(passes, choice)
    out, lse = attend(passes, settings, call)
    return split(out, leading), split(lse, leading)


# The arguments that `Settings` holds; `check_call` checks the others.
SETTINGS = ("fwd_params", "bwd_params", "config", "normalize_output", "precision", "logits_dtype")


def settings_of(passes: Passes, arguments: Mapping[str, Any]) -> Settings:
    """Return the settings among the arguments of a call, checked for an implementation.

    Raises: ValueError naming the argument.
    """
    own = {name: arguments[name] for name in SETTINGS}
    forward, backward = own["fwd_params"], own["bwd_params"]
    if own["config"] is not None:
        forward, backward = own["config"].forward, own["config"].backward
    return Settings(
        passes.check_forward(forward),
        passes.check_backward(backward),
        check_flag("normalize_output", own["normalize_output"]),
        passes.check_precision(own["precision"]),
        _logits_dtype(own["logits_dtype"]),
    )


def _logits_dtype(dtype: Any) -> str:
    return "float32" if dtype is None else check_dtype("logits_dtype", dtype)
