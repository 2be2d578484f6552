"""Key and value in float32 beside a query of 16 bits, for calls whose gradients are summed over devices.

A gradient has the dtype of its array. Where several devices read the same keys, each would round its part
of the gradient before the sum. In float32 the sum alone is rounded. The passes round key and value to the
dtype of query again, which is exact.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp

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


def has_dtype_of_query(x: Any, query: Any) -> bool:
    """Return whether key or value has the dtype of query, or the one that stands for it here."""
    return x.dtype == query.dtype or (_allowed.get() and x.dtype == jnp.float32)
