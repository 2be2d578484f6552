"""`jax.nn.dot_product_attention` on our kernels, with its signature."""

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attest.kernels.adapters.shared import (
    as_floats,
    as_pairs,
    check_word,
    counts,
    renamed,
    top_left,
)
from attest.kernels.attention import flash_attention_with_lse
from attest.kernels.call.options import check_flag, refuse
from attest.kernels.operations.functions import flash_attention

_NAMES = {
    "attention_mask": "mask",
    "softmax_scale": "scale",
    "causal": "is_causal",
    "sliding_window": "local_window_size",
}
_FASTEST = "Leave it out: the fastest kernel for the device runs."


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[False] = False,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Any:
    """Compute attention as `jax.nn.dot_product_attention` does: out [B, T, N, H] or [T, N, H].

    Args:
        query: [B, T, N, H] or [T, N, H] of float32, bfloat16 or float16.
        key: [B, S, K, H] or [S, K, H], the dtype of query; N is a multiple of K.
        value: [B, S, K, H] or [S, K, H], the dtype of query. Its last axis may have another length.
        bias: [B or 1, N or 1, T or 1, S or 1], float, added to the logits. The first axes may be left out.
        mask: the same shapes, bool; True may attend.
        scale: of the logits, 1 / sqrt(H) by default (S1).
        is_causal: whether query i sees only keys 0 to i. The first query has the position of the first
            key, whatever the lengths: `q_offset=0` (S23).
        query_seq_lengths: [B] integer, from 0 to T; out is 0 from there on (S9).
        key_value_seq_lengths: [B] integer, from 0 to S; keys are hidden from there on (S9).
        local_window_size: (left, right), or an int for both: query i sees keys i - left to i + right (S7).
        implementation: None for the fastest kernel on the device, or "xla".
        return_residual: whether to return the logsumexp, too: [B, T, N] or [T, N], in the dtype of query. No
            gradient goes through it, as in JAX. The call then runs with the blocks of the tables.

    It differs from JAX where JAX has no answer of its own: a query that sees no key has out 0 and logsumexp
    -inf (S10), in JAX the mean of all values. Hidden keys contribute nothing, even NaN (S4).

    Raises: ValueError naming the argument.
    """
    with renamed(_NAMES):
        of_query, of_key, of_value = (
            _four_axes(name, x) for name, x in (("query", query), ("key", key), ("value", value))
        )
        arguments: dict[str, Any] = {
            "query": of_query,
            "key": of_key,
            "value": of_value,
            "bias": as_pairs("bias", bias, 4),
            "attention_mask": _bool("mask", as_pairs("mask", mask, 4)),
            "softmax_scale": scale,
            "causal": is_causal,
            "sliding_window": local_window_size,
            "platform": check_word("implementation", implementation, (None, "xla"), _FASTEST),
            **_lengths(of_query, of_key, query_seq_lengths, key_value_seq_lengths),
        }
        if check_flag("is_causal", is_causal) or local_window_size is not None:
            # By default, the last query of a sequence has the position of its last key.
            arguments["q_offset"] = 0 if "cum_seqlens_k" in arguments else top_left(of_query, of_key)
        shape = jnp.shape(query)
        if not check_flag("return_residual", return_residual):
            return flash_attention(**arguments).reshape(*shape[:-1], of_value.shape[-1])
        out, lse = flash_attention_with_lse(**arguments)
    residual = jax.lax.stop_gradient(lse).swapaxes(1, 2).astype(of_query.dtype)
    return out.reshape(*shape[:-1], of_value.shape[-1]), residual.reshape(shape[:-1])


def _four_axes(name: str, x: ArrayLike) -> jax.Array:
    """Return an array [B, length, heads, head_dim]; B is 1 where it has three axes."""
    array = as_floats(name, x)
    if array.ndim not in (3, 4):
        expected = "4 axes [batch, length, heads, head_dim], or those without batch"
        refuse(
            name, f"shape {array.shape}", expected, "Merge batch dimensions into one, or map with jax.vmap."
        )
    return array[None] if array.ndim == 3 else array


def _bool(name: str, mask: Any) -> Any:
    if mask is not None and mask.dtype != np.bool_:
        advice = "Pass mask != 0; values to add to the logits are a bias."
        refuse(name, f"dtype {mask.dtype}", "bool", advice)
    return mask


def _lengths(query: jax.Array, key: jax.Array, of_query: Any, of_key: Any) -> dict[str, jax.Array]:
    """Return the cumulative lengths of a padded batch (S9); nothing where neither kind of length is given."""
    if of_query is None and of_key is None:
        return {}
    given = {"query_seq_lengths": (query, of_query), "key_value_seq_lengths": (key, of_key)}
    found = [_cumulative(name, *each) for name, each in given.items()]
    return {"cum_seqlens_q": found[0], "cum_seqlens_k": found[1]}


def _cumulative(name: str, array: jax.Array, lengths: Any) -> jax.Array:
    batch, longest = array.shape[:2]
    if lengths is None:
        return jnp.arange(batch + 1, dtype=jnp.int32) * longest
    # Traced lengths beyond the array mean all of it, as in JAX.
    ends = jnp.cumsum(counts(name, lengths, batch, longest, "batch entry"), dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
