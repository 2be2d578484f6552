"""Extra batch dimensions: what is compiled for such a call."""

import jax
import jax.numpy as jnp
import pytest

from attest.kernels.xla import flash_attention


def barriers(shape: tuple[int, ...]) -> int:
    """Return the barriers in the program of a call and its gradients, of arrays of one shape."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    both = jax.value_and_grad(lambda *arrays: flash_attention(*arrays).sum(), argnums=(0, 1, 2))
    return jax.jit(both).lower(x, x, x).as_text().count("optimization_barrier")


@pytest.mark.parametrize("leading", [(), (2, 1), (1, 1, 3)])
def test_reshapes_are_kept_apart_from_products(leading):
    """Else XLA on GPUs may choose other algorithms, with other bits, than for one batch dimension (S27)."""
    arrays, results = 3, 1
    assert barriers((*leading, 8, 2, 16)) == 2 * (arrays + results)


def test_one_batch_dimension_needs_no_barrier():
    assert barriers((2, 8, 2, 16)) == 0
