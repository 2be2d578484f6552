"""What adapters share: missing libraries, names in errors, and keys."""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.kernels.adapters.shared import as_mask, as_pairs, as_seed, missing, renamed, top_left
from attest.kernels.operations import NoImplementationError


@pytest.mark.parametrize(
    ("adapter", "package"), [("flax_linen", "flax"), ("flax_nnx", "flax"), ("equinox", "equinox")]
)
def test_a_library_that_is_not_installed_is_named(
    adapter: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"attest.kernels.adapters.{adapter}"
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(name)
    assert str(caught.value) == f"{name}: needs {package}, which is not installed; run pip install {package}."


def test_what_a_library_itself_misses_is_not_hidden() -> None:
    error = ModuleNotFoundError("No module named 'tensorstore'", name="tensorstore")
    assert missing("attest.kernels.adapters.flax_nnx", "flax", error) is error


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError, NoImplementationError])
def test_a_refusal_keeps_its_kind_and_gets_the_name_of_the_library(kind: type[Exception]) -> None:
    with (
        pytest.raises(kind, match=r"^scale: got softmax_scale: 1$"),
        renamed({"softmax_scale": "scale", "got": "found"}),
    ):
        raise kind("softmax_scale: got softmax_scale: 1")


def test_other_errors_stay_as_they_are() -> None:
    error = ValueError("softmax_scale is in the middle: of the text")
    with pytest.raises(ValueError, match="in the middle") as caught, renamed({"softmax_scale": "scale"}):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "uint32", "float32", "bfloat16"])
def test_masks_are_what_is_not_zero(dtype: str) -> None:
    found = as_mask("mask", jnp.array([1, 0, 1]).astype(dtype), 4)
    assert found is not None
    assert (found.shape, found.dtype) == ((1, 1, 1, 3), np.bool_)
    assert found.ravel().tolist() == [True, False, True]
    assert as_mask("mask", None, 4) is None
    assert as_pairs("bias", None, 4) is None


def test_a_traced_mask_of_floats_is_taken() -> None:
    found = jax.jit(lambda mask: as_mask("mask", mask, 2))(jnp.array([[0.0, 1.0]]))
    assert found.tolist() == [[False, True]]


def test_a_seed_is_one_typed_key() -> None:
    new = jax.random.key(3)
    assert as_seed("key", new) is new
    assert as_seed("key", jax.random.PRNGKey(3)) == new
    assert as_seed("key", np.asarray(jax.random.PRNGKey(3))) == new
    with pytest.raises(
        ValueError, match=r"^key: got an array of dtype int32 and shape \(2,\); expected a JAX random key"
    ):
        as_seed("key", jnp.zeros(2, jnp.int32))


def test_rows_start_at_the_first_key_where_lengths_differ() -> None:
    shorter, longer = jnp.zeros((1, 3, 1, 8)), jnp.zeros((1, 4, 1, 8))
    assert (top_left(longer, longer), top_left(shorter, longer), top_left(longer, shorter)) == (None, 0, 0)
