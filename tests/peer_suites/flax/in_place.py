"""Our functions in place of Flax's, as functions and as what its layers call by default."""

from collections.abc import Callable
from typing import Any

import pytest
from flax import linen, nnx

from attest.kernels.adapters import flax_linen, flax_nnx

_OF_LINEN = (linen.MultiHeadDotProductAttention, linen.MultiHeadAttention, linen.SelfAttention)


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch, counted: Callable[..., Any]) -> None:
    """Put our functions in place of Flax's."""
    theirs, of_linen = linen.dot_product_attention, counted(flax_linen.dot_product_attention)
    monkeypatch.setattr(linen, "dot_product_attention", of_linen)
    for layer in _OF_LINEN:
        init: Any = layer.__init__
        while hasattr(init, "__wrapped__"):
            init = init.__wrapped__
        defaults = [of_linen if default is theirs else default for default in init.__defaults__]
        assert of_linen in defaults, layer
        monkeypatch.setattr(init, "__defaults__", tuple(defaults))
    of_nnx = counted(flax_nnx.dot_product_attention)
    for module in (nnx, nnx.nn.attention):
        monkeypatch.setattr(module, "dot_product_attention", of_nnx)
    monkeypatch.setitem(nnx.MultiHeadAttention.__init__.__kwdefaults__, "attention_fn", of_nnx)
