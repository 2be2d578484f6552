# /// script
# requires-python = ">=3.12"
# dependencies = ["ejkernel==0.0.80.3", "jax==0.10.2", "numpy==2.5.5"]
# ///
"""Show three faults of ejKernel's ring attention in XLA; exit status 1: shown."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from ejkernel.kernels._xla.ring_attention import ring_attention


def exact(query, key, value, causal):
    """Return attention in float64, for one head."""
    q, k, v = (np.asarray(x, np.float64)[0, :, 0] for x in (query, key, value))
    logits = q @ k.T * q.shape[-1] ** -0.5
    if causal:
        logits = np.where(np.tril(np.ones(logits.shape, bool)), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ v


def causal_order_under_differentiation():
    query, key, value = (jax.random.normal(jax.random.key(i), (1, 4, 1, 2)) for i in range(3))

    def attend(*arrays):
        return ring_attention(*arrays, causal=True)

    plain = np.asarray(attend(query, key, value))[0, :, 0]
    out, pull = jax.vjp(attend, query, key, value)
    out = np.asarray(out)[0, :, 0]
    # The first query sees the first key alone, so the others get no gradient from it.
    d_value = np.asarray(pull(jnp.zeros_like(query).at[:, 0].set(1.0))[2])[0, :, 0, 0]
    right, all_keys = exact(query, key, value, True), exact(query, key, value, False)
    print("query 0, a plain call:", plain[0], "exact causal order:", right[0])
    print("query 0, in jax.vjp:  ", out[0], "exact, all keys:   ", all_keys[0])
    print("dvalue of query 0:", d_value, "expected [1. 0. 0. 0.]")
    return np.allclose(plain, right, atol=1e-5) and np.allclose(out, all_keys, atol=1e-5)


def normalisation(logit):
    query, key = jnp.full((1, 1, 1, 1), logit), jnp.ones((1, 3, 1, 1))
    value = jnp.array([1.0, 2.0, 4.0]).reshape(1, 3, 1, 1)
    out = float(ring_attention(query, key, value, softmax_scale=1.0)[0, 0, 0, 0])
    print(f"three logits of {logit:g}, values 1, 2 and 4: {out:.6f}, expected {7 / 3:.6f}")
    return abs(out - 7 / 3) > 1e-5


def scale_of_zero():
    array = jnp.ones((1, 2, 1, 2))
    try:
        ring_attention(array, array, array, softmax_scale=0.0)
    except ZeroDivisionError as error:
        print("softmax_scale=0.0:", error)
        return True
    return False


if __name__ == "__main__":
    causal = causal_order_under_differentiation()
    unnormalised = [normalisation(logit) for logit in (10.0, 1e3, 1e5, 1e6)]
    sys.exit(int(any([causal, *unnormalised, scale_of_zero()])))
