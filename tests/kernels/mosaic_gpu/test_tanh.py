"""Whether the cap of the Hopper kernels is as near as they declare, and each of its two ways the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.conformance.subject import find
from attest.kernels.pallas.mosaic_gpu.tile.tanh import Cap

SUBJECT = find("pallas.mosaic_gpu")
DECLARED = SUBJECT.numerics("bfloat16", SUBJECT.tilings[0]).tanh
ANY = np.geomspace(1e-30, 100.0, 1 << 14, dtype=np.float32)
CAPS = [Cap(1.0), Cap(0.125 / 30.0, 43.3), Cap(1e-4), Cap(1e4, 1.5)]


def tile(x: np.ndarray) -> jax.Array:
    return jnp.asarray(np.concatenate([x, -x]).reshape(64, -1), jnp.float32)


@pytest.mark.parametrize("cap", CAPS)
def test_it_is_as_near_as_declared(cap: Cap) -> None:
    x = tile(ANY / np.float32(cap.scale))
    exact = cap.unit * np.tanh(cap.scale * np.asarray(x, np.float64))
    normal = np.abs(exact) > np.finfo(np.float32).tiny
    found = np.asarray(jax.jit(cap.of_any)(x), np.float64)
    assert np.abs(found[normal] / exact[normal] - 1.0).max() <= DECLARED


@pytest.mark.parametrize("cap", CAPS)
def test_small_ones_are_the_same_either_way(cap: Cap) -> None:
    x = tile((ANY[np.abs(ANY) <= 0.5] / np.float32(cap.scale))[: 1 << 13])
    np.testing.assert_array_equal(jax.jit(cap.of_any)(x), jax.jit(cap.of_small)(x))


def test_what_has_no_tanh_or_a_whole_one() -> None:
    x = jnp.asarray([[0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 0.5]], jnp.float32)
    np.testing.assert_array_equal(
        Cap(1.0).of_any(x)[0, :7], np.asarray([0.0, -0.0, 1.0, -1.0, np.nan, 1.0, -1.0], np.float32)
    )
