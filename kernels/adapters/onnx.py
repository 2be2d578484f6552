"""ONNX's operator `Attention`, opsets 23 to 25, on our kernels.

Names are those of its inputs and attributes. The page docs/how-to/adapters-peers.md lists what differs.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from attest.kernels.adapters.onnx_arrays import as_four_axes, with_past
from attest.kernels.adapters.onnx_masks import mask_arguments, padded_lengths, window_of
from attest.kernels.adapters.onnx_scores import check_mode, scores
from attest.kernels.adapters.shared import renamed, top_left
from attest.kernels.call.options import check_flag, check_integer, check_number, refuse
from attest.kernels.operations.functions import flash_attention

# The operator's names of what the kernels refuse.
_NAMES = {
    "query": "Q",
    "key": "K",
    "value": "V",
    "attention_mask": "attn_mask",
    "bias": "attn_mask",
    "softmax_scale": "scale",
    "logits_soft_cap": "softcap",
}
# Numbers of onnx.TensorProto: FLOAT, FLOAT16, BFLOAT16, which float32 holds, and DOUBLE.
_IN_FLOAT32, _DOUBLE = (1, 10, 16), 11


class Outputs(NamedTuple):
    """The outputs of the operator; the last is None where it is not wanted."""

    Y: jax.Array
    present_key: jax.Array
    present_value: jax.Array
    qk_matmul_output: jax.Array | None


def attention(
    Q: jax.Array,
    K: jax.Array,
    V: jax.Array,
    attn_mask: jax.Array | None = None,
    past_key: jax.Array | None = None,
    past_value: jax.Array | None = None,
    nonpad_kv_seqlen: jax.Array | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    with_qk_matmul_output: bool = False,
) -> Outputs:
    """Compute ONNX's `Attention`: Y in the form and the dtype of Q, then the present keys and values.

    Args:
        Q: [B, Hq, Sq, D] or [B, Sq, Hq * D] of float32, bfloat16 or float16.
        K: [B, Hkv, Sk, D] or [B, Sk, Hkv * D], the dtype of Q.
        V: [B, Hkv, Sk, Dv] or [B, Sk, Hkv * Dv], the dtype of Q.
        attn_mask: [B or 1, Hq or 1, Sq or 1, T], T keys with the past ones; bool, or float to add to the
            logits. The first axes may be left out. Keys past its last axis are hidden. With a softcap, only
            a known float mask of 0 and -inf is taken: our kernels cap after the bias (S2).
        past_key: [B, Hkv, P, D], the keys before K.
        past_value: [B, Hkv, P, Dv], the values before V.
        nonpad_kv_seqlen: [B] integers, from 0 to Sk: keys are hidden from there on. Not with a past.
        is_causal: 0 or 1. Query i sees keys up to i, up to i + P, or up to i + nonpad_kv_seqlen[b] - Sq.
        kv_num_heads: of K and V, needed where they have three axes.
        left_window_size: how many keys before its own position a query sees; -1 leaves the side open.
        q_num_heads: of Q, needed where it has three axes.
        qk_matmul_output_mode: 0 for the scaled products, 1 for those with softcap, 2 for those with
            attn_mask, and -inf where a key is hidden, 3 for the weights.
        right_window_size: as left_window_size, after its own position.
        scale: of the logits, 1 / sqrt(D) by default.
        softcap: c in c * tanh(logits / c); 0 is off.
        softmax_precision: 1, 10 or 16, a number of `onnx.TensorProto`. The softmax is in float32.
        with_qk_matmul_output: whether to return the fourth output, which needs memory for all pairs.

    Raises: ValueError naming the argument; NotImplementedError for what no kernel of ours does.
    """
    mode = check_mode(qk_matmul_output_mode)
    _check_precision(softmax_precision)
    cap = check_number("softcap", softcap) or None
    query, key, value = (
        as_four_axes(name, x, heads_name, heads)
        for name, x, heads_name, heads in (
            ("Q", Q, "q_num_heads", q_num_heads),
            ("K", K, "kv_num_heads", kv_num_heads),
            ("V", V, "kv_num_heads", kv_num_heads),
        )
    )
    new = key.shape[1]
    key, value = with_past(key, value, past_key, past_value)
    arguments: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "softmax_scale": scale,
        "logits_soft_cap": cap,
        "causal": _flag("is_causal", is_causal),
        "sliding_window": window_of(left_window_size, right_window_size),
        **mask_arguments(attn_mask, key.shape[1], cap),
        **padded_lengths(query, key, nonpad_kv_seqlen, past_key),
    }
    ordered = arguments["causal"] or arguments["sliding_window"] is not None
    if ordered and nonpad_kv_seqlen is None:
        arguments["q_offset"] = top_left(query, key) if past_key is None else key.shape[1] - new
    with renamed(_NAMES):
        out = flash_attention(**arguments)
        wanted = check_flag("with_qk_matmul_output", with_qk_matmul_output)
        found = scores(mode, arguments) if wanted else None
    merged = out.reshape(*out.shape[:2], -1) if Q.ndim == 3 else out.swapaxes(1, 2)
    return Outputs(merged, key.swapaxes(1, 2), value.swapaxes(1, 2), found)


def _flag(name: str, value: Any) -> bool:
    """Return an attribute that is 0 or 1 as a bool."""
    number = int(value) if isinstance(value, bool | np.bool_) else check_integer(name, value)
    if number not in (0, 1):
        refuse(name, number, "0 or 1", "Pass an int.")
    return number == 1


def _check_precision(number: Any) -> None:
    """Refuse a precision of the softmax above float32.

    Raises: ValueError for an unknown number; NotImplementedError for DOUBLE.
    """
    if number is None or check_integer("softmax_precision", number) in _IN_FLOAT32:
        return
    if number == _DOUBLE:
        raise NotImplementedError(
            "softmax_precision: got 11, DOUBLE; expected 1, 10 or 16, since our kernels compute the softmax "
            "in float32. Leave it out, or use ONNX's reference."
        )
    refuse("softmax_precision", number, "1, 10 or 16, a number of onnx.TensorProto", "Leave it out.")
