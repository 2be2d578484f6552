"""The Subjects of `jax.nn.dot_product_attention`, held to its documentation: in XLA and in cuDNN.

Its XLA implementation masks by a large finite number, so a row that sees no key weighs all values equally;
causal and window start in the top-left corner; its lse is not differentiable and has the inputs' dtype.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.conformance.cases.features import DTYPES
from attest.conformance.peers._windows import Window, with_ended_sides
from attest.conformance.subject import Limits, Subject, Tiling, default_numerics
from attest.reference.numerics import Numerics, format_of
from attest.reference.semantics import Semantics

# What its XLA implementation stores in place of a hidden float32 logit.
_SENTINEL = -0.7 * float(np.finfo(np.float32).max)


def _call(
    query: Any,
    key: Any,
    value: Any,
    *,
    attention_mask: Any = None,
    bias: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    sliding_window: Window = None,
    cum_seqlens_q: Any = None,
    cum_seqlens_k: Any = None,
    implementation: str = "xla",
) -> Any:
    """Return (out, lse), from cuDNN out alone."""
    if (cum_seqlens_q is None) != (cum_seqlens_k is None):
        raise ValueError("cum_seqlens_q and cum_seqlens_k: got one of the two, expected both or neither")
    returns_lse = implementation == "xla"
    attention: Any = jax.nn.dot_product_attention  # its overloads name every combination of literals
    result = attention(
        query,
        key,
        value,
        bias=bias,
        mask=attention_mask,
        scale=softmax_scale,
        is_causal=causal,
        query_seq_lengths=_lengths("cum_seqlens_q", cum_seqlens_q, query),
        key_value_seq_lengths=_lengths("cum_seqlens_k", cum_seqlens_k, query),
        local_window_size=with_ended_sides(sliding_window, query, key),
        implementation=implementation,
        return_residual=returns_lse,
    )
    if not returns_lse:
        return result
    out, lse = result
    return out, lse.transpose(0, 2, 1)


def _lengths(name: str, cum: Any, query: Any) -> Any:
    """Return the lengths of a padded batch, which is what it takes, of their sums.

    It has no packed form. Sums that are malformed are refused here, wrong lengths by the library.
    """
    if cum is None:
        return None
    if len(cum) == 0:
        raise ValueError(f"{name}: got no entry, expected at least 0 and the length of one sequence")
    # NumPy reads a concrete array while something else is traced; indexing it would give a tracer.
    if not isinstance(cum, Tracer) and np.asarray(cum)[0] != 0:
        raise ValueError(f"{name}: got {np.asarray(cum)[0]} first, expected 0")
    if len(cum) != query.shape[0] + 1:
        raise NotImplementedError(
            f"{name}: packed sequences, got {len(cum) - 1} in a batch of {query.shape[0]}"
        )
    return jnp.diff(cum)


def _numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return its arithmetic: the weights, their cotangent and lse are cast to the inputs' dtype."""
    cast = format_of(dtype).unit
    return replace(default_numerics(dtype, tiling), lse=cast, d_weights=cast, materialised=True)


XLA = Subject(
    name="jax.nn.dot_product_attention",
    distribution="jax",
    call=_call,
    features=frozenset({"scale", "bias", "mask", "causal", "window", "padded", "gqa"}),
    dtypes=DTYPES,
    semantics=Semantics(
        hidden="sentinel",
        sentinel=_SENTINEL,
        causal="top_left",
        window="top_left",
        empty_rows="mean_of_values",
        gradients=frozenset({"query", "key", "value", "bias"}),
        lse_gradient=False,
    ),
    numerics=_numerics,
    returns_lse=True,
)

# It needs head dims that are multiples of 8, which no Subject can declare; the library refuses others.
CUDNN = Subject(
    name="jax.nn.dot_product_attention.cudnn",
    distribution="jax",
    call=partial(_call, implementation="cudnn"),
    features=frozenset({"scale", "bias", "causal", "window", "gqa"}),
    dtypes=("bfloat16", "float16"),
    semantics=Semantics(
        causal="top_left",
        window="top_left",
        gradients=frozenset({"query", "key", "value", "bias"}),
        lse_gradient=False,
    ),
    backend="gpu",
    head_dims=(8, 256),
    limits=Limits(longest=1 << 20, window_sides="left"),
)

SUBJECTS = (XLA,)
UNCONFIRMED = (CUDNN,)
