"""Our function in place of the kernel; TOY_ADAPTER says which: the adapter as it is, or with a defect."""

import os
from collections.abc import Callable
from typing import Any

import jax
import pytest

from attest.kernels.adapters.tokamax import dot_product_attention
from tests.peer_suites.toy import peer


def _without_causal(*arrays: Any, is_causal: bool) -> jax.Array:
    del is_causal
    return dot_product_attention(*arrays)


def _scaled(*arrays: Any, is_causal: bool) -> jax.Array:
    return 1.01 * dot_product_attention(*arrays, is_causal=is_causal)


def _failing(*arrays: Any, is_causal: bool) -> jax.Array:
    raise NotImplementedError("is_causal: got True; expected False.")


def _refusing(*arrays: Any, is_causal: bool) -> jax.Array:
    raise ValueError("is_causal: got True; expected False.")


def peer_attention(*arrays: Any, is_causal: bool) -> jax.Array:
    """Compute attention under the name that the suite looks for in the program."""
    return dot_product_attention(*arrays, is_causal=is_causal)


ADAPTERS: dict[str, Callable[..., jax.Array]] = {
    "as it is": dot_product_attention,
    "without causal": _without_causal,
    "scaled": _scaled,
    "failing": _failing,
    "refusing": _refusing,
    "with the peer's name": peer_attention,
}


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch, counted: Callable[..., Any]) -> None:
    """Put our function in place of the kernel, unless it shall not be reached."""
    if os.environ["TOY_ADAPTER"] in ADAPTERS:
        monkeypatch.setattr(peer, "kernel", counted(ADAPTERS[os.environ["TOY_ADAPTER"]]))
