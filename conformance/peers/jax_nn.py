"""The Subjects of `jax.nn.dot_product_attention`, held to its documentation: in XLA and in cuDNN.

Its XLA implementation masks by a large finite number, so a row that sees no key weighs all values equally;
causal and window start in the top-left corner; its lse is not differentiable and has the inputs' dtype.

"`cudnn` supports only a subset of shapes/dtypes, and an exception will be thrown if its not supported":

- Head dims are multiples of 8, up to 128 on every GPU.
- Lengths are even in a call that is differentiated. The source means calls with a bias, and refuses all. The
  adapter refuses odd lengths in other calls, too.
- A bias has an entry for every query and key, so the adapter repeats one that all queries share.
- Outside of causal order, windows end at the diagonal.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.conformance.cases.features import DTYPES
from attest.conformance.peers._windows import Window, with_ended_sides
from attest.conformance.subject import CUDA_MATRIX_UNIT, Limits, Subject, Tiling, default_numerics
from attest.reference.numerics import Numerics, format_of
from attest.reference.semantics import Semantics

# What its XLA implementation stores in place of a hidden float32 logit.
_SENTINEL = -0.7 * float(np.finfo(np.float32).max)

_TF32 = 2.0**-11  # its unit roundoff


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
) -> Any:
    """Return (out, lse)."""
    if (cum_seqlens_q is None) != (cum_seqlens_k is None):
        raise ValueError("cum_seqlens_q and cum_seqlens_k: got one of the two, expected both or neither")
    attention: Any = jax.nn.dot_product_attention  # its windows are of two integers, ours of some
    out, lse = attention(
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
        implementation="xla",
        return_residual=True,
    )
    return out, lse.transpose(0, 2, 1)


def call_cudnn(
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    sliding_window: Window = None,
) -> Any:
    """Return out. Odd lengths are given to the library, too, where the call of the Subject refuses them."""
    attention: Any = jax.nn.dot_product_attention
    return attention(
        query,
        key,
        value,
        bias=_with_own_rows(bias, query),
        scale=softmax_scale,
        is_causal=causal,
        local_window_size=with_ended_sides(sliding_window, query, key),
        implementation="cudnn",
        return_residual=False,
    )


def _call_cudnn(query: Any, key: Any, value: Any, **options: Any) -> Any:
    lengths = tuple(np.shape(array)[1] for array in (query, key) if np.ndim(array) == 4)
    if any(length % 2 for length in lengths):
        raise NotImplementedError(f"query, key: got lengths {lengths}, expected multiples of 2")
    return call_cudnn(query, key, value, **options)


def _with_own_rows(bias: Any, query: Any) -> Any:
    """Return a bias with a row for each query, whose gradients are added in float32.

    The rows have the dtype of the bias, since the gradients of float32 rows are wrong. What is not a bias is
    left to the library, which refuses it.
    """
    if np.ndim(bias) != 4 or bias.shape[2] != 1 or not jnp.issubdtype(bias.dtype, jnp.floating):
        return bias
    rows = bias.astype(jnp.float32)
    return jnp.broadcast_to(rows, (*bias.shape[:2], query.shape[1], bias.shape[3])).astype(bias.dtype)


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


def on_matrix_units(numerics: Numerics, dtype: str) -> Numerics:
    """Return an arithmetic with the products of a GPU's matrix units, at JAX's default precision.

    They add some products at once and truncate the sum. Of float32 they take what TF32 has room for, of the
    weights too: "On GPU: uses tensorfloat32 if available", says `jax.lax.Precision`.
    """
    if dtype != "float32":
        return replace(numerics, **CUDA_MATRIX_UNIT)
    of_tf32 = CUDA_MATRIX_UNIT | {"truncated": 8, "input_rounding": _TF32, "weights": _TF32}
    return replace(numerics, **of_tf32)


def as_xla_multiplies(numerics: Numerics, dtype: str) -> Numerics:
    """Return an arithmetic with the products of XLA on JAX's default backend."""
    return on_matrix_units(numerics, dtype) if jax.default_backend() == "gpu" else numerics


def _numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return its arithmetic: the weights, their cotangent and lse are cast to the inputs' dtype."""
    cast = format_of(dtype).unit
    contract = replace(default_numerics(dtype, tiling), lse=cast, d_weights=cast, materialised=True)
    return as_xla_multiplies(contract, dtype)


def _cudnn_numerics(dtype: str, tiling: Tiling) -> Numerics:
    return on_matrix_units(default_numerics(dtype, tiling), dtype)


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

CUDNN = Subject(
    name="jax.nn.dot_product_attention.cudnn",
    distribution="jax",
    call=_call_cudnn,
    features=frozenset({"scale", "bias", "causal", "window", "gqa"}),
    dtypes=("bfloat16", "float16"),
    semantics=Semantics(
        causal="top_left",
        window="top_left",
        gradients=frozenset({"query", "key", "value", "bias"}),
        lse_gradient=False,
    ),
    numerics=_cudnn_numerics,
    backend="gpu",
    head_dims=(8, 128),
    limits=Limits(longest=1 << 20, length_multiple=2, head_dim_multiple=8, window_sides="left"),
)

SUBJECTS = (XLA,)
UNCONFIRMED = (CUDNN,)
