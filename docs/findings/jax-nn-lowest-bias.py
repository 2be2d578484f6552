# /// script
# requires-python = ">=3.12"
# dependencies = ["flax==0.12.12", "jax==0.11.2", "keras==3.15.1", "numpy==2.5.5"]
# ///
"""Show that a masked key outweighs visible ones whose bias is the lowest number of its dtype.

In `jax.nn.dot_product_attention`, and in Keras and Flax, which call it. Exit status 1: shown.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from flax import nnx


def main() -> int:
    query = key = np.zeros((1, 4, 1, 8), np.float32)
    value = np.arange(4, dtype=np.float32)[None, :, None, None].repeat(8, -1)
    bias = np.zeros((1, 1, 4, 4), np.float32)
    bias[:, :, :2] = np.finfo(np.float32).min  # of the first two rows, as a padding mask has it
    calls = {
        "jax.nn": jax.nn.dot_product_attention,
        "keras.ops": keras.ops.dot_product_attention,
        "flax.nnx": nnx.dot_product_attention,
    }
    shown = 0
    for name, attention in calls.items():
        out = np.asarray(attention(query, key, value, bias=bias, is_causal=True))[0, :, 0, 0]
        wrong = not np.allclose(out, [0.0, 0.5, 1.0, 1.5], atol=1e-6)  # means of the values up to the row
        shown += wrong
        print(f"{name}: got {out.tolist()}, expected [0.0, 0.5, 1.0, 1.5]")
    return int(shown > 0)


if __name__ == "__main__":
    sys.exit(main())
