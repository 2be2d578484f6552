"""Whether the tanh of the Hopper kernels is as near as they declare, and each of its two ways the same."""

import jax
import jax.numpy as jnp
import numpy as np

from conformance.subject import find
from kernels.pallas.mosaic_gpu.tanh import tanh_of_any, tanh_of_small

SUBJECT = find("pallas.mosaic_gpu")
DECLARED = SUBJECT.numerics("bfloat16", SUBJECT.tilings[0]).tanh
ANY = np.geomspace(1e-30, 100.0, 1 << 14, dtype=np.float32)


def tile(x: np.ndarray) -> jax.Array:
    return jnp.asarray(np.concatenate([x, -x]).reshape(64, -1))


def test_it_is_as_near_as_declared() -> None:
    x = tile(ANY)
    exact = np.tanh(np.asarray(x, np.float64))
    assert np.abs(np.asarray(jax.jit(tanh_of_any)(x), np.float64) / exact - 1.0).max() <= DECLARED


def test_small_ones_are_the_same_either_way() -> None:
    x = tile(ANY[np.abs(ANY) <= 0.5][: 1 << 13])
    np.testing.assert_array_equal(jax.jit(tanh_of_any)(x), jax.jit(tanh_of_small)(x))


def test_what_has_no_tanh_or_a_whole_one() -> None:
    x = jnp.asarray([[0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 0.5]], jnp.float32)
    np.testing.assert_array_equal(
        tanh_of_any(x)[0, :7], np.asarray([0.0, -0.0, 1.0, -1.0, np.nan, 1.0, -1.0], np.float32)
    )
