"""Key and value in float32 beside a query of 16 bits, for calls whose gradients are summed over devices.

A gradient has the dtype of its array. Where several devices read the same keys, each would round its part
of the gradient before the sum. In float32 only the sum is rounded. The passes round key and value to the
dtype of query again, which is exact.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp

from attest.kernels.call.options import refuse

_allowed: ContextVar[bool] = ContextVar("attest_wide_keys", default=False)


@contextmanager
def wide_keys() -> Generator[None]:
    """Let the calls in the block have key and value in float32, whatever dtype query has."""
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def wide_keys_allowed() -> bool:
    """Return whether the call is in a block of `wide_keys`."""
    return _allowed.get()


def check_dtype_of_query(name: str, x: Any, query: Any) -> None:
    """Refuse key or value in another dtype than query, or than the one that stands for it here.

    Raises: ValueError.
    """
    if x.dtype != query.dtype and not (_allowed.get() and x.dtype == jnp.float32):
        expected = f"{query.dtype}, the dtype of query"
        refuse(name, f"dtype {x.dtype}", expected, "Cast the three to one dtype.")
