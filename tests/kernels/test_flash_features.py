"""Every kernel against attention written pair by pair: out, lse and every gradient, by clause."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.feature_cases import DROPOUT, FEATURES, KEY_POSITIONS, assert_close, expected, problem
from tests.kernels.implementations import XLA_FLASH, all_kernels, flash_kernels
from tests.kernels.kernel_cases import normal, plain_attention, qkv


@functools.cache
def compiled(kernel, name):
    return kernel.under(problem(name)[0])


@flash_kernels
@pytest.mark.parametrize("name", FEATURES)
def test_a_kernel_equals_the_clauses(name, kernel):
    """S1 to S15: out, lse, and gradients for cotangents of both, with blocks that divide nothing."""
    primal, gradients = compiled(kernel, name)(*problem(name)[1:])
    assert_close((primal, gradients), expected(name, lse=len(primal) == 2))


@pytest.mark.parametrize("kernel", XLA_FLASH)
@pytest.mark.parametrize("name", KEY_POSITIONS)
def test_keys_stand_where_they_are_said_to(name, kernel):
    """S23, of the implementations that take positions of keys."""
    primal, gradients = compiled(kernel, name)(*problem(name)[1:])
    assert_close((primal, gradients), expected(name, lse=len(primal) == 2))


@flash_kernels
def test_unnormalised_output_is_the_numerator(kernel):
    """out * exp(lse - m), and m is a constant in differentiation."""
    arrays, sinks = qkv(), normal(4, 2)
    cotangents = normal(2, 40, 4, 16, seed=8), normal(2, 4, 40, seed=9)
    options = {"causal": True, "sliding_window": (9, None), **DROPOUT}

    @jax.jit
    def plain(arrays, floats):
        out, lse, m = plain_attention(*arrays, options, floats)
        return out * jnp.exp(lse - m).transpose(0, 2, 1)[..., None], lse

    floats = {"softmax_aux": sinks}
    want, vjp = jax.vjp(plain, arrays, floats)
    run = kernel.under({**options, "normalize_output": False})
    assert_close(run(arrays, floats, cotangents), (want, vjp(cotangents)))


@flash_kernels
def test_logits_dtype_rounds_the_products(kernel):
    """Of integers, so that the products are exact; gradients pass through the rounding unchanged."""
    query, key, value = (jnp.round(8 * x) for x in qkv(value_dim=1))
    options = {"softmax_scale": 2.0**-7, "logits_dtype": "bfloat16"}
    cotangents = normal(2, 40, 4, 1, seed=8), normal(2, 4, 40, seed=9)

    def rounded(arrays):
        query, key, value = arrays
        key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") * 2.0**-7
        rounding = logits.astype(jnp.bfloat16).astype(jnp.float32) - logits
        assert abs(rounding).max() > 0.01
        logits = logits + jax.lax.stop_gradient(rounding)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), value, precision="highest")
        return out, jax.nn.logsumexp(logits, axis=-1)

    arrays = query, key, value
    want, vjp = jax.vjp(rounded, arrays)
    got = kernel.under(options)(arrays, {}, cotangents)
    assert_close(got, (want, (*vjp(cotangents), {})), atol=1e-4)


@flash_kernels
def test_blocks_change_nothing_but_rounding(kernel):
    """S18, sinks and dropout included: what is counted once or dropped does not follow the blocks."""
    case = qkv(), {"softmax_aux": normal(4, 2)}, (normal(2, 40, 4, 16, seed=8), normal(2, 4, 40, seed=9))

    def run(sizes):
        blocks = {"fwd_params": sizes, "bwd_params": sizes}
        return kernel.under({"causal": True, **DROPOUT, **blocks})(*case)

    chosen = run(None)
    for q, k in [(16, 64), (32, 16)]:
        assert_close(run(kernel.sizes(q, k)), chosen)


@all_kernels
def test_two_calls_agree_to_the_bit(kernel):
    """S17."""
    run, case = compiled(kernel, "dropout, bias"), problem("dropout, bias")[1:]
    for a, b in zip(*(jax.tree.leaves(run(*case)) for _ in range(2)), strict=True):
        np.testing.assert_array_equal(a, b)
