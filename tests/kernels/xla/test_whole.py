"""Small problems in one piece: which rows a value that is not finite reaches, and the memory that takes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attest.kernels.xla import flash_attention
from tests.kernels.kernel_cases import qkv

ROWS, KEYS, HEADS, CHANNELS = 6, 9, 2, 3
SHIFT, LEFT = KEYS - ROWS, 2
CALL = partial(flash_attention, causal=True, sliding_window=(LEFT, None))
WAYS = jax.jit(CALL), jax.jit(jax.vmap(CALL))
VALUES = st.sampled_from([np.nan, np.inf, -np.inf])


@given(st.data())
def test_a_value_reaches_the_rows_that_see_it(data):
    """S4, also where the first row does not see it, and under jax.vmap no other entry of the mapped axis."""
    entry, key_index, head, channel = (
        data.draw(st.integers(0, size - 1)) for size in (2, KEYS, HEADS, CHANNELS)
    )
    query, key, value = qkv(2, ROWS, KEYS, HEADS, HEADS, CHANNELS, CHANNELS)
    stained = value.at[entry, key_index, head, channel].set(data.draw(VALUES))
    reached = np.zeros(query.shape, bool)
    rows = np.arange(ROWS) + SHIFT
    reached[entry, (rows - LEFT <= key_index) & (key_index <= rows), head, channel] = True
    for call in WAYS:
        want, got = call(query, key, value), call(query, key, stained)
        assert not np.isfinite(got[reached]).any()
        np.testing.assert_array_equal(got[~reached], want[~reached])


def test_no_pair_is_stored_for_each_channel():
    """Searching the values takes no more memory than logits, weights and one more array of their size."""
    shape = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.float32)
    compiled = jax.jit(partial(flash_attention, causal=True)).lower(shape, shape, shape).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 4 * (4 * 256 * 256)
