"""ejKernel's launches of Triton kernels, done by attest's interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

from attest.conformance.peers._elsewhere.ejkernel_triton import _interpreted


@triton.heuristics({"EVEN": lambda given: given["size"] % given["BLOCK"] == 0})
@triton.jit
def scaled(array, scale, size, out, odd, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    read = tl.load(array + places, mask=places < size, other=0.0)
    tl.store(out + places, read * scale, mask=places < size)
    tl.store(odd + places, read * 0 + (0 if EVEN else 1), mask=places < size)


@pytest.mark.process(devices=1, TRITON_INTERPRET="1")
@pytest.mark.parametrize(("size", "odd"), [(16, 0), (19, 1)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_launch_has_its_scalars_its_grid_and_its_heuristics(size: int, odd: int, compiled: bool) -> None:
    def launch(array: Any) -> Any:
        return _interpreted(
            array,
            0.5,
            size,
            kernel=scaled,
            out_shape=[jax.ShapeDtypeStruct((size,), "f4")] * 2,
            grid=lambda chosen: (triton.cdiv(size, chosen["BLOCK"]),),
            name="test",
            num_warps=4,
            num_stages=2,
            BLOCK=16,
        )

    array = jnp.arange(size, dtype=jnp.float32)
    got, found = (jax.jit(launch) if compiled else launch)(array)
    np.testing.assert_array_equal(got, array / 2)
    np.testing.assert_array_equal(found, np.full(size, np.float32(odd)))
