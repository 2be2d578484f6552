"""S12, S29: Philox4x32-10 against its published answers, the keep mask against the clauses in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.kernels.numerics.philox import dropout_words, keep_mask, philox4x32
from tests.reference.second_pairs import KNOWN_ANSWERS, philox

SEED = 0x0123456789ABCDEF
WORDS = dropout_words(jnp.array([SEED & 0xFFFFFFFF, SEED >> 32], jnp.uint32), None, "")


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers(counter, key, output):
    got = philox4x32(tuple(map(jnp.uint32, counter)), tuple(map(jnp.uint32, key)))
    assert tuple(int(word) for word in got) == output


def test_keep_mask_is_the_clause():
    got = keep_mask(WORDS, 0.37, jnp.int32(3), jnp.arange(2), jnp.arange(4), 0, 9, "")
    limit = int(0.37 * 2**32)
    for (h, i, j), kept in np.ndenumerate(np.asarray(got)):
        word = philox((j >> 2, i, h, 3), (SEED & 0xFFFFFFFF, SEED >> 32))[j & 3]
        assert kept == (word >= limit)


def test_any_tile_has_the_same_mask():
    """S18: whatever a tile's origin, alignment and size, it is a slice of the whole."""
    whole = keep_mask(WORDS, 0.5, jnp.int32(1), jnp.arange(3), jnp.arange(11), 0, 23, "")

    @jax.jit
    def tile(row, column):
        return keep_mask(WORDS, 0.5, jnp.int32(1), jnp.arange(1, 3), row + jnp.arange(4), column, 6, "")

    for row, column in [(0, 0), (3, 1), (7, 2), (5, 3), (2, 17), (0, 12)]:
        expected = whole[1:, row : row + 4, column : column + 6]
        np.testing.assert_array_equal(tile(row, column), expected)


def test_keeps_the_stated_share():
    kept = keep_mask(WORDS, 0.2, jnp.int32(0), jnp.arange(8), jnp.arange(64), 0, 128, "")
    assert abs(float(kept.mean()) - 0.8) < 4 * (0.16 / kept.size) ** 0.5
    assert keep_mask(WORDS, 0.0, jnp.int32(0), jnp.arange(2), jnp.arange(8), 0, 8, "").all()


@pytest.mark.found_outside
@pytest.mark.parametrize("shared", ["b", "h", "bh"])
def test_what_is_shared_counts_as_zero(shared):
    """S29: the batch entry, the head, or both, and the origin on them."""
    seed, heads, rows = WORDS[:2], jnp.arange(1, 4), jnp.arange(5)
    words = dropout_words(seed, jnp.array([7, 8, 9, 12], jnp.uint32), shared)
    got = keep_mask(words, 0.4, jnp.int32(2), heads, rows, 1, 10, shared)
    entry, heads = (0 if "b" in shared else 2 + 7), (0 * heads if "h" in shared else heads + 8)
    want = keep_mask(WORDS, 0.4, jnp.int32(entry), heads, rows + 9, 1 + 12, 10, "")
    np.testing.assert_array_equal(got, want)
