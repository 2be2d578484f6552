"""Comparing all of a large call on the device: what is furthest off, and one program for all candidates."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attest.conformance.judging.candidates import comparison
from attest.conformance.judging.candidates.inputs import draw_inputs
from attest.conformance.subjects.auto import declared_by
from attest.reference.numerics import format_of, half_ulp
from tests.conformance.tuning.candidates import correct


@given(st.integers(0, 2**32 - 1), st.sampled_from(["bfloat16", "float16", "float32"]))
def test_what_is_furthest_off_is_what_numpy_finds(seed, dtype):
    stream = np.random.default_rng(seed)
    want = np.float32(stream.standard_normal((3, 5)) * 2.0 ** stream.integers(-10, 10, (3, 5)))
    want[stream.random(want.shape) < 0.2] = 0.0
    got = (want + np.float32(1e-2 * stream.standard_normal(want.shape))).astype(jnp.dtype(dtype))
    unit = format_of(got.dtype).unit
    ratio = abs(got.astype(np.float64) - want) / (2 * 1e-3 + 4 * half_ulp(abs(want), unit))
    worst, at = comparison.furthest_off(jnp.asarray(got), jnp.asarray(want), 1e-3, unit)
    assert np.isclose(worst, ratio.max(), rtol=1e-5)
    assert np.isclose(ratio[at], ratio.max(), rtol=1e-5)


def test_a_nan_is_off_unless_both_have_it():
    got = jnp.array([[1.0, jnp.nan], [jnp.inf, 0.0]], jnp.bfloat16)
    assert comparison.furthest_off(got, got.astype(jnp.float32), 0.0, 2.0**-9)[0] == 0.0
    for other, at in (([[1.0, 0.0], [jnp.inf, 0.0]], (0, 1)), ([[1.0, jnp.nan], [3.0, 0.0]], (1, 0))):
        assert comparison.furthest_off(got, jnp.array(other, jnp.float32), 1.0, 2.0**-9) == (np.inf, at)


def test_bits_tell_zeros_apart_and_not_nans_of_the_same_bits():
    first = {"out": jnp.array([0.0, jnp.nan]), "dkey": jnp.array([0.0])}
    second = {"out": jnp.array([0.0, jnp.nan]), "dkey": jnp.array([-0.0])}
    assert comparison.same_bits(first, second) == {"out": True, "dkey": False}


def test_the_kernel_that_is_compared_with_is_compiled_once_for_all_candidates():
    arguments = correct(3).arguments
    xla = declared_by("xla", anywhere=True).call
    compiled = comparison._compute._cache_size()
    for seed in range(3):
        comparison.in_float32(xla, draw_inputs(arguments, seed), None)
    assert comparison._compute._cache_size() == compiled + 1
