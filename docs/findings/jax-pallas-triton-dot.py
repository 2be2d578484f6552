# /// script
# requires-python = ">=3.12"
# dependencies = ["jax[cuda13]==0.11.2", "numpy==2.5.5"]
# ///
"""Show that Pallas on GPUs multiplies products of short inner dimensions; exit status 1: shown.

It needs an NVIDIA GPU. What is expected is computed here, in float64.
"""

import sys
import warnings

warnings.simplefilter("ignore", DeprecationWarning)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha


def product_of_ones(dtype, inner):
    """Return an element of the product of two matrices of ones, which is the inner dimension."""

    def kernel(a_ref, b_ref, out_ref):
        out_ref[...] = plgpu.dot(a_ref[...], b_ref[...]).astype(jnp.float32)

    shape = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    multiply = pl.pallas_call(kernel, out_shape=shape, compiler_params=plgpu.CompilerParams())
    return float(multiply(jnp.ones((32, inner), dtype), jnp.ones((inner, 32), dtype))[0, 0])


def products():
    shown = False
    for dtype in ("float16", "bfloat16", "float32"):
        for inner in (1, 2, 4, 8, 16):
            got = product_of_ones(dtype, inner)
            print(f"dot, {dtype}, inner dimension {inner}: got {got:g}, expected {inner}")
            shown |= got != inner
    return shown


def attention(query, key, value, factor=1.0):
    q, k, v = (np.asarray(x, np.float64)[0, :, 0] for x in (query, key, value))
    weights = np.exp(factor * q @ k.T * q.shape[-1] ** -0.5)
    return weights / weights.sum(-1, keepdims=True) @ v


def in_mha():
    """Compare mha with attention in float64, and with one whose logits are too large by a factor."""
    shown = False
    for dtype, head_dim, keys in (
        ("float16", 7, 128),
        ("float16", 8, 128),
        ("float16", 16, 128),
        ("float32", 4, 128),
        ("float32", 8, 128),
        ("float16", 64, 8),
        ("float16", 64, 16),
    ):
        rng = np.random.default_rng(0)
        shapes = [(1, count, 1, head_dim) for count in (128, keys, keys)]
        inputs = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
        sizes = BlockSizes(block_q=128, block_k=keys)
        out = mha(*map(jnp.asarray, inputs), None, sm_scale=head_dim**-0.5, block_sizes=sizes)
        got = np.asarray(out, np.float64)[0, :, 0]
        error, doubled = (np.abs(got - attention(*inputs, factor)).max() for factor in (1, 2))
        print(
            f"mha, {dtype}, head dim {head_dim}, {keys} keys: largest error {error:.2g};",
            f"if all logits were doubled, {doubled:.2g}",
        )
        shown |= error > 0.01
    return shown


if __name__ == "__main__":
    if jax.default_backend() != "gpu":
        print("needs an NVIDIA GPU")
        sys.exit(2)
    sys.exit(int(any([products(), in_mha()])))
