"""S24 and S28: chunks and ranges of keys, beyond what the tests of all features hold kernels to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest import attention, flash_attention, flash_attention_with_lse
from tests.examples import examples
from tests.kernels.kernel_cases import normal, qkv

EXTREMES = st.sampled_from([-(2**31), -(2**31) + 1, -7, -1, 0, 1, 7, 2**31 - 2, 2**31 - 1])


@examples(30)
@given(
    rows=st.lists(EXTREMES, min_size=3, max_size=3),
    keys=st.none() | st.lists(EXTREMES, min_size=4, max_size=4),
    chunk=st.sampled_from([1, 2, 3, 2**30, 2**31 - 1]),
)
def test_chunks_of_any_positions(rows: list[int], keys: list[int] | None, chunk: int) -> None:
    """Against Python integers, which round down and do not overflow."""
    zeros = jnp.zeros((1, 4, 1, 4))
    places = {} if keys is None else {"kv_positions": np.array([keys])}
    places["q_positions"] = np.array([rows])
    _, weights = attention(zeros[:, :3], zeros, zeros, chunk_size=chunk, **places)
    for i, p in enumerate(rows):
        for j, t in enumerate(range(4) if keys is None else keys):
            assert bool(weights[0, 0, i, j] > 0) == (p // chunk == t // chunk), (p, t)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ends_beyond_the_keys_are_their_ends(dtype: type) -> None:
    """Whatever their dtype holds: an index that int32 does not hold does not wrap around."""
    top, bottom = np.iinfo(dtype).max, np.iinfo(dtype).min
    arrays = qkv()
    open_ = {"kv_start": np.full((1, 40), bottom, dtype), "kv_end": np.full((1, 40), top, dtype)}
    np.testing.assert_array_equal(flash_attention(*arrays, **open_), flash_attention(*arrays))
    shut = {"kv_start": np.full((1, 40), top, dtype), "kv_end": np.full((1, 40), bottom, dtype)}
    for name, ends in shut.items():
        out, lse = flash_attention_with_lse(*arrays, **{name: ends}, softmax_aux=jnp.ones((1, 2)))
        assert not out.any()
        np.testing.assert_allclose(lse, 1 + np.log(2), rtol=1e-6)


def test_a_single_query_has_a_range() -> None:
    """As in decoding from a cache that is not full."""
    query, key, value = qkv(q_length=1)
    ends = jnp.array([[7], [31]])
    got = jax.jit(lambda ends: flash_attention(query, key, value, kv_end=ends))(ends)
    for entry, end in enumerate((7, 31)):
        want = flash_attention(*(x[entry : entry + 1, :end] for x in (query, key, value)))
        np.testing.assert_allclose(got[entry : entry + 1], want, rtol=1e-5, atol=1e-6)


def test_ranges_have_the_batch_dimensions_of_the_call() -> None:
    arrays = qkv(batch=6)
    start, end = np.arange(240).reshape(6, 40) % 23, 20 + np.arange(40)[None]
    want = flash_attention(*arrays, kv_start=start, kv_end=end)
    got = flash_attention(
        *(x.reshape(2, 3, *x.shape[1:]) for x in arrays),
        kv_start=start.reshape(2, 3, 40),
        kv_end=end.reshape(1, 1, 40),
    )
    np.testing.assert_array_equal(got, want.reshape(2, 3, *want.shape[1:]))


def test_a_mask_of_a_head() -> None:
    """[1, Hq, 1, 1], as a model without some of its heads has it."""
    arrays, mask = qkv(), np.array([True, False, True, False]).reshape(1, 4, 1, 1)
    out = flash_attention(*arrays, mask)
    assert not out[:, :, 1::2].any()
    np.testing.assert_array_equal(out[:, :, ::2], flash_attention(*arrays)[:, :, ::2])


@pytest.mark.parametrize("shape", [(40, 50), (1, 50), (40, 1), (4, 40, 50), (1, 40, 50), (4, 1, 50), (1, 1)])
def test_masks_and_biases_may_lack_their_first_axes(shape: tuple[int, ...]) -> None:
    """As in NumPy's broadcasting; the gradient of a bias has the shape that was given."""
    arrays, given_ = qkv(), normal(*shape)
    whole = given_.reshape((1,) * (4 - len(shape)) + shape)

    def loss(bias: jax.Array, leading: tuple[int, ...]) -> jax.Array:
        out, lse = flash_attention_with_lse(
            *(x.reshape(*leading, *x.shape[1:]) for x in arrays), bias > -1, bias=bias, logits_soft_cap=1.0
        )
        return (out**2).sum() + jnp.where(lse == -jnp.inf, 0.0, lse).sum()

    value, gradient = jax.value_and_grad(loss)(given_, (2,))
    want, of_whole = jax.value_and_grad(loss)(whole, (2,))
    assert value == want
    np.testing.assert_array_equal(gradient, of_whole.reshape(shape))
    value, gradient = jax.value_and_grad(loss)(given_, (2, 1))
    assert value == want
    np.testing.assert_array_equal(gradient, of_whole.reshape(shape))


def test_ranges_have_no_gradient() -> None:
    """Integers: their cotangent is float0, and that of the arrays is not hindered by it."""
    arrays, ends = qkv(), jnp.full((1, 40), 9)

    def total(value: jax.Array, ends: jax.Array) -> jax.Array:
        return flash_attention(arrays[0], arrays[1], value, kv_end=ends).sum()

    d_value, d_ends = jax.grad(total, argnums=(0, 1), allow_int=True)(arrays[2], ends)
    assert d_ends.dtype == jax.dtypes.float0
    assert not d_value[:, 9:].any()
    assert d_value[:, :9].any()


def test_blocks_outside_of_all_ranges_are_not_read() -> None:
    """S4: NaN in them changes nothing."""
    query, key, value = qkv()
    spoilt = [x.at[:, 30:].set(jnp.nan) for x in (key, value)]
    ends = {"kv_end": np.full((1, 40), 30)}
    d_out = normal(2, 40, 4, 16)
    for arrays in ((key, value), spoilt):
        out, vjp = jax.vjp(lambda *x: flash_attention(query, *x, **ends), *arrays)
        assert np.isfinite(out).all()
        assert all(np.isfinite(x).all() for x in vjp(d_out))
