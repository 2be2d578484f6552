"""The Subjects of `flax.linen.dot_product_attention`: in float32, and in 16 bits with a float32 softmax.

Its documentation is at
https://flax.readthedocs.io/en/latest/api_reference/flax.linen/layers.html#flax.linen.dot_product_attention.
In our words:

- Arrays may have any batch dimensions. Values may have a width of their own. All have equally many heads.
- A bias is added to the logits. A mask hides the pairs where it is False. Both broadcast to
  [batch..., heads, q_length, kv_length].
- Masked are the weights: the product with the values takes all of them, so a NaN in a hidden one leaks.
- The scale is that of "Attention is all you need": 1 / sqrt(depth). There is no other.
- Dropout draws from a JAX key. By default all batch entries and heads share its mask, which the adapter
  switches off by `broadcast_dropout=False`.
- The dtype of the computation is that of the inputs. `force_fp32_for_softmax` computes the softmax of
  16-bit logits in float32, "where higher precision is desired for numerical stability". The weights then stay
  in float32, and so does the result, which the adapter rounds.
- Neither a row that sees no key, nor any refusal of malformed arguments, is described.
"""

from functools import partial
from importlib import import_module
from typing import Any

import jax
import numpy as np

from attest.conformance.peers._packages import why_not_installed
from attest.conformance.peers.jax_nn import as_xla_multiplies
from attest.conformance.subject import Limits, Subject, Tiling
from attest.reference.numerics import Numerics, format_of
from attest.reference.semantics import Semantics


def _call(
    query: Any,
    key: Any,
    value: Any,
    *,
    attention_mask: Any = None,
    bias: Any = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | None = None,
    float32_softmax: bool = False,
) -> Any:
    out = import_module("flax.linen").dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        mask=attention_mask,
        broadcast_dropout=False,
        dropout_rng=None if dropout_seed is None else jax.random.key(np.uint32(dropout_seed)),
        dropout_rate=dropout_prob,
        force_fp32_for_softmax=float32_softmax,
    )
    return out.astype(query.dtype) if float32_softmax else out


def _numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return its arithmetic: logits are stored in the inputs' dtype, before and after the bias is added.

    Queries are scaled before the product, in the inputs' dtype.
    """
    cast = format_of(dtype)
    rounding = 0.0 if dtype == "float32" else cast.unit
    contract = Numerics(
        output_dtype=dtype,
        input_rounding=rounding,
        logits=2 * rounding,
        weights=cast.unit,
        half_subnormal=cast.half_subnormal,
        d_weights=rounding,
        key_block=tiling.key_block,
        materialised=True,
    )
    return as_xla_multiplies(contract, dtype)


def _subject(name: str, *dtypes: str, **options: Any) -> Subject:
    return Subject(
        name=name,
        distribution="flax",
        call=partial(_call, **options),
        features=frozenset({"bias", "mask", "broadcast", "dropout", "value_dim"}),
        dtypes=dtypes,
        semantics=Semantics(
            hidden_nonfinite="leaks",
            empty_rows="unspecified",
            dropout="own_generator",
            gradients=frozenset({"query", "key", "value", "bias"}),
            lse_gradient=False,
        ),
        numerics=_numerics,
        limits=Limits(seed_bits=32, batch_dims=True, validates=False),
        ready=lambda: why_not_installed("flax"),
    )


FLOAT32 = _subject("flax.linen.dot_product_attention", "float32")
FLOAT32_SOFTMAX = _subject(
    "flax.linen.dot_product_attention.float32_softmax", "bfloat16", "float16", float32_softmax=True
)

SUBJECTS: tuple[Subject, ...] = ()
APART = (FLOAT32, FLOAT32_SOFTMAX)
UNCONFIRMED: tuple[Subject, ...] = ()
