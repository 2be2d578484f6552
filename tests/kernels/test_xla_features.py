"""Both XLA kernels against attention written pair by pair: out, lse and every gradient, by clause."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import normal, plain_attention, qkv, split_options

from kernels.xla import ChunkSizes, attention, flash_attention, flash_attention_with_lse

HIDDEN_BIAS = jnp.where(normal(2, 1, 1, 13, seed=3) < -0.8, -jnp.inf, normal(2, 1, 1, 13, seed=4))
MASK = normal(1, 4, 9, 13, seed=5) > 0
SEGMENTS = {
    "q_segment_ids": np.array([[0, 0, 0, 1, 1, 1, -1, -1, 5]] * 2, np.int32),
    "kv_segment_ids": np.array([[0] * 5 + [1] * 4 + [-1] * 4] * 2, np.int32),
}
PACKED = {
    "cum_seqlens_q": np.array([0, 3, 3, 6, 8], np.int32),
    "cum_seqlens_k": np.array([0, 2, 4, 11, 11], np.int32),
}
PADDED = {
    "cum_seqlens_q": np.array([0, 4, 4, 13], np.int32),
    "cum_seqlens_k": np.array([0, 13, 18, 25], np.int32),
}

# name: (shape arguments, options)
FEATURES = {
    "scale, causal, more keys": ({}, {"softmax_scale": 0.7, "causal": True}),
    "causal, fewer keys": (
        {"q_length": 13, "k_length": 6},
        {"causal": True, "softmax_aux": normal(2)},
    ),
    "window pair, cap": ({"q_length": 11, "k_length": 8}, {"sliding_window": (2, 3), "logits_soft_cap": 1.5}),
    "bias over rows, window to the left": ({}, {"bias": normal(1, 4, 1, 13), "sliding_window": (3, None)}),
    "bias, mask, sinks": (
        {},
        {"bias": normal(2, 4, 9, 13), "attention_mask": MASK, "softmax_aux": normal(3)},
    ),
    "bias hides, cap, segments, sinks": (
        {},
        {**SEGMENTS, "bias": HIDDEN_BIAS, "logits_soft_cap": 2.0, "softmax_aux": normal(4, 2)},
    ),
    "padded lengths, causal": ({"batch": 3}, {**PADDED, "causal": True}),
    "packed lengths, window, sinks": (
        {"batch": 1},
        {**PACKED, "sliding_window": (2, 0), "softmax_aux": normal(4, 1)},
    ),
    "dropout, bias": ({}, {"dropout_prob": 0.3, "dropout_seed": 2**40 + 7, "bias": normal(1, 1, 9, 13)}),
}


@functools.cache
def problem(name):
    """(arrays, floats, rest), cotangents, and what to expect: primal, gradients, gradients without d_lse."""
    shapes, options = FEATURES[name]
    arrays = qkv(**shapes)
    floats, rest = split_options(options)

    def call(arrays, floats):
        out, lse, _ = plain_attention(*arrays, options, floats)
        return out, lse

    @jax.jit
    def run(arrays, floats):
        # The lse of an empty row has no gradient, and plain autodiff would make 0 * inf of it.
        def finite(arrays, floats):
            out, lse = call(arrays, floats)
            return out, jnp.where(lse == -jnp.inf, 0.0, lse)

        primal, vjp = jax.vjp(finite, arrays, floats)
        d_out, d_lse = cotangents(*primal)
        return call(arrays, floats), vjp((d_out, d_lse)), vjp((d_out, jnp.zeros_like(d_lse)))

    primal, gradients, out_gradients = run(arrays, floats)
    return (arrays, floats, rest), cotangents(*primal), (primal, gradients, out_gradients)


def cotangents(out, lse):
    return normal(*out.shape, seed=8), normal(*lse.shape, seed=9)


def assert_close(got, want):
    want = dict(jax.tree_util.tree_leaves_with_path(want))
    for path, a in jax.tree_util.tree_leaves_with_path(got):
        np.testing.assert_allclose(a, want[path], rtol=2e-5, atol=2e-5, err_msg=str(path))


@pytest.mark.parametrize("name", FEATURES)
def test_flash_attention_equals_the_clauses(name):
    """S1 to S15: out, lse, and gradients for cotangents of both, with chunks that divide nothing."""
    (arrays, floats, rest), cotangent, (primal, gradients, _) = problem(name)

    @jax.jit
    def run(arrays, floats, cotangent):
        def call(arrays, floats):
            sizes = {"fwd_params": ChunkSizes(4, 5), "bwd_params": ChunkSizes(5, 3)}
            return flash_attention_with_lse(*arrays, **rest, **floats, **sizes)

        primal, vjp = jax.vjp(call, arrays, floats)
        return primal, vjp(cotangent)

    assert_close(run(arrays, floats, cotangent), (primal, gradients))


@pytest.mark.parametrize("name", FEATURES)
def test_attention_equals_the_clauses(name):
    (arrays, floats, rest), (d_out, _), (primal, _, gradients) = problem(name)

    @jax.jit
    def run(arrays, floats, d_out):
        def call(arrays, floats):
            return attention(*arrays, **rest, **floats, deterministic=False)

        (out, weights), vjp = jax.vjp(call, arrays, floats)
        return out, vjp((d_out, jnp.zeros_like(weights)))

    assert_close(run(arrays, floats, d_out), (primal[0], gradients))


def test_unnormalised_output_is_the_numerator():
    """out * exp(lse - m), and m is a constant in differentiation."""
    arrays, sinks = qkv(), normal(4, 2)
    d_out, d_lse = normal(2, 9, 4, 6, seed=8), normal(2, 4, 9, seed=9)

    def flash(arrays, sinks):
        return flash_attention_with_lse(*arrays, causal=True, softmax_aux=sinks, normalize_output=False)

    @jax.jit
    def plain(arrays, sinks):
        options = {"causal": True, "softmax_aux": sinks}
        out, lse, m = plain_attention(*arrays, options, {"softmax_aux": sinks})
        return out * jnp.exp(lse - m).transpose(0, 2, 1)[..., None], lse

    got, got_vjp = jax.vjp(flash, arrays, sinks)
    want, want_vjp = jax.vjp(plain, arrays, sinks)
    assert_close(got, want)
    assert_close(got_vjp((d_out, d_lse)), want_vjp((d_out, d_lse)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_rounds_once(dtype):
    """S16: the same numbers as float32 inputs that hold the same values, rounded at the end only."""
    arrays, bias = qkv(dtype=dtype), normal(1, 1, 1, 13, dtype=dtype)
    d_out = normal(2, 9, 4, 6, dtype=dtype)

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


def test_logits_dtype_rounds_the_products():
    query, key, value = qkv(q_heads=1, k_heads=1, value_dim=1)
    coarse = flash_attention_with_lse(query, key, value, logits_dtype="bfloat16")[1]
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") * 8**-0.5
    rounded = jax.nn.logsumexp(logits.astype(jnp.bfloat16).astype(jnp.float32), axis=-1)
    np.testing.assert_allclose(coarse, rounded, rtol=1e-6)
    assert not np.allclose(coarse, jax.nn.logsumexp(logits, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("sizes", [(3, 4), (100, 7)])
def test_chunks_change_nothing_but_rounding(sizes):
    """S18, sinks and dropout included: what is counted once or dropped does not follow the chunks."""
    arrays, sinks = qkv(), normal(4, 2)

    def run(chunks):
        def call(arrays, sinks):
            options = {"causal": True, "softmax_aux": sinks, "dropout_prob": 0.4, "dropout_seed": 11}
            return flash_attention_with_lse(*arrays, **options, fwd_params=chunks, bwd_params=chunks)

        primal, vjp = jax.vjp(call, arrays, sinks)
        return primal, vjp(cotangents(*primal))

    assert_close(run(ChunkSizes(*sizes)), run(None))


def test_attention_returns_the_weights():
    """Weights sum to 1, hidden pairs are exactly 0, and they weigh the values into out."""
    query, key, value = qkv(q_heads=2)
    out, weights = attention(query, key, value, causal=True, init_bias=lambda: normal(1, 1, 9, 13))
    assert (np.asarray(weights)[..., np.arange(13)[None] > np.arange(9)[:, None] + 4] == 0).all()
    np.testing.assert_allclose(weights.sum(axis=-1), np.ones((2, 2, 9)), rtol=1e-6)
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
