"""The Subjects of `flax.nnx.dot_product_attention`: without dropout, and with it in float32.

Its documentation is at
https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/nn/attention.html#flax.nnx.dot_product_attention.
In our words:

- Arrays may have any batch dimensions. Values may have a width of their own, `v_depth_per_head`. No
  Subject declares this, since every such call without dropout raises.
- A bias is added to the logits. A mask hides the pairs where it is False. Both broadcast to
  [batch..., heads, q_length, kv_length].
- `is_causal` applies causal attention. Its own code builds the lower triangle from the top-left corner.
- Dropout draws from a JAX key. By default all batch entries and heads share its mask, which the adapter
  switches off by `broadcast_dropout=False`.
- Masked are the weights: the product with the values takes all of them, so a NaN in a hidden one leaks.
- Without dropout it calls `jax.nn.dot_product_attention`. With dropout, the dtype of the computation is that
  of the inputs.
- Neither a row that sees no key, nor any refusal of malformed masks and biases, is described.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import numpy as np

from attest.conformance.cases.features import DTYPES
from attest.conformance.peers._packages import why_not_installed
from attest.conformance.peers.flax_linen import FLOAT32
from attest.conformance.peers.jax_nn import XLA
from attest.conformance.subject import Limits, Subject, Tiling
from attest.reference.numerics import Numerics
from attest.reference.semantics import Semantics


def _call(
    query: Any,
    key: Any,
    value: Any,
    *,
    attention_mask: Any = None,
    bias: Any = None,
    causal: bool = False,
    dropout_prob: float = 0.0,
    dropout_seed: int | None = None,
) -> Any:
    return import_module("flax.nnx").dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        mask=attention_mask,
        broadcast_dropout=False,
        dropout_rng=None if dropout_seed is None else jax.random.key(np.uint32(dropout_seed)),
        dropout_rate=dropout_prob,
        is_causal=causal,
    )


def _subject(name: str, numerics: Callable[[str, Tiling], Numerics], *more: str) -> Subject:
    return Subject(
        name=name,
        distribution="flax",
        call=_call,
        features=frozenset({"bias", "mask", "broadcast", "causal", *more}),
        dtypes=("float32",) if more else DTYPES,
        semantics=Semantics(
            hidden_nonfinite="leaks",
            causal="top_left",
            empty_rows="unspecified",
            dropout="own_generator",
            gradients=frozenset({"query", "key", "value", "bias"}),
            lse_gradient=False,
        ),
        numerics=numerics,
        unjudged=frozenset() if more else frozenset({"dropout"}),
        limits=Limits(seed_bits=32, batch_dims=True, validates=False),
        ready=lambda: why_not_installed("flax"),
    )


NNX = _subject("flax.nnx.dot_product_attention", XLA.numerics)
DROPOUT = _subject("flax.nnx.dot_product_attention.dropout", FLOAT32.numerics, "dropout")

SUBJECTS: tuple[Subject, ...] = ()
APART = (NNX, DROPOUT)
UNCONFIRMED: tuple[Subject, ...] = ()
