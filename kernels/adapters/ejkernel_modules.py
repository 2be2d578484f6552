"""ejKernel's functions `flash_attention` and `attention` on our operations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from attest.kernels.adapters.ejkernel_arguments import (
    config_of,
    is_ordered,
    mask_arguments,
    place_of_rows,
    precision_of,
    segment_ids,
    shared_sinks,
)
from attest.kernels.call.arrays import check_is_array
from attest.kernels.call.options import check_dropout_prob, refuse
from attest.kernels.operations import functions


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    cum_seqlens_q: jax.Array | None = None,
    cum_seqlens_k: jax.Array | None = None,
    softmax_aux: jax.Array | None = None,
    block_tables: Any = None,
    *,
    mask_info: Any = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    dropout_seed: Any = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    normalize_output: bool = True,
    precision: Any = lax.Precision.DEFAULT,
    logits_dtype: Any = jnp.float32,
    platform: str | None = None,
    cfg: Any = None,
    mesh: Mesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | None = None,
    attention_mask: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    fwd_params: Any = None,
    bwd_params: Any = None,
    chunk_size_q: int | None = None,
    chunk_size_k: int | None = None,
    zero_is_padding: bool = False,
    q_offset: Any = None,
) -> jax.Array:
    """Compute attention as `ejkernel.modules.flash_attention` does: out [B, Sq, Hq, Dv], in query's dtype.

    Args:
        query: [B, Sq, Hq, D] of float32, bfloat16 or float16.
        key: [B, Sk, Hkv, D], the dtype of query.
        value: [B, Sk, Hkv, Dv], the dtype of query.
        bias: [B or 1, Hq or 1, Sq or 1, Sk or 1], float, added to the logits before the cap (S2).
        cum_seqlens_q: [n + 1] integer, cumulative lengths from 0 (S9).
        cum_seqlens_k: the same of the keys.
        softmax_aux: sink logits: [n], shared by all heads, or [Hq, n] (S11).
        block_tables: None; pages are refused.
        mask_info: ours, or a MaskInfo of ejKernel: the mask and the segment ids that it stores.
        softmax_scale: of the logits, 1 / sqrt(D) by default (S1).
        dropout_prob: the share of the weights that is dropped (S12).
        causal: whether a row sees no later key; see q_offset.
        dropout_seed: needed for dropout, where ejKernel takes 0.
        sliding_window: (left, right), or one number for both (S7).
        logits_soft_cap: c in c * tanh(logits / c) (S3).
        normalize_output: False returns the numerator (S26).
        precision: that of the products; DEFAULT is that of our kernels.
        logits_dtype: the dtype that scaled products are rounded to.
        platform: "auto", "triton", "pallas", "xla", or the name of a kernel of ours.
        cfg: a configuration of ejKernel or of ours.
        mesh: a mesh whose axes split batch and heads.
        in_specs: with mesh; of query, key, value, bias, softmax_aux, cum_seqlens_q and cum_seqlens_k, the
            order of ejKernel.
        out_specs: with mesh; of out.
        attention_mask: bool or integer, of the shapes of bias; non-zero may attend (S5).
        q_segment_ids: [B, Sq] integer; a row sees the keys with its own id. Negative is padding (S8).
        kv_segment_ids: [B, Sk]; one of the two is for both.
        fwd_params: objects with `q_blocksize` and `kv_blocksize`, ejKernel's or ours.
        bwd_params: the same of the backward pass.
        chunk_size_q: rows of a block, of ejKernel's first versions.
        chunk_size_k: keys of a block.
        zero_is_padding: whether tokens of segment 0 in q_segment_ids and kv_segment_ids are padding.
        q_offset: where the first row stands (S23). Needed with causal order or a window where Sq and Sk
            differ and no platform is named: ejKernel's kernels disagree there.

    A row that sees no key has out 0 (S10), where ejKernel has the mean of all values.

    Raises: ValueError naming the argument; NotImplementedError for what no kernel of ours does.
    """
    _refuse_pages(block_tables)
    ids = segment_ids(q_segment_ids, kv_segment_ids, zero_is_padding)
    given = mask_arguments(mask_info, attention_mask, ids)
    if cum_seqlens_q is None and is_ordered(causal, sliding_window):
        q_offset = place_of_rows(query, key, q_offset, mask_info, platform)
    return functions.flash_attention(
        query,
        key,
        value,
        bias,
        cum_seqlens_q,
        cum_seqlens_k,
        shared_sinks(softmax_aux),
        **given,
        softmax_scale=softmax_scale,
        dropout_prob=dropout_prob,
        causal=causal,
        dropout_seed=dropout_seed,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        normalize_output=normalize_output,
        precision=precision_of(precision),
        logits_dtype=logits_dtype,
        platform=platform,
        q_offset=q_offset,
        cfg=config_of(
            cfg, fwd_params, bwd_params, {"chunk_size_q": chunk_size_q, "chunk_size_k": chunk_size_k}
        ),
        mesh=mesh,
        in_specs=_specs(in_specs),
        out_specs=out_specs,
    )


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    dropout_rng: jax.Array | None = None,
    softmax_aux: jax.Array | None = None,
    *,
    mask_info: Any = None,
    init_bias: Callable[[], jax.Array] | None = None,
    deterministic: bool = True,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dtype: Any = jnp.bfloat16,
    softmax_dtype: Any = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    attention_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute attention and its weights as `ejkernel.modules.attention` does.

    It returns out [B, Sq, Hq, Dv] and the weights [B, Hq, Sq, Sk], both in `dtype`: bfloat16 by default, as
    there. Inputs are not rounded to it.

    Args:
        query: [B, Sq, Hq, D] of float32, bfloat16 or float16.
        key: [B, Sk, Hkv, D], the dtype of query.
        value: [B, Sk, Hkv, Dv], the dtype of query.
        bias: [B, Hq, Hkv or 1, Sq, Sk], float, added to the logits. ejKernel adds it behind the cap and our
            kernels before it, so that both together are refused.
        dropout_rng: a JAX random key.
        softmax_aux: sink logits: [n] or [h, n]. n or h that is Hq is one for each query head, Hkv one for
            each key head; other [n] are shared by all heads.
        mask_info: ours, or a MaskInfo of ejKernel.
        init_bias: called for a bias where there are neither bias nor mask.
        deterministic: True drops no weights.
        softmax_scale: of the logits, 1 / sqrt(D) by default (S1).
        logits_soft_cap: c in c * tanh(logits / c) (S3).
        dtype: of both results; None is that of query.
        softmax_dtype: of logits and weights, float32 by default.
        dropout_prob: the share of the weights that is dropped (S12).
        causal: whether row i sees keys 0 to i alone, whatever the lengths.
        sliding_window: (left, right), or one number for both, around i.
        attention_mask: [B, Sk], [B, Sq, Sk] or [B, Hq, Hkv or 1, Sq, Sk]; non-zero may attend. It counts
            beside a bias, where ejKernel ignores it.

    A row that sees no key has out 0 (S10), where ejKernel has the mean of all values.

    Raises: ValueError naming the argument; NotImplementedError for a bias beside a cap.
    """
    if logits_soft_cap is not None and (bias is not None or init_bias is not None):
        raise NotImplementedError(
            "bias: got one beside logits_soft_cap; expected one of them. ejKernel's attention adds it behind "
            "the cap, attest.attention before it (S2): call that."
        )
    check_dropout_prob(dropout_prob)
    mask = _mask_of_heads(attention_mask, query, key)
    ordered = is_ordered(causal, sliding_window)
    has_mask = mask is not None or mask_info is not None
    return functions.attention(
        query,
        key,
        value,
        _of_query_heads("bias", bias, query, key),
        dropout_rng,
        _sinks_of_heads(softmax_aux, query, key),
        **mask_arguments(mask_info, mask, {}),
        init_bias=None if has_mask else init_bias,
        deterministic=deterministic,
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        dtype=dtype,
        softmax_dtype=softmax_dtype,
        dropout_prob=dropout_prob,
        causal=causal,
        sliding_window=sliding_window,
        q_offset=place_of_rows(query, key, None, mask_info, "xla") if ordered else None,
    )


