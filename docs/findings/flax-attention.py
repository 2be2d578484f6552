# /// script
# requires-python = ">=3.12"
# dependencies = ["flax==0.12.12", "jax==0.11.2", "numpy==2.5.5"]
# ///
"""Show three faults of Flax's `dot_product_attention`, in nnx and linen; exit status 1: shown."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx


def width_of_values() -> bool:
    array = jnp.ones((1, 4, 2, 8))
    try:
        nnx.dot_product_attention(array, array, jnp.ones((1, 4, 2, 16)))
    except ValueError as error:
        print("nnx, values of another width:", error)
        return True
    return False


def dtype_of_result() -> bool:
    array = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
    out = linen.dot_product_attention(array, array, array, force_fp32_for_softmax=True)
    print("linen, bfloat16 with force_fp32_for_softmax: the result is", out.dtype)
    return out.dtype != jnp.bfloat16


def gradient_in_float16() -> bool:
    rng = np.random.default_rng(0)
    keys, width = 1024, 2
    query = rng.standard_normal((1, 128, 1, width)).astype(np.float16)
    key, value = (rng.standard_normal((1, keys, 1, width)).astype(np.float16) for _ in range(2))
    d_out = rng.standard_normal(query.shape).astype(np.float16)
    q, k, v, do = (x[0, :, 0].astype(np.float64) for x in (query, key, value, d_out))
    weights = np.exp(q @ k.T / width**0.5)
    weights /= weights.sum(-1, keepdims=True)
    d_weights = do @ v.T
    d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    exact = d_logits @ k / width**0.5
    errors = []
    for float32_softmax in (False, True):

        def attend(*arrays, float32_softmax=float32_softmax):
            out = linen.dot_product_attention(*arrays, force_fp32_for_softmax=float32_softmax)
            return out.astype(jnp.float16)

        d_query = jax.vjp(attend, query, key, value)[1](d_out)[0]
        error = np.abs(np.asarray(d_query)[0, :, 0].astype(np.float64) - exact).max()
        errors.append(float(error / np.abs(exact).max()))
    print(f"linen, float16, 1024 keys: dquery is off by {errors[0]:.2%} of its largest element;", end=" ")
    print(f"with force_fp32_for_softmax by {errors[1]:.2%}")
    return errors[0] > 10 * errors[1]


if __name__ == "__main__":
    sys.exit(int(any([width_of_values(), dtype_of_result(), gradient_in_float16()])))
