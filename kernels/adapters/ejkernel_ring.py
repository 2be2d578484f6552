"""ejKernel's functions `ring_attention` and `ring_flash_attention_call` on our ring attention."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from attest.kernels.adapters.ejkernel_arguments import (
    check_integers,
    config_of,
    is_ordered,
    mask_arguments,
    place_of_rows,
    precision_of,
    segment_ids,
    shared_sinks,
    stored_positions,
    window_and_first_keys,
)
from attest.kernels.adapters.shared import renamed
from attest.kernels.call.arrays import check_is_array, check_pair
from attest.kernels.call.options import (
    check_dtype,
    check_flag,
    check_integer,
    check_number,
    check_size,
    refuse,
    shown,
)
from attest.kernels.choice.choose import device_of
from attest.kernels.masks.mask_info import MaskInfo
from attest.kernels.operations.configs import FlashAttentionConfig
from attest.kernels.operations.flash_attention import FlashAttention
from attest.kernels.operations.functions import default_executor
from attest.kernels.operations.invocation import Invocation
from attest.kernels.operations.platforms import check_platform, implementation_name
from attest.kernels.operations.ring_attention import RingAttention
from attest.kernels.operations.sharded import axes_at
from attest.kernels.ring import attention as ring
from attest.kernels.ring.arguments import devices_of

_FLASH_ATTENTION = FlashAttention()
_RING_ATTENTION = RingAttention()
_NAMES = {"q_positions": "q_position_ids", "kv_positions": "kv_position_ids"}


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    softmax_aux: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    mask_info: Any = None,
    mask_builder: Any = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    causal: bool = False,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    axis_name: str | None = None,
    fused_backward: bool = False,
    platform: str | None = None,
    cfg: Any = None,
    mesh: Mesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | None = None,
    attention_mask: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    q_position_ids: jax.Array | None = None,
    kv_position_ids: jax.Array | None = None,
    fwd_params: Any = None,
    bwd_params: Any = None,
    query_chunk_size: int | None = None,
    key_chunk_size: int | None = None,
    causal_block_size: int | None = None,
    attention_sink_size: int = 0,
    cache_idx: Any = None,
    float32_logits: bool = True,
    deterministic: bool = True,
    dropout_rng: Any = None,
    pdrop: float = 0.0,
    dtype: Any = jnp.float32,
    policy: Any = None,
    precision: Any = lax.Precision.DEFAULT,
    prevent_cse: bool = True,
    zero_is_padding: bool = True,
    q_offset: Any = None,
) -> jax.Array:
    """Compute attention as `ejkernel.modules.ring_attention` does: out [B, Sq, Hq, Dv], in query's dtype.

    Inside `jax.shard_map` with axis_name, or from outside with mesh, in_specs and out_specs, the sequence is
    split over devices; without either one device computes it. Options refer to the whole sequence (S21).

    Args:
        query: [B, Sq, Hq, D] of float32, bfloat16 or float16.
        key: [B, Sk, Hkv, D], the dtype of query.
        value: [B, Sk, Hkv, Dv], the dtype of query.
        softmax_aux: sink logits: [n], shared by all heads, or [Hq, n] (S11).
        bias: [B or 1, Hq or 1, rows, keys], float, added to the logits before the cap (S2).
        mask_info: ours, or a MaskInfo of ejKernel: what it stores, and where its tokens stand in segments.
        mask_builder: None; functions that build masks are refused.
        sliding_window: (left, right), or one number for both (S7).
        chunk_size: with platform "xla" the rows and keys of a block; with "pallas" the positions of a chunk
            under causal order (S24), as ejKernel's kernels take it. Without these platforms it is refused.
        causal: whether a row sees no later key; see q_offset.
        logits_soft_cap: c in c * tanh(logits / c) (S3).
        softmax_scale: of the logits, 1 / sqrt(D) by default (S1).
        axis_name: the axis of `jax.shard_map` over which the sequence is spread.
        fused_backward: has no effect.
        platform: "auto", "triton", "pallas", "xla", or the name of a kernel of ours.
        cfg: a configuration of ejKernel or of ours.
        mesh: a mesh, one of whose axes splits the sequence, as the spec of query says.
        in_specs: with mesh; of query, key, value, softmax_aux and bias, the order of ejKernel.
        out_specs: with mesh; of out.
        attention_mask: bool or integer, of the shapes of bias; non-zero may attend (S5).
        q_segment_ids: [B, Sq] integer; a row sees the keys with its own id. Negative is padding (S8).
        kv_segment_ids: [B, Sk]; one of the two is for both.
        q_position_ids: [B, Sq] integer, what causal order and windows compare, with kv_position_ids (S23).
        kv_position_ids: [B, Sk] integer.
        fwd_params: an object with `q_blocksize` and `kv_blocksize`, ejKernel's or ours.
        bwd_params: the same of the backward pass.
        query_chunk_size: rows of a block, as ejKernel's first versions named it.
        key_chunk_size: keys of a block, likewise.
        causal_block_size: of the first versions: any positive size is causal order.
        attention_sink_size: of the first versions: how many of the first keys rows see beside their window.
            It becomes a mask of all pairs.
        cache_idx: None; others are refused.
        float32_logits: has no effect: logits are always in float32.
        deterministic: True drops no weights.
        dropout_rng: has no effect without dropout.
        pdrop: refused where it drops: ejKernel drops logits, ahead of the softmax, and our kernels weights.
        dtype: None or float32, that of sums.
        policy: has no effect: the backward pass always computes the weights anew.
        precision: that of the products; DEFAULT is that of our kernels.
        prevent_cse: has no effect.
        zero_is_padding: whether tokens of segment 0 in q_segment_ids and kv_segment_ids are padding, as in
            ejKernel's first versions. In later ones only negative ids are.
        q_offset: where the first row stands (S23). Needed with causal order or a window where Sq and Sk
            differ and no platform is named: ejKernel's kernels disagree there.

    A row that sees no key has out 0 (S10), where ejKernel has NaN or the mean of all values.

    Raises: ValueError naming the argument; NotImplementedError for what no kernel of ours does.
    """
    flags = {
        "causal": causal,
        "fused_backward": fused_backward,
        "float32_logits": float32_logits,
        "deterministic": deterministic,
        "prevent_cse": prevent_cse,
    }
    for name, flag in flags.items():
        check_flag(name, flag)
    _refuse_others(mask_builder, cache_idx, pdrop, deterministic, dtype)
    blocks = {"query_chunk_size": query_chunk_size, "key_chunk_size": key_chunk_size}
    positions_in_chunk = _positions_in_chunk(chunk_size, platform)
    if chunk_size is not None and positions_in_chunk is None:
        blocks = dict.fromkeys(blocks, chunk_size)
    if causal_block_size is not None:
        check_size("causal_block_size", causal_block_size)
    causal = bool(causal) or causal_block_size is not None or positions_in_chunk is not None
    config = config_of(cfg, fwd_params, bwd_params, blocks)
    given = mask_arguments(
        mask_info, attention_mask, segment_ids(q_segment_ids, kv_segment_ids, zero_is_padding)
    )
    given |= {"q_offset": q_offset}
    for name, ids in (("q_position_ids", q_position_ids), ("kv_position_ids", kv_position_ids)):
        if ids is not None:
            check_integers(name, ids)
    if is_ordered(causal, sliding_window):
        ids = q_position_ids, kv_position_ids
        given |= _places(query, key, q_offset, *ids, mask_info, platform)
    first_keys = _number_of_keys(attention_sink_size)
    if first_keys and sliding_window is not None:
        spread = None if mesh is not None else axis_name
        given = _with_first_keys(query, key, sliding_window, first_keys, given, spread)
        sliding_window = None
    plain: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
    }
    arguments: dict[str, Any] = {
        **plain,
        "softmax_aux": shared_sinks(softmax_aux),
        "bias": bias,
        "chunk_size": positions_in_chunk,
        "precision": precision_of(precision),
        **given,
    }
    exact = _completed(config, platform, bias, plain)
    with renamed(_NAMES):
        if mesh is None and in_specs is None and out_specs is None:
            where = _implementation(platform, config, query, key, value)
            return ring.ring_attention(**arguments, config=exact, platform=where, axis_name=axis_name)
        return default_executor()(
            _RING_ATTENTION,
            **arguments,
            platform=platform,
            cfg=None if exact is None else FlashAttentionConfig(config=exact),
            mesh=mesh,
            in_specs=_specs(in_specs, query, axis_name),
            out_specs=out_specs,
        )


def ring_flash_attention_call(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array | None,
    bias: jax.Array | None,
    softmax_scale: float | None,
    dropout_prob: float,
    causal: bool,
    dropout_seed: Any,
    fwd_params: Any,
    bwd_params: Any,
    sliding_window: int | tuple[int | None, int | None] | None,
    logits_soft_cap: float | None,
    axis_name: str | None,
) -> jax.Array:
    """Compute attention over a sequence that is split over devices: out [B, Sq, Hq, Dv], in query's dtype.

    It is called inside `jax.shard_map`. query: [B, Sq, Hq, D], key: [B, Sk, Hkv, D] and value: [B, Sk, Hkv,
    Dv], of one dtype, are the parts of this device: device d of n has the d-th of n equal parts of the rows
    and of the keys. Every option refers to the whole sequence (S21).

    attention_mask: bool or integer, [B or 1, Hq or 1, rows, keys], where rows and keys are 1, those of this
    device or all; non-zero may attend (S5). bias: float, of the same shapes (S2). softmax_scale: 1 / sqrt(D)
    if None (S1). dropout_prob: the share of the weights that is dropped, from 0 to below 1 (S12).
    dropout_seed: needed if it is not 0; the same on all devices. causal: whether the last row is aligned with
    the last key, and no row sees a later key (S6). fwd_params, bwd_params: None, or objects with
    `q_blocksize` and `kv_blocksize`, such as `attest.kernels.operations.FwdParams` and `BwdParams`; sizes
    that the kernel which runs does not have are left out. sliding_window: (left, right), or one number for
    both (S7). logits_soft_cap: c in c * tanh(logits / c) (S3). axis_name: the axis of `jax.shard_map` over
    which the sequence is spread; None computes on one device.

    Differentiable once, in reverse mode, in query, key, value and bias.

    Raises: ValueError naming a malformed argument; NotImplementedError for what no kernel of ours does.
    """
    arguments: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "softmax_scale": softmax_scale,
        "dropout_prob": dropout_prob,
        "causal": causal,
        "dropout_seed": dropout_seed,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
    }
    return ring.ring_attention(
        **arguments,
        attention_mask=attention_mask,
        bias=bias,
        config=_completed(config_of(None, fwd_params, bwd_params, {}), None, bias, arguments),
        axis_name=axis_name,
    )


def _completed(
    config: FlashAttentionConfig | None, platform: Any, bias: Any, arguments: dict[str, Any]
) -> Any:
    """Return the configuration of the kernel that runs the pairs of shards; None leaves it to the kernel.

    arguments: of the call, those that the choice of the kernel may depend on.
    """
    if config is None:
        return None
    if platform is not None and config.config is None:
        config = replace(config, platform=platform, backend="any")
    if isinstance(bias, jax.Array | np.ndarray):
        # The choice of the kernel reads its dtype; its rows and keys may be those of the whole.
        arguments = {**arguments, "bias": jax.ShapeDtypeStruct((1, 1, 1, 1), bias.dtype)}
    for name in ("query", "key", "value"):
        check_is_array(name, arguments[name])
    return _FLASH_ATTENTION.complete(config, Invocation(_FLASH_ATTENTION.op_id, kwargs=arguments)).config


def _implementation(platform: Any, config: Any, *arrays: Any) -> str | None:
    """Return the name of the implementation of a platform, where no configuration tells it."""
    check_platform(platform)
    return None if config is not None else implementation_name(platform, device_of(*arrays))


def _refuse_others(mask_builder: Any, cache_idx: Any, pdrop: Any, deterministic: bool, dtype: Any) -> None:
    """Refuse what our kernels do not have."""
    drops = check_number("pdrop", pdrop) != 0 and not deterministic
    refused = {
        "mask_builder": (mask_builder is not None, "Pass a mask_info or an attention_mask."),
        "cache_idx": (cache_idx is not None, "Give q_offset, or positions."),
        "pdrop": (
            drops,
            "ejKernel drops logits, ahead of the softmax; attest.kernels.ring.ring_attention drops weights.",
        ),
        "dtype": (not (dtype is None or _is_float32(dtype)), "Sums are in float32; cast the result."),
    }
    for name, (is_given, advice) in refused.items():
        if is_given:
            raise NotImplementedError(f"{name}: got a value of its own; expected the default. {advice}")


def _is_float32(dtype: Any) -> bool:
    return check_dtype("dtype", dtype) == "float32"


def _positions_in_chunk(chunk_size: Any, platform: Any) -> int | None:
    """Return the chunk length that `chunk_size` means; None where it is the size of blocks, or not given."""
    if chunk_size is None:
        return None
    size, named = check_size("chunk_size", chunk_size), check_platform(platform)
    if named == "xla":
        return None
    if named in ("pallas", "pallas_tpu"):
        return size
    advice = (
        "ejKernel's XLA kernel takes it as the size of blocks, query_chunk_size and key_chunk_size, and its "
        "TPU kernel as chunks of positions under causal order."
    )
    return refuse("chunk_size", size, "platform 'xla' or 'pallas' beside it", advice)


def _places(
    query: Any, key: Any, q_offset: Any, q_ids: Any, kv_ids: Any, mask_info: Any, platform: Any
) -> dict[str, Any]:
    """Return where rows and keys stand, as arguments of ours."""
    if check_pair("q_position_ids", q_ids, "kv_position_ids", kv_ids):
        return {"q_positions": q_ids, "kv_positions": kv_ids}
    stored = stored_positions(mask_info)
    if stored and q_offset is None:
        return stored
    return {"q_offset": place_of_rows(query, key, q_offset, mask_info, platform)}


def _number_of_keys(attention_sink_size: Any) -> int:
    number = check_integer("attention_sink_size", attention_sink_size)
    if number < 0:
        refuse("attention_sink_size", shown(number), "a number of keys, or 0 for none", "Pass 0.")
    return number


def _with_first_keys(
    query: Any, key: Any, window: Any, first_keys: int, given: dict[str, Any], axis_name: Any
) -> dict[str, Any]:
    """Return the conditions of a call with its window and the first keys beside it as a mask."""
    if given.get("q_positions") is not None:
        raise NotImplementedError(
            "attention_sink_size: got first keys beside positions; expected one of them. Pass a mask."
        )
    parts, before = 1, 0
    if axis_name is not None:
        parts = devices_of(axis_name)
        before = lax.axis_index(axis_name) * query.shape[1]
    mask = window_and_first_keys(query, key, window, first_keys, given.get("q_offset"), before, parts)
    info = (given["mask_info"] or MaskInfo()).apply_attention_mask(mask, axes="bhqk")
    return {**given, "mask_info": info}


def _specs(in_specs: Any, query: Any, axis_name: Any) -> Any:
    """Return the specs in our order, with None for the lengths; other types than tuple and list as is."""
    if not isinstance(in_specs, tuple | list):
        return in_specs
    if not 3 <= len(in_specs) <= 5:
        expected = "3 to 5: query, key, value, softmax_aux and bias"
        refuse("in_specs", f"{len(in_specs)} of them", expected, "Masks are split like query.")
    axis = getattr(query, "ndim", 4) - 3
    if axis_name is not None and axes_at(in_specs[0], axis) != (axis_name,):
        refuse(
            "axis_name", shown(axis_name), f"the axis of the spec of query, {in_specs[0]}", "Leave it out."
        )
    sinks, bias = (*in_specs[3:], None, None)[:2]
    return (*in_specs[:3], bias, None, None, sinks)
