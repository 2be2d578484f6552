# /// script
# requires-python = ">=3.12"
# dependencies = ["jax==0.11.2", "numpy==2.5.5"]
# ///
"""Show that JAX's TPU flash attention gives NaN if the first block of keys is hidden by its bias.

It runs interpreted on a CPU. Exit status 1: shown.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention, mha_reference


def main() -> int:
    query, key, value = (jax.random.normal(jax.random.key(i), (1, 1, 256, 64)) for i in range(3))
    shown = 0
    for name, hidden in (("first", slice(0, 128)), ("last", slice(128, 256))):
        bias = np.zeros((1, 1, 256, 256), np.float32)
        bias[..., hidden] = -np.inf
        with pltpu.force_tpu_interpret_mode(True):
            out = np.asarray(flash_attention(query, key, value, ab=bias))
        expected = np.asarray(mha_reference(query, key, value, bias, None))
        shown += not np.allclose(out, expected, atol=1e-4)
        print(
            f"biases of the {name} 128 keys are -inf: {np.isnan(out).sum()} of {out.size} elements are NaN,",
            end=" ",
        )
        print(f"{np.isnan(expected).sum()} in mha_reference")
    return int(shown > 0)


if __name__ == "__main__":
    sys.exit(main())
