"""Our function in place of `jax.nn.dot_product_attention`, which Keras's JAX backend calls."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from attest.kernels.adapters import jax_nn


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch, counted: Callable[..., Any]) -> None:
    """Put our function in place of JAX's. Where it refuses a call, Keras computes by itself."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", counted(jax_nn.dot_product_attention))
