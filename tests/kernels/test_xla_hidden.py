"""S4, S9 to S11: what is hidden contributes nothing whatever it holds; rows that see nothing stay finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import normal, qkv

from kernels.xla import ChunkSizes, attention, flash_attention_with_lse

SIZES = {"fwd_params": ChunkSizes(4, 3), "bwd_params": ChunkSizes(3, 4)}


def flash_run(options, arrays, floats, d_out, d_lse):
    def call(arrays, floats):
        return flash_attention_with_lse(*arrays, **options, **floats, **SIZES)

    primal, vjp = jax.vjp(call, arrays, floats)
    return primal, vjp((d_out, d_lse))


def materialised_run(options, arrays, floats, d_out, d_lse):
    def call(arrays, floats):
        return attention(*arrays, **options, **floats)[0]

    primal, vjp = jax.vjp(call, arrays, floats)
    return primal, vjp(d_out)


RUNS = pytest.mark.parametrize("run", [flash_run, materialised_run])


def assert_equal(got, want):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=str(path))


# name: options, keys that no row sees, rows that see no key; of (1, 6 queries, 9 keys)
NOBODY_LOOKS = {
    "mask": (
        {"attention_mask": np.pad(np.ones((1, 1, 4, 7), bool), ((0, 0), (0, 0), (0, 2), (0, 2)))},
        slice(7, 9),
        slice(4, 6),
    ),
    "lengths": (
        {"cum_seqlens_q": np.array([0, 2, 4], np.int32), "cum_seqlens_k": np.array([0, 3, 7], np.int32)},
        slice(7, 9),
        slice(4, 6),
    ),
    "segments": (
        {
            "q_segment_ids": np.array([[0, 0, 1, 1, -1, -1]], np.int32),
            "kv_segment_ids": np.array([[0, 0, 0, 1, 1, 1, 1, -1, 5]], np.int32),
        },
        slice(7, 9),
        slice(4, 6),
    ),
    "window": ({"sliding_window": (1, 0)}, slice(0, 2), slice(0, 0)),
}


@RUNS
@pytest.mark.parametrize("name", NOBODY_LOOKS)
def test_poison_where_nobody_looks(name, run):
    """NaN and inf in hidden keys, values, queries and cotangents change no bit of anything."""
    options, keys, rows = NOBODY_LOOKS[name]
    query, key, value = qkv(batch=1, q_length=6, k_length=9)
    d_out, d_lse = normal(1, 6, 4, 6), normal(1, 4, 6)
    floats = {"softmax_aux": normal(4, 1)} if name == "segments" else {}
    clean = run(options, (query, key, value), floats, d_out, d_lse)
    poisoned = (
        query.at[:, rows].set(jnp.nan),
        key.at[:, keys].set(jnp.inf).at[:, keys, :, 0].set(jnp.nan),
        value.at[:, keys].set(-jnp.inf).at[:, keys, :, 1].set(jnp.nan),
    )
    if name != "mask":
        d_lse = d_lse.at[..., rows].set(jnp.nan)
    got = run(options, poisoned, floats, d_out.at[:, rows].set(jnp.nan), d_lse)
    assert_equal(got, clean)
    d_query, d_key, d_value = got[1][0]
    assert (d_query[:, rows] == 0).all()
    assert (d_key[:, keys] == 0).all()
    assert (d_value[:, keys] == 0).all()


@RUNS
@pytest.mark.parametrize("where", ["key", "value"])
def test_poison_reaches_only_the_rows_that_see_it(where, run):
    """A NaN at the last key, causal: the last row sees it, and every other row computes as if it were 0."""
    query, key, value = qkv(batch=1, q_length=6, k_length=9)
    d_out, d_lse = normal(1, 6, 4, 6), normal(1, 4, 6)
    last = key.shape[1] - 1
    poisoned = {
        "key": (query, key.at[:, last].set(jnp.nan), value),
        "value": (query, key, value.at[:, last].set(jnp.nan)),
    }[where]
    got, got_gradients = run({"causal": True}, poisoned, {}, d_out, d_lse)
    want, want_gradients = run({"causal": True}, (query, key, value), {}, d_out, d_lse)
    out, wanted = (got[0], want[0]) if isinstance(got, tuple) else (got, want)
    assert_equal(out[:, :-1], wanted[:, :-1])
    assert jnp.isnan(out[:, -1]).all()
    assert_equal(got_gradients[0][0][:, :-1], want_gradients[0][0][:, :-1])


@RUNS
def test_minus_infinite_bias_hides(run):
    """Also under a cap, where it would otherwise become -cap; its own gradient is 0."""
    arrays = qkv(batch=1, q_length=3, k_length=5)
    bias = jnp.zeros((1, 1, 3, 5)).at[..., 2].set(-jnp.inf).at[:, :, 1].set(-jnp.inf)
    mask = bias == 0
    d_out, d_lse = normal(1, 3, 4, 6), normal(1, 4, 3)
    hidden, gradients = run({"logits_soft_cap": 2.0}, arrays, {"bias": bias}, d_out, d_lse)
    masked, expected = run({"logits_soft_cap": 2.0, "attention_mask": mask}, arrays, {}, d_out, d_lse)
    assert_equal(hidden, masked)
    assert_equal(gradients[0], expected[0])
    assert (gradients[1]["bias"][~mask] == 0).all()
    assert np.isfinite(gradients[1]["bias"]).all()


def test_empty_rows_and_padding_with_sinks():
    """S11: an empty row has the lse of its sinks, which its d_lse reaches; S9: a padding row has neither."""
    arrays, sinks = qkv(batch=1, q_length=3, k_length=4), normal(4, 2)
    options = {
        "q_segment_ids": np.array([[0, 7, -1]], np.int32),
        "kv_segment_ids": np.zeros((1, 4), np.int32),
    }
    d_out, d_lse = normal(1, 3, 4, 6), normal(1, 4, 3).at[..., 0].set(0)
    (out, lse), gradients = flash_run(options, arrays, {"softmax_aux": sinks}, d_out.at[:, 0].set(0), d_lse)
    assert (out[:, 1:] == 0).all()
    np.testing.assert_allclose(lse[0, :, 1], jax.nn.logsumexp(sinks, axis=-1), rtol=1e-6)
    assert (lse[..., 2] == -jnp.inf).all()
    expected = jax.nn.softmax(sinks, axis=-1) * d_lse[0, :, 1, None]
    np.testing.assert_allclose(gradients[1]["softmax_aux"], expected, rtol=1e-5)
    assert all((x == 0).all() for x in gradients[0])


@pytest.mark.parametrize(
    ("shapes", "sinks"),
    [({"q_length": 0}, None), ({"k_length": 0}, None), ({"k_length": 0}, 2), ({"batch": 0}, 1)],
)
def test_zero_lengths(shapes, sinks):
    """Nothing to attend from, or to: empty outputs or empty rows, and finite gradients."""
    arrays = qkv(**shapes)
    floats = {} if sinks is None else {"softmax_aux": normal(4, sinks)}
    out_shape = (*arrays[0].shape[:3], arrays[2].shape[3])
    lse_shape = (out_shape[0], out_shape[2], out_shape[1])
    (out, lse), gradients = flash_run(
        {"causal": True}, arrays, floats, normal(*out_shape), normal(*lse_shape)
    )
    assert out.shape == out_shape
    assert lse.shape == lse_shape
    assert (out == 0).all()
    want = -np.inf if sinks is None else jax.nn.logsumexp(floats["softmax_aux"], axis=-1)[None, :, None]
    np.testing.assert_allclose(lse, np.broadcast_to(want, lse_shape), rtol=1e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    again, _ = materialised_run({"causal": True}, arrays, floats, normal(*out_shape), None)
    assert_equal(again, out)
