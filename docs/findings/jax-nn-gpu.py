# /// script
# requires-python = ">=3.12"
# dependencies = ["jax[cuda13]==0.11.2", "numpy==2.5.5"]
# ///
"""Show faults of `jax.nn.dot_product_attention` in XLA on a GPU; exit status 1: shown.

It needs an NVIDIA GPU. What is expected is computed here, in float64.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np


def arrays(seed, dtype, *shapes, spread=1.0):
    rng = np.random.default_rng(seed)
    return [(spread * rng.standard_normal(shape)).astype(jnp.dtype(dtype)) for shape in shapes]


def logits(query, key, precision):
    return jnp.einsum("btnh,bsnh->bnts", query, key, precision=precision, preferred_element_type=jnp.float32)


def products_are_rounded():
    """Subtract two products that differ in the last bits of float32, for one query and for two."""
    query = jnp.array([1 + 2**-7, 1], jnp.bfloat16)[None, None, None]
    key = jnp.array([1 + 2**-7, -1 - 2**-6], jnp.bfloat16)[None, None, None].repeat(2, 1)
    expected = 2.0**-14
    compute = jax.jit(logits, static_argnums=2)
    one, two = (float(compute(query.repeat(count, 1), key, "BF16_BF16_F32")[0, 0, 0, 0]) for count in (1, 2))
    print(f"bfloat16, BF16_BF16_F32: got {one:.3g} for one query, {two:.3g} for two, expected {expected:.3g}")
    return one != expected and two == expected


def attention(query, key, value, d_out):
    """Return out, dquery, dkey and dvalue in float64."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (query, key, value, d_out))
    scale = q.shape[-1] ** -0.5
    weights = scale * np.einsum("btnh,bsnh->bnts", q, k)
    weights = np.exp(weights - weights.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = np.einsum("btnh,bsnh->bnts", do, v)
    d_logits = scale * weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    return (
        np.einsum("bnts,bsnh->btnh", weights, v),
        np.einsum("bnts,bsnh->btnh", d_logits, k),
        np.einsum("bnts,btnh->bsnh", d_logits, q),
        np.einsum("bnts,btnh->bsnh", weights, do),
    )


@jax.jit
def gradients(query, key, value, d_out):
    out, pull = jax.vjp(jax.nn.dot_product_attention, query, key, value)
    return out, *pull(d_out)


def errors(queries):
    """Return the relative errors (rms) of out and its gradients in bfloat16."""
    rows, keys = (5, queries, 3, 160), (5, 299, 3, 160)
    inputs = arrays(0, "bfloat16", rows, keys, keys, rows, spread=8.0)
    pairs = zip(gradients(*inputs), attention(*inputs), strict=True)
    return [
        float(np.sqrt(np.mean((np.asarray(got, np.float64) - right) ** 2) / np.mean(right**2)))
        for got, right in pairs
    ]


def attention_is_imprecise():
    one, two = errors(1), errors(2)
    print("bfloat16, 299 keys, head dim 160, relative errors of out, dquery, dkey and dvalue:")
    for name, row in (("one query", one), ("two queries", two)):
        print(f"  {name}: {', '.join(f'{error:.2g}' for error in row)}")
    return all(a > 3 * b for a, b in zip(one, two, strict=True))


def float16_raises():
    """Decode one token in float16, with and without `jit`."""
    shown = False
    for queries, keys, heads in ((1, 128, 8), (1, 128, 2), (128, 1, 8), (2, 128, 8)):
        shapes = (1, queries, 8, 64), (1, keys, heads, 64)
        query, key = map(jnp.asarray, arrays(0, "float16", *shapes))
        for name, call in (
            ("jit", jax.jit(jax.nn.dot_product_attention)),
            ("no jit", jax.nn.dot_product_attention),
        ):
            try:
                jax.block_until_ready(call(query, key, key))
                got = "computed"
            except Exception as error:  # the fault: any other kind is of interest, too
                got = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                shown = True
            print(f"float16, {queries} x {keys} tokens, 8 heads over {heads}, {name}: {got}")
    return shown


def heads_share_a_bias():
    """Let two heads share a bias, each with half the smallest float16 as its part of the gradient."""
    smallest = 2.0**-24
    query, key = jnp.zeros((1, 2, 2, 8), jnp.float16), jnp.zeros((1, 2, 1, 8), jnp.float16)
    value = jnp.zeros((1, 2, 1, 8), jnp.float16).at[0, :, 0, 0].set(jnp.array([1, -1]))
    d_out = jnp.zeros(query.shape, jnp.float16).at[0, :, :, 0].set(smallest)

    @jax.jit
    def gradient(bias):
        call = jax.vjp(lambda given: jax.nn.dot_product_attention(query, key, value, given), bias)
        return call[1](d_out)[0]

    got = float(gradient(jnp.zeros((1, 1, 2, 2), jnp.float16))[0, 0, 0, 0])
    print(f"float16, dbias of two heads that share a bias: got {got:.3g}, expected {smallest:.3g}")
    return got != smallest


if __name__ == "__main__":
    if jax.default_backend() != "gpu":
        print("needs an NVIDIA GPU")
        sys.exit(2)
    shown = [products_are_rounded(), attention_is_imprecise(), float16_raises(), heads_share_a_bias()]
    sys.exit(int(any(shown)))
