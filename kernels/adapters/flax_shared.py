"""The core of both APIs of Flax: attention by the arguments of Flax's `dot_product_attention`."""

from collections.abc import Callable
from typing import Any

import jax

from attest.kernels.adapters.shared import as_mask, as_pairs, as_seed, renamed, top_left
from attest.kernels.call.options import FLOAT_DTYPES, check_dropout_prob, check_flag, refuse
from attest.kernels.operations.functions import attention, flash_attention

_AXES = 3  # of query without a batch
_NAMES = {"attention_mask": "mask", "dropout_prob": "dropout_rate", "causal": "is_causal"}


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: Any,
    mask: Any,
    broadcast_dropout: Any,
    dropout_rng: Any,
    dropout_rate: Any,
    deterministic: Any,
    precision: Any,
    causal: Any = False,
    sow: Callable[[jax.Array], object] | None = None,
    sow_dtype: Any = None,
) -> jax.Array:
    """Compute attention: out [batch..., Sq, Hq, Dv], in the dtype that query, key and value have.

    Arguments are those of Flax by its names, of shapes that `check_shapes` has seen. causal: whether query i
    sees keys 0 to i alone, whatever the lengths (S23). sow: takes the weights [batch..., Hq, Sq, Sk] before
    dropout, which costs O(Sq * Sk). sow_dtype: that of these weights, by default that of query.

    Raises: ValueError naming the argument.
    """
    if query.dtype.name not in FLOAT_DTYPES:
        advice = "Pass dtype=jnp.float32 to the layer, which casts query, key and value."
        refuse("dtype", query.dtype, f"one of {', '.join(FLOAT_DTYPES)}", advice)
    arguments: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "bias": as_pairs("bias", bias, query.ndim),
        "attention_mask": as_mask("mask", mask, query.ndim),
        "causal": causal,
        "q_offset": top_left(query, key) if check_flag("is_causal", causal) else None,
    }
    with renamed(_NAMES):
        drops = check_dropout_prob(dropout_rate) > 0 and not check_flag("deterministic", deterministic)
        dropout: dict[str, Any] = {}
        if drops:
            dropout = {
                "dropout_prob": dropout_rate,
                "dropout_seed": as_seed("dropout_rng", dropout_rng),
                "dropout_shared": "bh" if check_flag("broadcast_dropout", broadcast_dropout) else None,
            }
        out = flash_attention(**arguments, **dropout, precision=_one(precision))
        if sow is not None:
            sow(attention(**arguments, dtype=sow_dtype)[1])
    return out


def check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Refuse shapes that do not fit each other, before any option is looked at, as Flax does.

    Raises: ValueError naming the array.
    """
    leading, expected = query.shape[:-3], "[batch..., length, heads, head dim]"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < _AXES:
            refuse(name, f"shape {x.shape}", expected, "Add the axes that are missing.")
        if x.shape[:-3] != leading:
            refuse(name, f"shape {x.shape}", f"{expected} with the batch {leading} of query", "Repeat it.")
    if key.shape[-1] != query.shape[-1]:
        refuse("key", f"head dim {key.shape[-1]}", f"{query.shape[-1]}, that of query", "Check the axes.")
    if value.shape[-3:-1] != key.shape[-3:-1]:
        wanted = f"length and heads {key.shape[-3:-1]}, those of key"
        refuse("value", f"shape {value.shape}", wanted, "Check the axes.")
    if key.shape[-2] == 0 or query.shape[-2] % key.shape[-2]:
        heads = f"{query.shape[-2]} heads with {key.shape[-2]} key heads"
        refuse("query", heads, "a multiple of the key heads", "Repeat the keys, or change the heads.")


def _one(precision: Any) -> Any:
    """Return one precision in place of a pair of equal ones."""
    if isinstance(precision, tuple | list) and len(precision) == 2 and precision[0] == precision[1]:
        return precision[0]
    return precision
