"""What the XLA kernels promise beside the clauses: one rounding, weights, dtypes, and seeds from a key."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.kernels.xla import attention, flash_attention
from tests.kernels.kernel_cases import normal, qkv


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_rounds_once(dtype):
    """S16: the same numbers as float32 inputs that hold the same values, rounded at the end only."""
    arrays, bias = qkv(dtype=dtype), normal(1, 1, 1, 50, dtype=dtype)
    d_out = normal(2, 40, 4, 16, dtype=dtype)

    def run(arrays, bias, d_out):
        out, vjp = jax.vjp(lambda arrays, bias: flash_attention(*arrays, bias=bias), arrays, bias)
        return out, vjp(d_out)

    def widen(tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    low, wide = run(arrays, bias, d_out), run(widen(arrays), widen(bias), widen(d_out))
    np.testing.assert_array_equal(low[0], wide[0].astype(dtype))
    for a, b in zip(jax.tree.leaves(low[1]), jax.tree.leaves(wide[1]), strict=True):
        assert a.dtype == dtype
        # Delta uses the rounded output, so the two differ by a little more than the last rounding.
        np.testing.assert_allclose(widen(a), b, rtol=8 * float(jnp.finfo(dtype).eps), atol=1e-2)


def precisions(attend, length):
    """The precision of each product of both passes, in float32."""
    x = jax.ShapeDtypeStruct((1, length, 2, 16), "float32")
    both_passes = jax.grad(lambda *arrays: attend(*arrays).sum(), argnums=(0, 1, 2))
    program = str(jax.make_jaxpr(both_passes)(x, x, x))
    found = re.findall(r"precision=\(Precision\.(\w+), Precision\.(\w+)\)", program)
    assert len(found) == program.count("dot_general[") > 4
    return {name for pair in found for name in pair}


@pytest.mark.parametrize("length", [40, 3000])
def test_products_are_float32_on_every_backend_unless_another_precision_is_named(length):
    """S16: an accelerator's own default is TF32 or bfloat16 products."""
    assert precisions(flash_attention, length) == {"HIGHEST"}
    assert precisions(partial(flash_attention, precision="default"), length) == {"DEFAULT"}
    assert precisions(lambda *arrays: attention(*arrays)[0], length) == {"HIGHEST"}


def test_attention_returns_the_weights():
    """Weights sum to 1, hidden pairs are exactly 0, and they weigh the values into out."""
    query, key, value = qkv(q_heads=2)
    out, weights = attention(query, key, value, causal=True, init_bias=lambda: normal(1, 1, 40, 50))
    assert (np.asarray(weights)[..., np.arange(50)[None] > np.arange(40)[:, None] + 10] == 0).all()
    np.testing.assert_allclose(weights.sum(axis=-1), np.ones((2, 2, 40)), rtol=1e-6)
    np.testing.assert_allclose(jnp.einsum("bhqk,bkhd->bqhd", weights, value), out, atol=1e-6)


def test_attention_dtypes():
    arrays = qkv()
    out, weights = attention(*arrays, dtype="bfloat16", softmax_dtype="bfloat16")
    assert out.dtype == weights.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), attention(*arrays)[0], atol=0.05)


def test_attention_takes_its_seed_from_a_key():
    """dropout_rng stands for its 64 bits; deterministic switches dropout off; dropout_seed wins."""
    arrays, key = qkv(), jax.random.key(3)
    words = jax.random.bits(key, (2,), jnp.uint32)
    options = {"dropout_prob": 0.5, "deterministic": False}
    from_key = attention(*arrays, dropout_rng=key, **options)[1]
    np.testing.assert_array_equal(from_key, attention(*arrays, dropout_seed=words, **options)[1])
    np.testing.assert_array_equal(
        attention(*arrays, dropout_seed=5, dropout_rng=key, **options)[1],
        attention(*arrays, dropout_seed=5, **options)[1],
    )
    still = attention(*arrays, dropout_prob=0.5, dropout_rng=key)[1]
    np.testing.assert_array_equal(still, attention(*arrays)[1])
    assert (np.asarray(from_key) == 0).mean() > 0.3
