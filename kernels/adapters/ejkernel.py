"""ejKernel's function `ring_flash_attention_call`, on our ring attention.

The page docs/how-to/adapters-peers.md lists what differs.
"""

from dataclasses import fields
from typing import Any

import jax

from attest.kernels.operations.configs import BwdParams, FlashAttentionConfig, FwdParams
from attest.kernels.operations.flash_attention import FlashAttention
from attest.kernels.operations.invocation import Invocation
from attest.kernels.options import refuse
from attest.kernels.ring import ring_attention

_FLASH_ATTENTION = FlashAttention()


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
    """Compute attention over a sequence that is spread over devices: out [B, Sq, Hq, Dv], in query's dtype.

    It is called inside `jax.shard_map`. query: [B, Sq, Hq, D], key: [B, Sk, Hkv, D] and value: [B, Sk, Hkv,
    Dv], of one dtype, are the parts of this device: device d of n has the d-th of n equal parts of the rows
    and of the keys. Every option counts in the whole sequence (S21).

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
    sizes = _sizes("fwd_params", fwd_params, FwdParams), _sizes("bwd_params", bwd_params, BwdParams)
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
    return ring_attention(
        **arguments,
        attention_mask=attention_mask,
        bias=bias,
        config=_config(*sizes, bias, arguments),
        axis_name=axis_name,
    )


def _sizes[Params: FwdParams | BwdParams](name: str, given: Any, kind: type[Params]) -> Params | None:
    """The neutral sizes of an object that has them as attributes."""
    if given is None:
        return None
    if not (hasattr(given, "q_blocksize") and hasattr(given, "kv_blocksize")):
        expected = "None, or an object with q_blocksize and kv_blocksize"
        refuse(name, f"a {type(given).__name__}", expected, f"Build it as {kind.__name__}.")
    return kind(**{field.name: getattr(given, field.name, None) for field in fields(kind)})


def _config(
    forward: FwdParams | None, backward: BwdParams | None, bias: Any, arguments: dict[str, Any]
) -> Any:
    """The configuration of the kernel that runs the pairs of shards; None leaves it to the kernel."""
    if forward is None and backward is None:
        return None
    if bias is not None:
        # The choice of the kernel reads its dtype; its rows and keys may be those of the whole.
        arguments = {**arguments, "bias": jax.ShapeDtypeStruct((1, 1, 1, 1), bias.dtype)}
    cfg = FlashAttentionConfig(fwd_params=forward, bwd_params=backward)
    return _FLASH_ATTENTION.complete(cfg, Invocation(_FLASH_ATTENTION.op_id, kwargs=arguments)).config
