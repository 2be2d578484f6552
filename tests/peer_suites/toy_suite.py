"""A suite like a peer's, for the tests of its judge: numbers first, then how they were computed.

The environment variable TOY_ADAPTER says what is judged: the adapter as it is, or with a defect.
"""

import os
import unittest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.adapters.tokamax import dot_product_attention


def _without_causal(*arrays: Any, is_causal: bool) -> jax.Array:
    del is_causal
    return dot_product_attention(*arrays)


def _scaled(*arrays: Any, is_causal: bool) -> jax.Array:
    return 1.01 * dot_product_attention(*arrays, is_causal=is_causal)


def _refusing(*arrays: Any, is_causal: bool) -> jax.Array:
    raise NotImplementedError("is_causal: got True; expected False.")


def peer_attention(*arrays: Any, is_causal: bool) -> jax.Array:
    """Compute attention under the name that the suite looks for in the program."""
    return dot_product_attention(*arrays, is_causal=is_causal)


ADAPTERS = {
    "as it is": dot_product_attention,
    "without causal": _without_causal,
    "scaled": _scaled,
    "refusing": _refusing,
    "with the peer's name": peer_attention,
}


class ToyTest(unittest.TestCase):
    def setUp(self) -> None:
        self.attention = ADAPTERS[os.environ["TOY_ADAPTER"]]
        rng = np.random.default_rng(0)
        self.arrays = [jnp.asarray(rng.standard_normal((1, 6, 2, 4)), jnp.float32) for _ in range(3)]

    def numbers(self) -> None:
        out = self.attention(*self.arrays, is_causal=True)
        q, k, v = (np.asarray(x, np.float64) for x in self.arrays)
        logits = np.where(np.tri(6, dtype=bool), np.einsum("bqhd,bkhd->bhqk", q, k) / 2, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(out, np.einsum("bhqk,bkhd->bqhd", weights, v), rtol=1e-4, atol=1e-4)

    def test_numbers(self) -> None:
        self.numbers()

    def test_numbers_and_program(self) -> None:
        self.numbers()
        assert self.attention.__name__ == "peer_attention", "another function"
