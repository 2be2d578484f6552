# /// script
# requires-python = ">=3.12"
# dependencies = ["ejkernel==0.0.80.3", "jax==0.10.2", "numpy==2.5.5"]
# ///
"""Show three faults of ejKernel's flash attention in XLA; exit status 1: shown."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from ejkernel.kernels._xla.flash_attention import flash_attention

BFLOAT16_ROUNDING = 2.0**-9  # relative


def sinks(keys):
    """Take logits of 0, values of 1 and a sink of log(keys), which gets half of the weight."""
    query, key, value = jnp.zeros((1, 1, 1, 1)), jnp.zeros((1, keys, 1, 1)), jnp.ones((1, keys, 1, 1))
    sink = jnp.log(jnp.full((1,), float(keys)))
    out = float(flash_attention(query, key, value, softmax_aux=sink)[0, 0, 0, 0])
    print(f"{keys} keys, default blocks, a sink with half of the weight: {out:.4f}, expected 0.5")
    return abs(out - 0.5) > 1e-3


def rounded_logits():
    """Take logits of 257 and 256, of which bfloat16 has only the second."""
    query = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
    key = jnp.array([[256.0, 1.0], [256.0, 0.0]], jnp.bfloat16)[None, :, None]
    value = jnp.array([[1.0, 1.0], [0.0, 0.0]], jnp.bfloat16)[None, :, None]
    out = float(flash_attention(query, key, value, softmax_scale=1.0)[0, 0, 0, 0])
    expected = 1 / (1 + np.exp(-1.0))
    print(f"bfloat16, logits of 257 and 256: {out:.4f}, expected {expected:.4f}")
    return abs(out - expected) > 0.1


def sum_over_queries(queries):
    """Take gradients of one sign, so that nothing cancels in the sum."""
    rng = np.random.default_rng(0)
    shapes = [(1, queries, 1, 16), (1, queries, 1, 16), (1, 4, 1, 16), (1, 4, 1, 16)]
    query, d_out, key, value = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    d_out = jnp.abs(d_out)
    d_value = jax.vjp(lambda value: flash_attention(query, key, value), value)[1](d_out)[0]
    q, k, do = (np.asarray(x, np.float64)[0, :, 0] for x in (query, key, d_out))
    weights = np.exp(q @ k.T / 4)
    weights /= weights.sum(-1, keepdims=True)
    expected = weights.T @ do
    error = np.abs(np.asarray(d_value, np.float64)[0, :, 0] - expected).max() / expected.max()
    print(
        f"bfloat16, {queries} queries: dvalue differs by {error:.4f},",
        f"{error / BFLOAT16_ROUNDING:.1f} roundings",
    )
    return error > 2 * BFLOAT16_ROUNDING


if __name__ == "__main__":
    found = [sinks(n) for n in (128, 256, 1024)] + [rounded_logits()]
    sys.exit(int(any(found + [sum_over_queries(n) for n in (128, 1024, 8192)])))
