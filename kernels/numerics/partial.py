"""The merge of results on parts of the keys: of splits of one call, and of the steps of ring attention.

`merge_parts` takes what an implementation returns: normalised outputs and lse, of a call of its own for each
part with `Settings.unrounded`, so that they are float32 and nothing is rounded before the last sum.
`merge_sums` takes sums that a kernel did not normalise, with references in bits.

Gradients need no merge: with the lse of all keys in `RowTerms`, those of the query are the sum over parts,
and those of a key and its value belong to the part that has them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Partial(NamedTuple):
    """Sums over a part of the keys, all float32: of a row, exp2(bits - reference) * value and its norm.

    total: [P, B, H, S, Dv], a part after the other. norm: [P, B, H, S]. reference: [P, B, H, S], in bits,
    -inf where a row sees no key of the part.
    """

    total: jax.Array
    norm: jax.Array
    reference: jax.Array


def join_sinks(out: jax.Array, lse: jax.Array, softmax_aux: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return out and lse of all keys and the sinks, from those of the keys alone, all float32.

    out: [B, S, H, Dv], normalised. lse: [B, H, S]. softmax_aux: [1 or H, sinks], of any float dtype.
    """
    sinks = jax.nn.logsumexp(softmax_aux.astype(jnp.float32), axis=-1)[None, :, None]
    # Of the difference and not of the new lse, whose rounding would be an error of every weight.
    share = jnp.where(lse == -jnp.inf, jnp.float32(0), jax.nn.sigmoid(lse - sinks))
    by_row = share.swapaxes(1, 2)[..., None]
    return jnp.where(by_row == 0, jnp.float32(0), out * by_row), jnp.logaddexp(lse, sinks)


def merge_parts(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return out and lse of all keys, from those of disjoint sets of keys, all float32.

    outs: [P, B, Sq, H, Dv], normalised. lses: [P, B, H, Sq], -inf where a row sees no key of the part. Sinks
    belong to the lse of one part alone. A row that sees no key of any part has out 0 and lse -inf.
    """
    _, known = _largest(lses)
    # Relative to the largest lse and not to their sum's, whose rounding would be an error of every weight.
    # Natural exponents, unlike in `merge_sums`: to convert them to bits would round them.
    weights = jnp.exp(lses - known)
    norm = weights.sum(axis=0, keepdims=True)
    shares = (weights / jnp.where(norm == 0, jnp.float32(1), norm)).swapaxes(2, 3)[..., None]
    # What is stored where a part has no weight counts for nothing, NaN included.
    out = jnp.where(shares == 0, jnp.float32(0), outs * shares).sum(axis=0)
    return out, (known + jnp.log(norm))[0]


def merge_sums(parts: Partial) -> Partial:
    """Return the sums over all parts as one part: relative to the largest reference."""
    largest, known = _largest(parts.reference)
    weight = jnp.exp2(parts.reference - known)
    total = (parts.total * weight[..., None]).sum(axis=0, keepdims=True)
    return Partial(total, (parts.norm * weight).sum(axis=0, keepdims=True), largest)


def _largest(references: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest over the parts, and the same with 0 for rows that see nothing in any part."""
    largest = references.max(axis=0, keepdims=True)
    return largest, jnp.where(largest == -jnp.inf, jnp.float32(0), largest)
