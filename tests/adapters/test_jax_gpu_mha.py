"""`mha` of JAX's Pallas kernels on ours, against JAX's, which an interpreter runs."""

import inspect
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attest.kernels.adapters.jax_gpu_mha import BlockSizes, mha
from tests.adapters.roundings import LIMITS, UNITS, check
from tests.kernels.kernel_cases import qkv

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import attention as library

LENGTH = 64
SELF = qkv(2, LENGTH, LENGTH, 2, 2, 16, 16)
CROSS = qkv(2, LENGTH // 2, LENGTH, 2, 2, 16, 16)
# Sorted, with negative ids; the other batch entry is mixed.
IDS = jnp.stack([jnp.arange(LENGTH) // 24 - 1, jnp.arange(LENGTH) * 7 % 3 - 2])
BLOCKS = library.BlockSizes(32, 32, 32, 32, 32, 32)


def of_jax(q: Any, k: Any, v: Any, ids: Any = None, **options: Any) -> Any:
    """JAX's kernel has blocks for all of its passes; with as many rows as keys, they fit each other."""
    return library.mha(q, k, v, ids, block_sizes=BLOCKS, interpret=True, **options)


def test_the_signature_is_that_of_jax() -> None:
    ours, theirs = (
        [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]
        for function in (mha, inspect.unwrap(library.mha))
    )
    assert [x for x in ours if x[0] != "block_sizes"] == [x for x in theirs if x[0] != "block_sizes"]
    names = inspect.signature(library.BlockSizes).parameters
    assert list(inspect.signature(BlockSizes).parameters) == list(names)
    default = library.BlockSizes.get_default()
    assert {name: getattr(BlockSizes.get_default(), name) for name in names} == {
        name: getattr(default, name) for name in names
    }


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        (None, {}),
        (None, {"causal": True}),
        (IDS, {"sm_scale": 0.3}),
        (IDS, {"causal": True, "sm_scale": 0.5}),
    ],
)
def test_results_and_gradients_are_those_of_jax(ids: Any, options: dict[str, Any]) -> None:
    """The reference of JAX, which is no kernel, computes in float64."""
    check(
        lambda q, k, v: mha(q, k, v, ids, **options),
        lambda q, k, v: library.mha_reference(q, k, v, ids, **options),
        *SELF,
    )
    out = of_jax(*SELF, ids, **options)
    np.testing.assert_allclose(
        mha(*SELF, ids, **options),
        out,
        rtol=0,
        atol=LIMITS["float32"]["out"] * UNITS["float32"] * abs(out).max(),
    )


@pytest.mark.parametrize("ids", [None, IDS])
def test_the_first_query_is_at_the_first_key(ids: Any) -> None:
    """Rows have the ids of the first keys, and see no keys past their own."""
    out, want = (
        function(*CROSS, ids, causal=True, block_sizes=BLOCKS, interpret=True)
        for function in (mha, library.mha)
    )
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-6)


def test_the_residual_is_a_logarithm_to_base_two() -> None:
    (out, lse), (_, want) = (
        function(*SELF, IDS, causal=True, block_sizes=BLOCKS, interpret=True, return_residuals=True)
        for function in (mha, library.mha)
    )
    np.testing.assert_allclose(lse, want, rtol=0, atol=4e-6)
    np.testing.assert_array_equal(out, mha(*SELF, IDS, causal=True))
    assert lse.dtype == jnp.float32


def test_ids_of_64_bits_are_compared_whole() -> None:
    ids = np.array([[0, 2**32]], np.int64)
    arrays = qkv(1, 2, 2, 1, 1, 4, 4)
    np.testing.assert_array_equal(mha(*arrays, ids), mha(*arrays, np.array([[0, 1]])))


def test_bfloat16_with_traced_ids() -> None:
    arrays = [x.astype("bfloat16") for x in SELF]
    assert mha(*arrays, None).dtype == jnp.bfloat16
    check(
        lambda q, k, v, ids: mha(q, k, v, ids, causal=True),
        lambda q, k, v, ids: library.mha_reference(q, k, v, ids, causal=True),
        *arrays,
        IDS,
        dtype="bfloat16",
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no axis of heads": ({"q": SELF[0][:, :, 0]}, r"q: got shape \(2, 64, 16\); expected 4 axes"),
    "another batch": ({"k": SELF[1][:1]}, "k: got"),
    "ids of another length": ({"segment_ids": IDS[:, :8]}, r"segment_ids: got shape .* expected \(2, 64\)"),
    "more queries than keys": (
        {"k": CROSS[0], "v": CROSS[0], "segment_ids": IDS[:, :32]},
        "segment_ids: got .* at least as many keys as the 64 queries",
    ),
    "ids that are no integers": ({"segment_ids": IDS.astype("float32")}, "segment_ids: got dtype float32"),
    "no scale": ({"sm_scale": None}, "sm_scale: got None"),
    "causal": ({"causal": 1}, "causal: got 1"),
    "block sizes": ({"block_sizes": 64}, "block_sizes: got a int; expected an object with block_q"),
    "an unknown backward pass": ({"backward_pass_impl": "cuda"}, "backward_pass_impl: got 'cuda'"),
    "warps": ({"num_warps": 0}, "num_warps: got 0"),
    "stages": ({"num_stages": None}, "num_stages: got None"),
    "a grid": ({"grid": (1, 1, 1)}, "grid: got a tuple; expected None"),
    "interpret": ({"interpret": 1}, "interpret: got 1"),
    "debug": ({"debug": "no"}, "debug: got 'no'"),
    "residuals": ({"return_residuals": 1}, "return_residuals: got 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_malformed_is_refused_by_name(name: str) -> None:
    arguments, message = REFUSED[name]
    q, k, v = SELF
    with pytest.raises(ValueError, match=f"^{message}"):
        mha(**{"q": q, "k": k, "v": v, "segment_ids": None, **arguments})
