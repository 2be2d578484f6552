# /// script
# requires-python = ">=3.12"
# dependencies = ["jax==0.11.2"]
# ///
"""Show that splash attention returns the gradient of float32 sinks in bfloat16; exit status 1: shown."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention


def main() -> int:
    mask = splash_attention.MultiHeadMask([splash_attention.FullMask((128, 128))])
    attend = splash_attention.make_splash_mha_single_device(mask, interpret=True)
    query, key, value = (jax.random.normal(jax.random.key(i), (1, 128, 32), jnp.bfloat16) for i in range(3))

    def loss(sinks):
        return attend(query, key, value, None, sinks).astype(jnp.float32).sum()

    gradient = jax.grad(loss)(jnp.zeros(1, jnp.float32))
    print("float32 sinks, bfloat16 inputs: the gradient has dtype", gradient.dtype)
    try:
        jax.grad(lambda sinks: loss(sinks / 3))(jnp.ones(1, jnp.float32))
    except TypeError as error:
        print("differentiated further:", error)
    return int(gradient.dtype != jnp.float32)


if __name__ == "__main__":
    sys.exit(main())
