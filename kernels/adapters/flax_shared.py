"""What both APIs of Flax share: attention by the arguments of Flax's `dot_product_attention`."""

from collections.abc import Callable
from typing import Any

import jax

from attest.kernels.adapters.shared import as_mask, as_pairs, as_seed, renamed, top_left
from attest.kernels.operations.functions import attention, flash_attention
from attest.kernels.options import FLOAT_DTYPES, check_dropout_prob, check_flag, refuse

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
) -> jax.Array:
    """Compute attention: out [batch..., Sq, Hq, Dv], in the dtype that query, key and value have.

    Arguments are those of Flax by its names. causal: whether query i sees keys 0 to i alone, whatever the
    lengths (S23). sow: takes the weights [batch..., Hq, Sq, Sk] before dropout, which costs O(Sq * Sk).

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
            _check_broadcast(broadcast_dropout)
            seed = as_seed("dropout_rng", dropout_rng)
            dropout = {"dropout_prob": dropout_rate, "dropout_seed": seed}
        out = flash_attention(**arguments, **dropout, precision=_one(precision))
        if sow is not None:
            sow(attention(**arguments)[1])
    return out


def _check_broadcast(broadcast_dropout: Any) -> None:
    if check_flag("broadcast_dropout", broadcast_dropout):
        expected = "False where weights are dropped, as each batch entry and head has its own dropout (S12)"
        refuse("broadcast_dropout", True, expected, "Build the layer with broadcast_dropout=False.")


def _one(precision: Any) -> Any:
    """A precision in place of a pair of the same twice."""
    if isinstance(precision, tuple | list) and len(precision) == 2 and precision[0] == precision[1]:
        return precision[0]
    return precision