def _refuse_pages(block_tables: Any) -> None:
    if block_tables is not None:
        raise NotImplementedError(
            f"block_tables: got a {type(block_tables).__name__}; expected None. Gather the pages of each "
            "sequence with jnp.take before the call."
        )


def _specs(in_specs: Any) -> Any:
    """Return the specs in our order, sinks behind the lengths; other types than tuple and list as is."""
    if not isinstance(in_specs, tuple | list) or len(in_specs) <= 4:
        return in_specs
    if len(in_specs) > 7:
        refuse("in_specs", f"{len(in_specs)} of them", "at most 7", "Masks are split like query.")
    *first, sinks = in_specs[:5]
    lengths = (*in_specs[5:], None, None)[:2]
    return (*first, *lengths, sinks)


def _heads(query: Any, key: Any) -> tuple[int, int]:
    """Return the numbers of query heads and of key heads; 0 of what is refused elsewhere."""
    return tuple(x.shape[-2] if getattr(x, "ndim", 0) >= 3 else 0 for x in (query, key))  # pyright: ignore[reportReturnType]


def _of_query_heads(name: str, x: Any, query: Any, key: Any) -> Any:
    """Return a mask or bias whose second axis may be key heads, with one for each query head."""
    if x is None:
        return None
    check_is_array(name, x)
    heads, groups = _heads(query, key)
    if x.ndim != 4 or x.shape[1] != groups or groups in (0, 1, heads) or heads % groups:
        return x
    return (np if isinstance(x, np.ndarray) else jnp).repeat(x, heads // groups, axis=1)


def _mask_of_heads(mask: Any, query: Any, key: Any) -> Any:
    """Return a mask with four axes: one of two is of keys, one of three of each batch entry."""
    if mask is None:
        return None
    check_is_array("attention_mask", mask)
    if mask.ndim == 2:
        mask = mask[:, None, None]
    elif mask.ndim == 3:
        mask = mask[:, None]
    return _of_query_heads("attention_mask", mask, query, key)


def _sinks_of_heads(softmax_aux: Any, query: Any, key: Any) -> Any:
    """Return sinks as [1 or Hq, n]."""
    if softmax_aux is None:
        return None
    check_is_array("softmax_aux", softmax_aux)
    sinks = jnp.asarray(softmax_aux) if jnp.issubdtype(softmax_aux.dtype, jnp.floating) else softmax_aux
    heads, groups = _heads(query, key)
    if sinks.ndim == 1:
        sinks = sinks[:, None] if sinks.shape[0] in (heads, groups) else sinks[None]
    of_groups = sinks.ndim == 2 and sinks.shape[0] == groups not in (0, heads) and heads % groups == 0
    return jnp.repeat(sinks, heads // groups, axis=0) if of_groups else sinks
