"""Finite logits of any size give the right weights: 1 to the largest of a row, if far from the next."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attest.kernels.numerics.exponents import HUGE
from tests.kernels.implementations import MATERIALISED, TRITON, WHOLE, XLA
from tests.kernels.interpreted import needs_interpreter
from tests.kernels.kernel_cases import normal, qkv

# As nox compiles the other tests, no multiplication is fused with a subtraction.
OPTIMIZED = {"xla_backend_optimization_level": 3}
SHAPES = {"batch": 1, "q_length": 40, "k_length": 70, "q_heads": 2, "k_heads": 2, "head_dim": 24}
SCALE = 0.37  # no power of two: its products are rounded
D_OUT, D_LSE = normal(1, 40, 2, 16, seed=8), jnp.zeros((1, 2, 40))
# Logits closer than this, relative to the largest, are within the rounding of a dot product and of an lse.
RESOLVED = 2.0**-17
LAST_BITS = 2.0**-20
# Closer than this in nats, the next key has a weight.
ALONE = 40.0

OPTIONS = {
    "": {},
    "negative": {"softmax_scale": -SCALE},
    "large scale": {"softmax_scale": 1.7e5},
    "tiny scale": {"softmax_scale": 3e-7},
    "cap": {"logits_soft_cap": 1.1e30},
    "mask": {"attention_mask": np.arange(2800).reshape(1, 1, 40, 70) % 5 > 0},
    "bias": {"bias": normal(1, 1, 1, 70, seed=3)},
    "numerator": {"normalize_output": False},
}


def dominated(query, key, options):
    """[Sq, Hq]: the key that has all the weight of a row, -1 where none has; and the row's largest logit."""
    q, k = np.asarray(query, np.float64), np.asarray(key, np.float64)
    logits = np.einsum("bqhd,bkhd->qhk", q, k) * options.get("softmax_scale", SCALE)
    if "bias" in options:
        logits = logits + np.asarray(options["bias"], np.float64)[0, 0]
    if "logits_soft_cap" in options:
        logits = options["logits_soft_cap"] * np.tanh(logits / options["logits_soft_cap"])
    if "attention_mask" in options:
        logits = np.where(options["attention_mask"][0, 0][:, None], logits, -np.inf)
    second, first = np.sort(logits, axis=-1)[..., -2:].transpose(2, 0, 1)
    products = np.einsum("bqhd,bkhd->qhk", abs(q), abs(k)).max(-1) * abs(options.get("softmax_scale", SCALE))
    alone = first - second > np.maximum(ALONE, RESOLVED * np.maximum(products, abs(first)))
    return np.where(alone, logits.argmax(axis=-1), -1), first


def check(run, arrays, options):
    """All is finite; out and dvalue are those of the keys that have all the weight."""
    query, key, value = arrays
    (out, *lse), (gradients, _) = run(arrays, {}, (D_OUT.astype(value.dtype), D_LSE))
    for x in (out, *lse, *gradients):
        assert np.isfinite(x).all()
    eps = float(jnp.finfo(value.dtype).eps)
    winner, largest = dominated(query, key, options)
    rows, heads = np.nonzero(winner >= 0)
    v = np.asarray(value, np.float32)[0]
    np.testing.assert_allclose(
        np.asarray(out, np.float32)[0, rows, heads], v[winner[rows, heads], heads], rtol=2 * eps, atol=1e-9
    )
    for x in lse:
        np.testing.assert_allclose(x[0].T[rows, heads], largest[rows, heads], rtol=1e-4, atol=1e-3)
    # Recomputed from a rounded lse, a weight is off by its last bits; from HUGE on that is no weight at all.
    d_out = np.asarray(D_OUT.astype(value.dtype), np.float32)[0]
    d_value, allowed = np.zeros(v.shape), np.zeros(v.shape)
    np.add.at(d_value, (winner[rows, heads], heads), d_out[rows, heads])
    off = np.where(abs(largest) > 2 * HUGE, 0.0, np.minimum(1.0, abs(largest) * LAST_BITS))
    np.add.at(allowed, (winner[rows, heads], heads), off[rows, heads, None] * abs(d_out[rows, heads]))
    # A row without such a key may give any key all of its weight.
    for row, head in zip(*np.nonzero(winner < 0), strict=True):
        allowed[:, head] += abs(d_out[row, head])
    error = abs(np.asarray(gradients[2], np.float32)[0] - d_value)
    assert (error <= 1.01 * allowed + 4 * eps * (1 + abs(d_value))).all()


@cache
def compiled(kernel, name):
    call = kernel.under({"softmax_scale": SCALE} | OPTIONS[name])
    return jax.jit(call, compiler_options=OPTIMIZED)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kernel", [XLA, WHOLE, MATERIALISED], ids=["xla", "whole", "materialised"])
def test_logits_of_any_size(kernel, name):
    """In float32, also where the two passes have different block sizes."""
    if kernel is MATERIALISED and name == "numerator":
        pytest.skip("attention has no numerator")
    # Logits stay below 1e38, their products with the scale's inverse too.
    smallest = min(1.0, abs(OPTIONS[name].get("softmax_scale", SCALE)))

    @settings(max_examples=20, deadline=None)
    @given(
        magnitude=st.floats(0.0, 35.0 + np.log10(smallest)),
        share=st.floats(0.0, 1.0),
        seed=st.integers(0, 2**32 - 1),
    )
    def holds(magnitude, share, seed):
        query, key, value = qkv(**SHAPES, seed=seed)
        factor = 10.0**magnitude / max(1.0, abs(OPTIONS[name].get("softmax_scale", SCALE)))
        query = query * np.float32(factor**share)
        check(compiled(kernel, name), (query, key * np.float32(factor ** (1 - share)), value), OPTIONS[name])

    holds()


@needs_interpreter
@pytest.mark.parametrize("magnitude", [6, 9, 10, 15, 30])
@pytest.mark.parametrize("name", ["", "negative", "cap", "mask", "bias", "numerator"])
def test_logits_of_any_size_in_triton(name, magnitude):
    arrays = qkv(**SHAPES)
    arrays = arrays[0] * np.float32(10.0**magnitude), *arrays[1:]
    check(TRITON.under({"softmax_scale": SCALE} | OPTIONS[name]), arrays, OPTIONS[name])


@needs_interpreter
def test_huge_logits_of_float16_fit_its_weights():
    """P is rounded to float16, which ends at 65504: a reference off by some bits would make it inf."""
    query, key, value = qkv(**SHAPES, dtype="float16")
    check(TRITON.under({"softmax_scale": 1.7e5}), (query * 100, key * 100, value), OPTIONS["large scale"])


@needs_interpreter
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_logits_have_an_lse_in_triton(sign, sinks):
    """Also where they are not finite in bits. An lse of -inf says that a row sees nothing, to a ring too."""
    query, key, value = qkv(**SHAPES)
    largest = np.float32(sign * np.finfo(np.float32).max)
    options = {"bias": jnp.full((1, 1, 1, 1), largest)}
    if sinks:
        options["softmax_aux"] = jnp.full((2, 1), np.float32(np.finfo(np.float32).min))
    out, lse = TRITON.call(jnp.zeros_like(query), key, value, **options)
    np.testing.assert_array_equal(lse, np.full(lse.shape, largest))
    keys = 70 + (sinks and sign < 0)
    expected = np.broadcast_to(np.asarray(value, np.float64).sum(axis=1, keepdims=True) / keys, out.shape)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
