# /// script
# requires-python = ">=3.12"
# dependencies = ["jax==0.11.2", "numpy==2.5.5"]
# ///
"""Show two faults of `jax.experimental.pallas.ops.gpu.attention.mha`, interpreted; exit status 1: shown."""

import os
import sys
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"
warnings.simplefilter("ignore", DeprecationWarning)

import jax
import numpy as np
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha, mha_reference


def causal_with_more_queries() -> bool:
    query, key, value = (jax.random.normal(jax.random.key(i), (1, 384, 1, 16)) for i in range(3))
    key, value = key[:, :128], value[:, :128]
    out = np.asarray(mha(query, key, value, None, causal=True, interpret=True))
    expected = np.asarray(mha_reference(query, key, value, None, causal=True))
    wrong = ~np.isclose(out, expected, atol=1e-4).all((0, 2, 3))
    rows = np.flatnonzero(wrong)
    print(f"causal, 384 queries x 128 keys: {rows.size} rows are wrong, from {rows[0]} on")
    return rows.size > 0


def delta_in_16_bits() -> bool:
    """Take values that are far from 0: then dP and D are large and nearly equal."""
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((1, 128, 1, 16)).astype(np.float16) for _ in range(2))
    value = (rng.standard_normal((1, 128, 1, 16)) + 30).astype(np.float16)
    d_out = rng.standard_normal((1, 128, 1, 16)).astype(np.float16)
    sizes = BlockSizes.get_default()

    def attend(*arrays):
        return mha(*arrays, None, block_sizes=sizes, interpret=True)

    d_query = jax.vjp(attend, query, key, value)[1](d_out)[0]
    q, k, v, do = (x[0, :, 0].astype(np.float64) for x in (query, key, value, d_out))
    weights = np.exp(q @ k.T)
    weights /= weights.sum(-1, keepdims=True)
    out = np.asarray(attend(query, key, value))[0, :, 0].astype(np.float64)  # as it is returned, rounded
    d_weights = do @ v.T

    def expected(delta):
        return (weights * (d_weights - delta[:, None])) @ k

    exact = expected((weights * d_weights).sum(-1))
    rounded_out = expected((do * out).sum(-1))
    got = np.asarray(d_query)[0, :, 0].astype(np.float64)
    error, usual = (float(np.sqrt(np.mean((x - exact) ** 2))) for x in (got, rounded_out))
    print(f"float16: the error of dquery is {error:.3g} (rms), with a D of float64 {usual:.3g}")
    return error > 1.5 * usual


if __name__ == "__main__":
    sys.exit(int(any([causal_with_more_queries(), delta_in_16_bits()])))
