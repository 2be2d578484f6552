"""Our function in place of tokamax's public one; `suite.py` gives ours to the tests of the operation."""

from collections.abc import Callable
from typing import Any

import pytest
from tokamax._src.ops.attention import api

from attest.kernels.adapters import tokamax as adapter


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch, counted: Callable[..., Any]) -> None:
    """Put our function in place of tokamax's."""
    monkeypatch.setattr(api, "dot_product_attention", counted(adapter.dot_product_attention))
    monkeypatch.setattr(adapter, "attention_op", counted(adapter.attention_op))
