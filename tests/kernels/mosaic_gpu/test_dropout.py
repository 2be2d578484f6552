"""The pairs that the Hopper kernels keep, drawn by a warpgroup of NumPy's, beside those of S12."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.kernels.numerics.philox import keep_mask
from attest.kernels.pallas import mosaic_gpu
from attest.kernels.pallas.mosaic_gpu.tile.dropout import Place, draw_by_keys, draw_by_rows

THREADS = np.arange(128, dtype=np.uint32)
WORD = st.integers(0, 2**32 - 1)
PROBABILITIES = st.sampled_from([1e-12, 0.1, 0.5, 0.999])


@dataclass(frozen=True)
class Warpgroup:
    """`Instructions` of 128 threads at a time: a word is uint32 [128]."""

    def constant(self, value: int) -> Any:
        return np.full(128, value, np.uint32)

    def thread(self) -> Any:
        return THREADS

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def xor(self, x: Any, y: Any) -> Any:
        return x ^ y

    def either(self, x: Any, y: Any) -> Any:
        return x | y

    def divide(self, x: Any, by: int) -> tuple[Any, Any]:
        return x // np.uint32(by), x % np.uint32(by)

    def multiply(self, x: Any, by: int) -> tuple[Any, Any]:
        product = x.astype(np.uint64) * np.uint64(by)
        return (product >> np.uint64(32)).astype(np.uint32), product.astype(np.uint32)

    def if_odd(self, x: Any, odd: int, even: int) -> Any:
        return np.where(x & 1, np.uint32(odd), np.uint32(even))

    def if_least(self, x: Any, least: int, bit: int) -> Any:
        return np.where(x >= least, np.uint32(bit), np.uint32(0))

    def exchange(self, x: Any, lanes: int) -> Any:
        return x[THREADS ^ lanes]

    def permute(self, x: Any, y: Any, selector: Any) -> Any:
        two = np.stack((x, y), axis=1).view(np.uint8)
        digits = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 7
        return np.take_along_axis(two, digits.astype(np.int64), axis=1).view(np.uint32)[:, 0]


def held(words: list[Any]) -> np.ndarray:
    """The tile [64, columns] of what threads hold."""
    tile = np.zeros((64, 64 * len(words)), bool)
    warp, quad, member = THREADS // 32, THREADS % 32 // 4, THREADS % 4
    for i, word in enumerate(words):
        for k in range(8):
            for half in range(2):
                for e in range(2):
                    bits = word >> np.uint32(8 * (2 * half + e) + 7 - k) & 1
                    tile[16 * warp + quad + 8 * half, 64 * i + 8 * k + 2 * member + e] = bits
    return tile


def place(words: list[int], batch: int, head: int, row: int, key: int) -> Place[Any]:
    low, high, batch_origin, head_origin, row_origin, key_origin = words
    numbers = (low, high, batch_origin + batch, head_origin + head, row, row_origin, key_origin + key)
    return Place(*(np.full(128, x % 2**32, np.uint32) for x in numbers))


# Compiled for few shapes: the tests ask for the largest tile and cut theirs out of it.
compiled = jax.jit(keep_mask, static_argnames=("dropout_prob", "columns", "shared"))


def kept(words: Any, probability: float, batch: int, heads: Any, rows: Any, key: int, columns: int) -> Any:
    """The pairs of S12, bool [heads, rows, columns]."""
    scalars = jnp.asarray(words, jnp.uint32), probability, jnp.int32(batch)
    return np.asarray(
        compiled(*scalars, jnp.asarray(heads), jnp.asarray(rows), key, columns=columns, shared="")
    )


ORIGINS = st.tuples(WORD, WORD, *(st.integers(0, 2**31),) * 3, st.integers(0, 2**29).map(lambda x: 4 * x))
PLACES = st.tuples(*(st.integers(0, 100) for _ in range(4)))


@given(ORIGINS, PLACES, PROBABILITIES, st.sampled_from([64, 128, 192]))
def test_rows_of_queries(words: Any, at: Any, probability: float, columns: int) -> None:
    batch, head, row, key = at[0], at[1], 64 * at[2], 64 * at[3]
    drawn = draw_by_rows(Warpgroup(), place(words, batch, head, row, key), columns, int(probability * 2**32))
    expected = kept(words, probability, batch, [head], row + np.arange(64), key, 192)
    np.testing.assert_array_equal(held(drawn), expected[0, :, :columns])


@given(ORIGINS, PLACES, PROBABILITIES, st.sampled_from([64, 128]))
def test_rows_of_keys(words: Any, at: Any, probability: float, columns: int) -> None:
    batch, head, row, key = at[0], at[1], 64 * at[2], 64 * at[3]
    drawn = draw_by_keys(Warpgroup(), place(words, batch, head, row, key), columns, int(probability * 2**32))
    expected = kept(words, probability, batch, [head], row + np.arange(128), key, 64)
    np.testing.assert_array_equal(held(drawn), expected[0, :columns].T)


@given(ORIGINS, PROBABILITIES, st.integers(1, 64), st.booleans())
def test_rows_of_several_heads(words: Any, probability: float, queries: int, own_heads: bool) -> None:
    at = place(words, 1, 6, 0, 128)
    drawn = draw_by_rows(Warpgroup(), at, 64, int(probability * 2**32), queries, own_heads)
    heads = 6 + np.arange(64) * own_heads
    expected = kept(words, probability, 1, heads, np.arange(64), 128, 64)[:, :queries]
    np.testing.assert_array_equal(held(drawn), expected.reshape(-1, 64)[:64])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 256, 2, 128), {"causal": True}),
        ((2, 256, 2, 128), {"dropout_shared": "bh"}),
        ((2, 4, 8, 64), {"dropout_shared": "h", "origin": (1, 2, 3, 4)}),
        ((2, 192, 2, 256), {"dropout_shared": "b"}),
    ],
    ids=str,
)
def test_both_passes_lower(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    x = jnp.zeros(shape, jnp.bfloat16)
    attention = partial(mosaic_gpu.flash_attention, dropout_prob=0.1, dropout_seed=3, **options)

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out, backward = jax.vjp(attention, q, k, v)
        return backward(out)

    text = jax.jit(both).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
