# /// script
# requires-python = ">=3.12"
# dependencies = ["jax==0.11.2", "tokamax==0.0.17"]
# ///
"""Show two limits of tokamax's attention in XLA on a CPU; exit status 1: shown."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax.numpy as jnp
import tokamax


def float16(implementation: str) -> bool:
    array = jnp.ones((1, 4, 1, 8), jnp.float16)
    try:
        tokamax.dot_product_attention(array, array, array, implementation=implementation)
    except ValueError as error:
        print(f"{implementation}, float16:", error)
        return True
    return False


def hidden_by_bias(implementation: str) -> bool:
    """Hide the second of two keys by a bias of -inf, with a cap of 2."""
    query = key = jnp.zeros((1, 2, 1, 8))
    value = jnp.array([0.0, 1.0])[None, :, None, None].repeat(8, -1)
    bias = jnp.array([0.0, -jnp.inf])[None, None, None].repeat(2, -2)
    out = tokamax.dot_product_attention(
        query, key, value, bias=bias, logits_soft_cap=2.0, implementation=implementation
    )
    print(f"{implementation}, a bias of -inf under a soft cap of 2: the key has weight {out[0, 0, 0, 0]:.3f}")
    return float(out[0, 0, 0, 0]) > 0


if __name__ == "__main__":
    checks = [check(name) for check in (float16, hidden_by_bias) for name in ("xla", "xla_chunked")]
    sys.exit(int(any(checks)))
