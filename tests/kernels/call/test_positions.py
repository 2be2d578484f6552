"""S23: a call with the place of a shard computes that shard of the whole. S27: batch dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest import attention, flash_attention, flash_attention_with_lse
from tests.examples import examples
from tests.kernels.feature_cases import DROPOUT, PACKED
from tests.kernels.implementations import all_kernels, flash_kernels
from tests.kernels.kernel_cases import normal, qkv


@all_kernels
@pytest.mark.parametrize(
    ("entries", "key_heads", "rows"),
    [(slice(1, 2), slice(0, 2), slice(0, 40)), (slice(0, 2), slice(1, 2), slice(16, 40))],
    ids=["a batch entry", "a key head, the last rows"],
)
def test_a_shard_is_that_part_of_the_whole(kernel, entries, key_heads, rows):
    """Causal order, a window and dropout are those of the whole, forward and backward."""
    options = {"causal": True, "sliding_window": (30, None), **DROPOUT}
    arrays = query, key, value = qkv()
    shift = key.shape[1] - query.shape[1]
    heads = slice(key_heads.start * 2, key_heads.stop * 2)
    d_out = normal(2, 40, 4, 16, seed=8)
    d_lse = jnp.zeros((2, 4, 40))

    whole, (of_whole, _) = kernel.under(options)(arrays, {}, (d_out, d_lse))
    place = {"q_offset": rows.start + shift, "origin": (entries.start, heads.start, rows.start, 0)}
    part, (of_part, _) = kernel.under(options | place)(
        (query[entries, rows, heads], key[entries, :, key_heads], value[entries, :, key_heads]),
        {},
        (d_out[entries, rows, heads], d_lse[entries, heads, rows]),
    )
    np.testing.assert_allclose(part[0], whole[0][entries, rows, heads], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(part[0] == 0, whole[0][entries, rows, heads] == 0)
    np.testing.assert_allclose(of_part[0], of_whole[0][entries, rows, heads], rtol=1e-4, atol=1e-5)
    if rows == slice(0, 40):  # otherwise the other rows add to the gradients of keys
        for one, other in zip(of_part[1:], of_whole[1:], strict=True):
            np.testing.assert_allclose(one, other[entries, :, key_heads], rtol=1e-4, atol=1e-5)


@flash_kernels
def test_shards_of_keys_merge_to_the_whole(kernel):
    """By the lse; a shard of the keys has an offset from its first key, and an origin there."""
    options = {"causal": True, **DROPOUT}
    query, key, value = qkv()
    run = kernel.under(options)
    zeros = jnp.zeros((2, 40, 4, 16)), jnp.zeros((2, 4, 40))
    (out, lse), _ = run((query, key, value), {}, zeros)
    parts = []
    for start, stop in ((0, 20), (20, 50)):
        place = {"q_offset": 10 - start, "origin": (0, 0, 0, start)}
        keys = key[:, start:stop], value[:, start:stop]
        parts.append(kernel.under(options | place)((query, *keys), {}, zeros)[0])
    merged = jnp.logaddexp(parts[0][1], parts[1][1])
    share = [jnp.exp(part[1] - merged).transpose(0, 2, 1)[..., None] for part in parts]
    np.testing.assert_allclose(merged, lse, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        sum(part[0] * of_part for part, of_part in zip(parts, share, strict=True)), out, rtol=1e-4, atol=1e-5
    )


EXTREMES = st.sampled_from([-(2**31), -(2**31) + 1, -1, 0, 1, 7, 2**31 - 2, 2**31 - 1])


@examples(20)
@given(
    rows=st.lists(EXTREMES, min_size=3, max_size=3),
    keys=st.none() | st.lists(EXTREMES, min_size=4, max_size=4),
    left=st.none() | st.sampled_from([0, 5, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40]),
    right=st.none() | st.sampled_from([0, 5, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40]),
    causal=st.booleans(),
)
def test_positions_do_not_overflow(rows, keys, left, right, causal):
    """Against Python integers: whatever int32 holds, and whatever a window is."""
    zeros = jnp.zeros((1, 4, 1, 4))
    options = {"q_positions": np.array([rows])}
    if keys is not None:
        options["kv_positions"] = np.array([keys])
    if left is not None or right is not None:
        options["sliding_window"] = (left, right)
    _, weights = attention(zeros[:, :3], zeros, zeros, causal=causal, **options)
    for i, p in enumerate(rows):
        for j, t in enumerate(range(4) if keys is None else keys):
            seen = (
                (not causal or t <= p)
                and (left is None or p - left <= t)
                and (right is None or t <= p + right)
            )
            assert bool(weights[0, 0, i, j] > 0) == seen, (p, t)


@pytest.mark.parametrize(
    ("name", "spoilt"),
    [
        ("q_offset", {"q_offset": 1, "q_positions": np.zeros((1, 40), int)}),
        ("q_offset", {"q_offset": 1.0}),
        ("q_offset", {"q_offset": np.array([1, 2, 3])}),
        ("q_offset", {"q_offset": np.array([1])}),
        ("q_offset", {"q_offset": np.array([0.5])}),
        ("q_offset", {"q_offset": 2**31}),
        ("q_offset", {"q_offset": True}),
        ("q_positions", {"q_positions": [0] * 40}),
        ("q_positions", {"q_positions": np.zeros((1, 41), int)}),
        ("q_positions", {"q_positions": np.zeros((3, 40), int)}),
        ("q_positions", {"q_positions": np.zeros((1, 40))}),
        ("kv_positions", {"kv_positions": np.full((1, 50), 2**31)}),
        ("kv_positions", {"kv_positions": np.zeros(50, int)}),
        ("origin", {"origin": 3}),
        ("origin", {"origin": (0, 0, 0)}),
        ("origin", {"origin": (0, 0, 0, -4)}),
        ("origin", {"origin": (0, 0, 0, 2)}),
        ("origin", {"origin": (0, 0, 2**32, 0)}),
        ("origin", {"origin": np.zeros(4)}),
        ("origin", {"origin": (0, "1", 0, 0)}),
    ],
    ids=str,
)
def test_malformed_positions_are_refused(name, spoilt):
    for function in (flash_attention, attention):
        with pytest.raises(ValueError, match=f"^{name}: got .*; expected "):
            function(*qkv(), **spoilt)


def test_positions_may_be_traced():
    query, key, value = qkv()

    @jax.jit
    def decode(offset, origin):
        options = {"causal": True, **DROPOUT}
        return flash_attention(query[:, :1], key, value, q_offset=offset, origin=origin, **options)

    for row in (0, 7, 49):
        want = flash_attention(
            query[:, :1], key, value, causal=True, q_offset=row, origin=(0, 0, row, 0), **DROPOUT
        )
        got = decode(jnp.int32(row), jnp.array([0, 0, row, 0]))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("leading", [(), (1,), (6,), (2, 3), (1, 2, 3), (3, 0)])
def test_batch_dimensions_are_those_of_the_reshaped_call(leading):
    batch = int(np.prod(leading))
    arrays = qkv(batch=max(batch, 1))
    arrays = tuple(x[:batch] for x in arrays)
    flat = {
        "bias": normal(batch, 1, 40, 50),
        "attention_mask": normal(1, 4, 40, 50, seed=5) > -0.5,
        "q_segment_ids": np.zeros((batch, 40), int),
        "kv_segment_ids": np.arange(batch * 50).reshape(batch, 50) % 2,
        "q_positions": np.arange(40)[None],
        "kv_positions": np.arange(batch * 50).reshape(batch, 50) % 7,
    }
    ones = (1,) * len(leading)
    given_ = {
        name: x.reshape(*(leading if x.shape[0] == batch and name != "q_positions" else ones), *x.shape[1:])
        for name, x in flat.items()
        if batch != 1 or name != "attention_mask"
    }
    if batch == 1:
        del flat["attention_mask"]
    out, lse = flash_attention_with_lse(
        *(x.reshape(*leading, *x.shape[1:]) for x in arrays), **given_, causal=True
    )
    want, want_lse = flash_attention_with_lse(*arrays, **flat, causal=True)
    np.testing.assert_array_equal(out, want.reshape(*leading, *want.shape[1:]))
    np.testing.assert_array_equal(lse, want_lse.reshape(*leading, *want_lse.shape[1:]))
    got, weights = attention(*(x.reshape(*leading, *x.shape[1:]) for x in arrays))
    assert (got.shape, weights.shape) == (out.shape, (*leading, 4, 40, 50))


def test_a_bias_of_some_batch_dimensions_is_broadcast_over_the_others():
    """And its gradient is summed over them."""
    query, key, value = (x.reshape(2, 3, *x.shape[1:]) for x in qkv(batch=6))
    bias = normal(1, 3, 1, 40, 50)

    def total(bias):
        return jnp.sin(flash_attention(query, key, value, bias=bias)).sum()

    wide = jax.grad(total)(jnp.broadcast_to(bias, (2, 3, 1, 40, 50)))
    np.testing.assert_allclose(jax.grad(total)(bias), wide.sum(axis=0, keepdims=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("key", (3, 2, 50, 2, 24)),
        ("value", (50, 2, 16)),
        ("bias", (2, 2, 1, 40, 50)),
        ("q_segment_ids", (6, 40)),
    ],
)
def test_batch_dimensions_must_be_those_of_query(name, shape):
    query, key, value = (x.reshape(2, 3, *x.shape[1:]) for x in qkv(batch=6))
    arguments = {"query": query, "key": key, "value": value} | {name: jnp.zeros(shape)}
    with pytest.raises(ValueError, match=f"^{name}: got shape .*; expected the batch dimensions of query"):
        flash_attention(**arguments)


def test_a_sequence_without_a_batch_dimension_may_be_packed():
    query, key, value = qkv(batch=1)
    want = flash_attention(query, key, value, **PACKED)
    np.testing.assert_array_equal(flash_attention(query[0], key[0], value[0], **PACKED), want[0])


def test_offsets_of_sequences_have_no_batch_dimensions():
    query, key, value = qkv(batch=1)
    options = {**PACKED, "causal": True, "q_offset": jnp.arange(len(PACKED["cum_seqlens_q"]) - 1)}
    want = flash_attention(query, key, value, **options)
    np.testing.assert_array_equal(flash_attention(query[0], key[0], value[0], **options), want[0])
    lengths = {f"cum_seqlens_{side}": np.arange(7) * 9 for side in "qk"}
    offsets = {"causal": True, "q_offset": jnp.arange(6) - 2, **lengths}
    query, key, value = qkv(batch=6)
    want = flash_attention(query, key, value, **offsets)
    got = flash_attention(*(x.reshape(2, 3, *x.shape[1:]) for x in (query, key, value)), **offsets)
    np.testing.assert_array_equal(got, want.reshape(2, 3, *want.shape[1:]))


def test_a_random_key_is_the_seed_of_its_bits():
    key = jax.random.key(5)
    words = jax.random.bits(key, (2,), jnp.uint32)
    want = flash_attention(*qkv(), dropout_prob=0.5, dropout_seed=words)
    np.testing.assert_array_equal(flash_attention(*qkv(), dropout_prob=0.5, dropout_seed=key), want)
    traced = jax.jit(lambda key: flash_attention(*qkv(), dropout_prob=0.5, dropout_seed=key))
    np.testing.assert_allclose(traced(key), want, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"^dropout_seed: got 2 keys; expected one key"):
        flash_attention(*qkv(), dropout_prob=0.5, dropout_seed=jax.random.split(key))
