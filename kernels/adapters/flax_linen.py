"""The `attention_fn` of Flax's linen layers on our kernels."""

from collections.abc import Callable
from typing import Any

import jax

from attest.kernels.adapters.flax_shared import attend, check_shapes
from attest.kernels.adapters.shared import missing
from attest.kernels.call.options import check_flag, refuse, shown

try:
    from flax import linen
    from flax.linen.dtypes import promote_dtype
except ModuleNotFoundError as error:
    raise missing(__name__, "flax", error) from None


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: linen.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Compute attention as `flax.linen.dot_product_attention` does: out [batch..., Sq, H, Dv].

    Give it to a layer: `nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=dot_product_attention)`.

    Args:
        query: [batch..., Sq, H, D], with any number of batch dimensions or none.
        key: [batch..., Sk, Hkv, D]; H is a multiple of Hkv.
        value: [batch..., Sk, Hkv, Dv].
        bias: float, added to the logits; broadcastable to [batch..., H, Sq, Sk].
        mask: bool, integer, or float of 0 and 1; broadcastable to the same shape. 0 hides.
        broadcast_dropout: whether all batch entries and heads share one mask of dropout (S29), or each has
            its own (S12).
        dropout_rng: a JAX random key, old or new style. The same key drops the same weights, but others than
            in Flax.
        dropout_rate: the share of the weights that is dropped.
        deterministic: True drops none.
        dtype: to which query, key and value are cast; by default the one that Flax promotes them to.
        precision: that of the products, as `attest.flash_attention` takes it.
        module: the module that sows the weights before dropout into "intermediates" as "attention_weights".
        force_fp32_for_softmax: the softmax is always in float32; with it, so are the weights that are sown.
        einsum_dot_general: refused.
        qk_attn_weights_einsum: refused.
        attn_weights_value_einsum: refused.

    A query that sees no key has out 0 (S10), where Flax has the mean of all values.

    Raises: ValueError naming the argument.
    """
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    check_shapes(query, key, value)
    refused = {
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    for name, given in refused.items():
        if given is not None:
            advice = "Leave it out, or use Flax's own attention in this layer."
            refuse(name, shown(given), "None, as the kernels compute their own products", advice)
    return attend(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        broadcast_dropout=broadcast_dropout,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        precision=precision,
        sow=None if module is None else lambda x: module.sow("intermediates", "attention_weights", x),
        sow_dtype="float32" if check_flag("force_fp32_for_softmax", force_fp32_for_softmax) else None,
    )
