"""Arrays of all pairs of a call at once: ALiBi and the keep mask of dropout."""

import jax
import jax.numpy as jnp

from attest.kernels.call.alibi import alibi_term
from attest.kernels.call.call import Call
from attest.kernels.numerics.philox import dropout_words, keep_mask
from attest.kernels.visibility.intervals import Rows


def whole_alibi(call: Call, rows: Rows) -> jax.Array | None:
    """Return what ALiBi adds to the logits of the whole call, [B or 1, Hq, Sq, Sk] float32 (S25)."""
    if call.alibi_slopes is None or rows.position is None:
        return None
    keys = call.positions.kv
    if keys is None:
        keys = jnp.arange(call.key.shape[1], dtype=jnp.int32)[None]
    slopes = call.alibi_slopes[:, :, None, None]
    return alibi_term(slopes, rows.position[:, None, :, None], keys[:, None, None, :])


def whole_keep_mask(call: Call, seed: jax.Array) -> jax.Array:
    """Return the keep mask of the whole call, [B, Hq, Sq, Sk] (S12, S29)."""
    batch, q_length, q_heads, _ = call.query.shape
    k_length = call.key.shape[1]
    heads, rows = jnp.arange(q_heads, dtype=jnp.int32), jnp.arange(q_length, dtype=jnp.int32)
    shared = call.dropout_shared
    words = dropout_words(seed, call.positions.origin, shared)

    def of_entry(entry: jax.Array) -> jax.Array:
        return keep_mask(words, call.dropout_prob, entry, heads, rows, 0, k_length, shared)

    keep = jax.vmap(of_entry)(jnp.arange(1 if "b" in shared else batch, dtype=jnp.int32))
    return jnp.broadcast_to(keep, (batch, *keep.shape[1:]))
