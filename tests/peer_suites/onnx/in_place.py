"""Our operator, whose calls are counted, for `suite.py`."""

from collections.abc import Callable
from typing import Any

import pytest

from attest.kernels.adapters import onnx as adapter


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch, counted: Callable[..., Any]) -> None:
    """Count the calls of our operator."""
    monkeypatch.setattr(adapter, "attention", counted(adapter.attention))
