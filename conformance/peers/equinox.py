"""The Subject of `equinox.nn.MultiheadAttention`: the attention inside, without its projections.

Its documentation is at https://docs.kidger.site/equinox/api/nn/attention/. In our words:

- Attention is softmax(Q K^T / sqrt(d_qk)) V, with no other scale. Values may have a width of their own. The
  product with V takes all values, so a NaN in a hidden one leaks.
- A mask of [q_seq, kv_seq], or one for each head, hides the pairs where it is False.
- Dropout of the weights draws from a JAX key.
- A row that sees no key is not described, and no refusal of malformed arguments is.

The projections are matrices, which would spread a NaN over all channels. So the adapter calls the function
that the layer maps over heads, and maps it over the batch as the documentation advises.
"""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.conformance.cases.features import DTYPES
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
    dropout_prob: float = 0.0,
    dropout_seed: int | None = None,
) -> Any:
    library = import_module("equinox.nn._attention")
    dropout = import_module("equinox.nn").Dropout(dropout_prob) if dropout_prob else None
    batch, q_len, heads, _ = query.shape
    keys = mask = None
    if dropout_seed is not None:
        keys = jax.random.split(jax.random.key(np.uint32(dropout_seed)), (batch, heads))
    if attention_mask is not None:
        mask = jnp.broadcast_to(attention_mask, (batch, heads, q_len, key.shape[1]))

    def one_head(query: Any, key: Any, value: Any, mask: Any, random_key: Any) -> Any:
        return library.dot_product_attention(query, key, value, mask, dropout, key=random_key)

    of_heads = jax.vmap(one_head, in_axes=(1, 1, 1, 0, 0), out_axes=1)
    return jax.vmap(of_heads)(query, key, value, mask, keys)


def _numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return its arithmetic: logits and dP are stored in the inputs' dtype, the softmax is float32.

    Queries are divided by sqrt(d) in the inputs' dtype.
    """
    cast = format_of(dtype)
    rounding = 0.0 if dtype == "float32" else cast.unit
    contract = Numerics(
        output_dtype=dtype,
        input_rounding=rounding,
        logits=rounding,
        weights=cast.unit,
        half_subnormal=cast.half_subnormal,
        d_weights=rounding,
        key_block=tiling.key_block,
        materialised=True,
    )
    return as_xla_multiplies(contract, dtype)


INNER = Subject(
    name="equinox.dot_product_attention",
    distribution="equinox",
    call=_call,
    features=frozenset({"mask", "broadcast", "dropout", "value_dim"}),
    dtypes=DTYPES,
    semantics=Semantics(
        hidden_nonfinite="leaks",
        empty_rows="unspecified",
        dropout="own_generator",
        gradients=frozenset({"query", "key", "value"}),
        lse_gradient=False,
    ),
    numerics=_numerics,
    limits=Limits(seed_bits=32, validates=False),
    ready=lambda: why_not_installed("equinox"),
)

SUBJECTS: tuple[Subject, ...] = ()
APART = (INNER,)
UNCONFIRMED: tuple[Subject, ...] = ()
