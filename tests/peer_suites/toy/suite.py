"""Tests like a peer's: of numbers, of how they were computed, and of what needs no kernel."""

import unittest

import jax.numpy as jnp
import numpy as np

from tests.peer_suites.toy import peer


class ToyTest(unittest.TestCase):
    def setUp(self) -> None:
        rng = np.random.default_rng(0)
        self.arrays = [jnp.asarray(rng.standard_normal((1, 6, 2, 4)), jnp.float32) for _ in range(3)]

    def numbers(self) -> None:
        out = peer.attention(*self.arrays, is_causal=True)
        expected = peer.by_numpy(*self.arrays, is_causal=True)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)

    def program(self) -> None:
        if peer.kernel.__name__ != "peer_attention":
            self.fail("another function")

    def test_numbers(self) -> None:
        self.numbers()

    def test_numbers_and_program(self) -> None:
        self.numbers()
        self.program()

    def test_program_and_numbers(self) -> None:
        with self.subTest("numbers"):
            self.numbers()
        self.program()

    def test_dtype(self) -> None:
        assert self.arrays[0].dtype == jnp.float32

    def test_an_odd_flag(self) -> None:
        out = peer.attention(*self.arrays, is_causal="no")
        assert out.shape == (1, 6, 2, 4)
