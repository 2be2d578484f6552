"""Unrounded results of the Hopper kernels: float32, and rounded they are the ordinary ones, to the bit."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attest.kernels.call.call import check_call
from attest.kernels.contract import Settings
from attest.kernels.numerics.row_terms import row_terms
from attest.kernels.pallas.mosaic_gpu.passes import PASSES
from attest.kernels.pallas.mosaic_gpu.spec import describe
from attest.kernels.visibility.intervals import describe_rows
from tests.kernels.kernel_cases import normal
from tests.kernels.mosaic_gpu.test_kernels import (
    DIMS,
    FEATURES,
    needs_hopper,
    of_first_rows,
    poisoned,
    tensors,
)

# What `Settings` holds; the other options are of the call.
OF_SETTINGS = {"normalize_output": True, "logits_dtype": "float32"}


def settings_of(options: dict[str, Any]) -> tuple[Settings, dict[str, Any]]:
    given = OF_SETTINGS | {name: x for name, x in options.items() if name in OF_SETTINGS}
    rest = {name: x for name, x in options.items() if name not in OF_SETTINGS}
    return Settings(None, None, precision=PASSES.check_precision(None), **given), rest


def both_passes(options: dict[str, Any], unrounded: bool, query: Any, key: Any, value: Any) -> dict[str, Any]:
    """The results of both passes; the gradients are of the ordinary out."""
    settings, rest = settings_of(options)
    call = check_call(query, key, value, **rest)
    ordinary = PASSES.forward(settings, call)
    d_out = normal(*ordinary.out.shape, seed=5, dtype=query.dtype)
    terms = row_terms(
        call,
        ordinary.out,
        ordinary.lse,
        ordinary.row_max,
        d_out,
        normal(*ordinary.lse.shape, seed=6),
        settings.normalize_output,
        hides=False,
    )
    settings = replace(settings, unrounded=unrounded)
    forward, backward = PASSES.forward(settings, call), PASSES.backward(settings, call, terms, None)
    names = ("query", "key", "value", "bias")
    return {"out": forward.out, **{f"d_{name}": getattr(backward, name) for name in names}}


def assert_unrounded(options: dict[str, Any], arrays: Any) -> None:
    run = jax.jit(partial(both_passes, options), static_argnums=0)
    ordinary, unrounded = run(False, *arrays), run(True, *arrays)
    for name, x in unrounded.items():
        rounded = ordinary[name]
        if x is None:
            assert rounded is None
            continue
        assert x.dtype == jnp.float32
        assert x.shape == rounded.shape
        # NumPy takes NaN for equal in its own dtypes alone, of which bfloat16 is none.
        narrow = rounded.astype(jnp.float32)
        np.testing.assert_array_equal(x.astype(rounded.dtype).astype(jnp.float32), narrow, err_msg=name)
        if rounded.dtype == jnp.bfloat16 and np.isfinite(x).all():
            # Most numbers have bits that bfloat16 does not hold.
            assert (narrow != x)[np.asarray(x) != 0].mean() > 0.5, name


@pytest.mark.parametrize("queries", [None, 1])
def test_unrounded_results_lower_for_cuda(queries: int | None) -> None:
    query, key, value = tensors(64)
    run = export.export(jax.jit(partial(both_passes, {"causal": True}, True)), platforms=["cuda"])
    assert "flash_forward" in run(query[:, :queries], key, value).mlir_module()


@needs_hopper
@DIMS
@pytest.mark.parametrize("name", FEATURES)
def test_rounding_last_gives_the_ordinary_results(name: str, dims: tuple[int, int]) -> None:
    assert_unrounded(FEATURES[name], tensors(*dims))


@pytest.mark.parametrize(
    ("normalize", "reads", "exact"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_logits_are_relative_to_their_maximum_where_it_is_read(
    normalize: bool, reads: bool, exact: bool
) -> None:
    settings = Settings(None, None, normalize, None, "float32", reads_row_max=reads)
    call = check_call(*tensors(64))
    assert describe(settings, call, describe_rows(call), (64, 64), 128, 128).results.exact_reference == exact


@needs_hopper
@pytest.mark.parametrize("queries", [None, 1])
def test_the_maximum_of_a_row_is_exact_where_it_is_read(queries: int | None) -> None:
    """Logits that rise by less than what the softmax leaves behind."""
    query, key, value = tensors(64)
    rising = jnp.linspace(0.0, 3.0, key.shape[1])[None, :, None, None].astype(key.dtype)
    query, key = jnp.ones_like(query[:, :queries]), jnp.broadcast_to(rising, key.shape)
    settings, _ = settings_of({})
    run = jax.jit(partial(PASSES.forward, replace(settings, reads_row_max=True)))
    found = run(check_call(query, key, value, softmax_scale=1.0 / 64)).row_max
    np.testing.assert_allclose(found, np.full(found.shape, 3.0), rtol=1e-6)


@needs_hopper
@pytest.mark.parametrize("name", ["plain", "causal", "mask", "bias, cap, window"])
def test_few_queries_are_unrounded(name: str) -> None:
    query, key, value = tensors(64)
    options = {option: of_first_rows(option, x, 17) for option, x in FEATURES[name].items()}
    assert_unrounded(options, (query[:, :17], key, value))


@needs_hopper
@pytest.mark.parametrize("where", ["keys", "queries"])
@DIMS
def test_what_is_recomputed_is_unrounded(dims: tuple[int, int], where: str) -> None:
    """A NaN that some rows see has the results computed anew (S4)."""
    assert_unrounded({"causal": True}, poisoned(tensors(*dims), where))
