"""Parts of one attention: the results of a call on some of the keys each, merged to those of a call on all.

A part is what `Passes.forward` returns with `Settings.unrounded`: float32, so that no part is rounded to the
dtype of query before the merge. Gradients of parts are summed; each part is given the lse of the whole.
"""

import jax
import jax.numpy as jnp


def merge_parts(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return out and lse over the keys of all parts, which have no key in common.

    outs: [P, B, Sq, H, Dv] float32, normalised. lses: [P, B, H, Sq] float32, -inf for a row that sees no key
    of a part, whose out counts for nothing. A row that sees no key of any part has out 0 and lse -inf.
    """
    lse = jax.nn.logsumexp(lses, axis=0)
    finite = jnp.where(lse == -jnp.inf, jnp.float32(0), lse)
    share = jnp.where(lses == -jnp.inf, jnp.float32(0), jnp.exp(lses - finite[None]))
    by_row = jnp.moveaxis(share, 2, 3)[..., None]
    parts = jnp.where(by_row == 0, jnp.float32(0), outs * by_row)
    return parts.sum(axis=0), lse
