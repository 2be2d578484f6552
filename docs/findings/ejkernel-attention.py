# /// script
# requires-python = ">=3.12"
# dependencies = ["ejkernel==0.0.80.3", "jax==0.10.2", "numpy==2.5.5"]
# ///
"""Show two faults of ejKernel's `attention` in XLA; exit status 1: shown."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from ejkernel.kernels._xla.attention import attention

BATCH, QUERIES, KEYS, HEADS, CAP = 2, 583, 3, 2, 5.0


def exact(query, key, value, bias, sink):
    """Return the gradients of query, key, value, bias and sink in float64, for an output gradient of 1."""
    q, k, v, b = (np.asarray(x, np.float64) for x in (query, key, value, bias))
    tanh = np.tanh(np.einsum("bqhd,bkhd->bhqk", q, k) / CAP)
    logits = np.concatenate([CAP * tanh + b, np.full((BATCH, HEADS, QUERIES, 1), float(sink[0]))], -1)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    d_weights = np.concatenate(
        [np.broadcast_to(v[..., 0].transpose(0, 2, 1)[:, :, None], tanh.shape), 0 * logits[..., :1]], -1
    )
    d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    d_products = d_logits[..., :-1] * (1 - tanh**2)
    return (
        np.einsum("bhqk,bkhd->bqhd", d_products, k),
        np.einsum("bhqk,bqhd->bkhd", d_products, q),
        weights[..., :-1].sum(2).transpose(0, 2, 1)[..., None],
        d_logits[..., :-1].sum(0, keepdims=True),
        d_logits[..., -1:].sum((0, 1, 2)),
    )


def gradients_that_are_nan():
    rng = np.random.default_rng(0)
    shapes = (BATCH, QUERIES, HEADS, 1), (BATCH, KEYS, HEADS, 1), (BATCH, KEYS, HEADS, 1)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    arrays += [30 * jnp.asarray(rng.standard_normal((1, HEADS, QUERIES, KEYS)), jnp.float32), jnp.zeros(1)]

    def attend(query, key, value, bias, sinks):
        bias = jnp.broadcast_to(bias, (BATCH, *bias.shape[1:]))
        return attention(
            query,
            key,
            value,
            bias=bias,
            softmax_aux=sinks,
            softmax_scale=1.0,
            logits_soft_cap=CAP,
            dtype=jnp.float32,
        )[0]

    expected = exact(*arrays)
    found = {}
    for name, call in (("eager", attend), ("jit", jax.jit(attend))):
        out, pull = jax.vjp(call, *arrays)
        got = [np.asarray(x, np.float64) for x in pull(jnp.ones_like(out))]
        right = [np.allclose(x, y, rtol=1e-3, atol=1e-4) for x, y in zip(got, expected, strict=True)]
        nan = {
            n: int(np.isnan(x).sum())
            for n, x in zip(("query", "key", "value", "bias", "sinks"), got, strict=True)
        }
        print(f"{name}: gradients are right: {all(right)}; NaN in them: {nan}")
        found[name] = all(right), any(nan.values())
    return found == {"eager": (True, False), "jit": (False, True)}


def one_dropout_mask():
    """Draw 2 x 2 masks of 16 x 16 weights, which agree by chance once in 2 ** 768."""
    array = jnp.zeros((2, 16, 2, 1))
    options = {"deterministic": False, "dropout_rng": jax.random.PRNGKey(0), "dropout_prob": 0.5}
    _, weights = attention(array, array, array, dtype=jnp.float32, **options)
    same = bool((weights == weights[:1, :1]).all())
    print("dropout: one mask for all batch entries and heads:", same)
    return same and bool((weights == 0).any()) and bool((weights > 0).any())


if __name__ == "__main__":
    sys.exit(int(any([gradients_that_are_nan(), one_dropout_mask()])))
