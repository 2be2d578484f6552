"""The `attention_fn` of Flax's nnx layers on our kernels."""

from typing import Any

import jax

from attest.kernels.adapters.flax_shared import attend, check_shapes
from attest.kernels.adapters.shared import missing

try:
    from flax import nnx
    from flax.nnx.nn import dtypes
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
    module: nnx.Module | None = None,
    promote_dtype: Any = dtypes.promote_dtype,
    is_causal: bool = False,
) -> jax.Array:
    """Compute attention as `flax.nnx.dot_product_attention` does: out [batch..., Sq, H, Dv].

    Give it to a layer: `nnx.MultiHeadAttention(8, 512, attention_fn=dot_product_attention, ...)`.

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
        module: the module that sows the weights before dropout as an `nnx.Intermediate` "attention_weights".
        promote_dtype: the function that casts (query, key, value), given `dtype`.
        is_causal: whether query i sees only keys 0 to i; the first query has the position of the
            first key (S23).

    A query that sees no key has out 0 (S10), where Flax has the mean of all values.

    Raises: ValueError naming the argument.
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    check_shapes(query, key, value)
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
        causal=is_causal,
        sow=None if module is None else lambda x: module.sow(nnx.Intermediate, "attention_weights", x),
    )
