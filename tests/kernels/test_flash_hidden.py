"""S4, S9 to S11: what is hidden contributes nothing whatever it holds; rows that see nothing stay finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.implementations import all_kernels, flash_kernels
from tests.kernels.kernel_cases import keep, normal, qkv, visible_pairs

D_OUT, D_LSE = normal(1, 40, 4, 16, seed=8), normal(1, 4, 40, seed=9)


def assert_equal(got, want):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=str(path))


def poison(x, at):
    """NaN and inf by turns of the last axis, at an index."""
    return x.at[at].set(jnp.where(jnp.arange(x.shape[-1]) % 2 == 0, jnp.nan, -jnp.inf))


# name: options, keys that no row sees, rows that see no key; of (1, 40 queries, 50 keys)
NOBODY_LOOKS = {
    "mask, dropout": (
        {
            "attention_mask": np.pad(np.ones((1, 1, 35, 43), bool), ((0, 0), (0, 0), (0, 5), (0, 7))),
            "dropout_prob": 0.4,
            "dropout_seed": 5,
        },
        slice(43, 50),
        slice(35, 40),
    ),
    "lengths": (
        {"cum_seqlens_q": np.array([0, 19, 35], np.int32), "cum_seqlens_k": np.array([0, 22, 43], np.int32)},
        slice(43, 50),
        slice(35, 40),
    ),
    "segments, sinks": (
        {
            "q_segment_ids": np.array([[0] * 19 + [1] * 16 + [-1] * 5], np.int32),
            "kv_segment_ids": np.array([[0] * 22 + [1] * 21 + [-1] * 5 + [5] * 2], np.int32),
            "softmax_aux": normal(4, 1),
        },
        slice(43, 50),
        slice(35, 40),
    ),
    "starts": ({"kv_start": (9 + np.arange(40) % 7)[None].astype(np.int32)}, slice(0, 9), slice(0, 0)),
    "bias": (
        {"bias": np.pad(normal(1, 4, 40, 43), ((0, 0),) * 3 + ((0, 7),), constant_values=-np.inf)},
        slice(43, 50),
        slice(0, 0),
    ),
    "window, cap": ({"sliding_window": (1, 0), "logits_soft_cap": 2.0}, slice(0, 9), slice(0, 0)),
}


@flash_kernels
@pytest.mark.parametrize("name", NOBODY_LOOKS)
def test_poison_where_nobody_looks(name, kernel):
    """NaN and inf in hidden keys, values, queries and cotangents change no bit of anything."""
    options, keys, rows = NOBODY_LOOKS[name]
    query, key, value = qkv(batch=1)
    run = kernel.under(options)
    clean = run((query, key, value), {}, (D_OUT, D_LSE))
    columns, lines = (slice(None), keys), (slice(None), rows)
    poisoned = poison(query, lines), poison(key, columns), poison(value, columns)
    # Only padding has an lse that depends on nothing.
    padding = "lengths" in name or "segments" in name
    d_lse = D_LSE.at[..., rows].set(jnp.nan) if padding else D_LSE
    got = run(poisoned, {}, (poison(D_OUT, lines), d_lse))
    assert_equal(got, clean)
    d_query, d_key, d_value = got[1][0]
    assert (d_query[:, rows] == 0).all()
    assert (d_key[:, keys] == 0).all()
    assert (d_value[:, keys] == 0).all()


# Row i sees keys i + 3 to i + 10, so key 30 is seen by rows 20 to 27, and they by keys 23 to 37.
BAND = {"causal": True, "sliding_window": (7, 0)}
SEEN, LOOKING, MET = 30, slice(20, 28), slice(23, 38)
VARIANTS = {
    "": {},
    "sinks, dropout": {"softmax_aux": normal(4, 2), "dropout_prob": 0.4, "dropout_seed": 5},
    "numerator, sinks": {"normalize_output": False, "softmax_aux": 9 + normal(4, 2)},
    "numerator, dropout": {"normalize_output": False, "dropout_prob": 0.4, "dropout_seed": 5},
}


def looks(variant):
    """[rows, query heads]: which give weight to the key 30 of key head 0, whose query heads are 0 and 1."""
    rows = np.zeros((40, 4), bool)
    rows[LOOKING, :2] = True
    if "dropout_prob" in variant:
        rows &= np.asarray(keep(*qkv(batch=1)[:2], variant))[0, :, :, SEEN].T
    return rows


@flash_kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_poison_reaches_only_what_sees_it(variant, kernel):
    """What does not see it is as it is without, to the bit; the rows that give it weight are NaN."""
    run = kernel.under(BAND | VARIANTS[variant])
    query, key, value = qkv(batch=1)
    (want, want_lse), (want_gradients, _) = run((query, key, value), {}, (D_OUT, D_LSE))

    # In two channels of a value: NaN in these channels of out, and no trace in lse and dvalue.
    stained = value.at[0, SEEN, 0, 3].set(jnp.nan).at[0, SEEN, 0, 5].set(jnp.inf)
    (out, lse), (gradients, _) = run((query, key, stained), {}, (D_OUT, D_LSE))
    reached = np.zeros(out.shape, bool)
    reached[0, :, :, [3, 5]] = looks(VARIANTS[variant])
    assert jnp.isnan(out[reached]).all()
    assert_equal(out[~reached], want[~reached])
    assert_equal(lse, want_lse)
    assert_equal(gradients[0][0, ~reached[0].any(-1)], want_gradients[0][0, ~reached[0].any(-1)])
    assert_equal(gradients[1].at[:, MET, 0].set(0), want_gradients[1].at[:, MET, 0].set(0))
    assert_equal(gradients[2], want_gradients[2])

    # In a key: NaN in all channels. Where it is dropped only lse says so: the numerator does not hold it.
    stained = key.at[0, SEEN, 0].set(jnp.nan)
    (out, lse), (gradients, _) = run((query, stained, value), {}, (D_OUT, D_LSE))
    assert jnp.isnan(out[0, looks(VARIANTS[variant])]).all()
    reached = looks({})
    assert jnp.isnan(lse[0, reached.T]).all()
    assert_equal(out[0, ~reached], want[0, ~reached])
    assert_equal(lse[0, ~reached.T], want_lse[0, ~reached.T])
    assert_equal(gradients[0][0, ~reached], want_gradients[0][0, ~reached])
    assert_equal(gradients[1].at[:, MET, 0].set(0), want_gradients[1].at[:, MET, 0].set(0))


@flash_kernels
@pytest.mark.parametrize("normalized", [True, False])
def test_a_query_that_is_not_finite_reaches_only_the_keys_that_it_sees(normalized, kernel):
    run = kernel.under(BAND | {"normalize_output": normalized})
    query, key, value = qkv(batch=1)
    row = 20
    (want, _), (want_gradients, _) = run((query, key, value), {}, (D_OUT, D_LSE))
    stained = query.at[0, row, 0, 3].set(jnp.nan)
    (out, _), (gradients, _) = run((stained, key, value), {}, (D_OUT, D_LSE))
    assert jnp.isnan(out[0, row, 0]).all()
    assert_equal(out.at[0, row, 0].set(0), want.at[0, row, 0].set(0))
    assert_equal(gradients[0].at[0, row, 0].set(0), want_gradients[0].at[0, row, 0].set(0))
    seen = slice(23, 31)
    for got, clean in zip(gradients[1:], want_gradients[1:], strict=True):
        assert jnp.isnan(got[0, seen, 0]).all()
        assert_equal(got.at[0, seen, 0].set(0), clean.at[0, seen, 0].set(0))


HIDES_PAIRS = {
    "causal": {"causal": True},
    "window": {"sliding_window": (1, 1)},
    "mask": {"attention_mask": np.arange(2000).reshape(1, 1, 40, 50) % 3 > 0},
    "segments": {
        "q_segment_ids": np.array([[0] * 19 + [1] * 16 + [-1] * 5], np.int32),
        "kv_segment_ids": np.array([[0] * 22 + [1] * 28], np.int32),
    },
    "packed": {
        "cum_seqlens_q": np.array([0, 19, 35], np.int32),
        "cum_seqlens_k": np.array([0, 22, 43], np.int32),
    },
}


@flash_kernels
@pytest.mark.parametrize("hides", HIDES_PAIRS)
@pytest.mark.parametrize("shape", [(1, 4, 40, 50), (1, 1, 1, 50)])
def test_poison_in_a_hidden_bias(shape, hides, kernel):
    """NaN and inf in bias entries that no visible pair reads change no bit, not even through a cap (S4)."""
    arrays, options = qkv(batch=1), HIDES_PAIRS[hides] | {"logits_soft_cap": 2.0}
    visible, _ = visible_pairs(*arrays[:2], options)
    read = visible.any(axis=tuple(axis for axis, size in enumerate(shape) if size == 1), keepdims=True)
    clean = normal(*shape)
    poison = jnp.where(jnp.arange(50) % 3 == 0, jnp.inf, jnp.nan)
    run = kernel.under(options)
    want = run(arrays, {"bias": clean}, (D_OUT, D_LSE))
    got = run(arrays, {"bias": jnp.where(read, clean, poison)}, (D_OUT, D_LSE))
    assert_equal(got, want)
    assert (got[1][1]["bias"][~read] == 0).all()


@all_kernels
def test_minus_infinite_bias_hides(kernel):
    """Also under a cap, where it would otherwise become -cap; its own gradient is 0."""
    arrays = qkv(batch=1)
    bias = jnp.zeros((1, 1, 40, 50)).at[..., 18:30].set(-jnp.inf).at[:, :, 1].set(-jnp.inf)
    mask = bias == 0
    cap = {"logits_soft_cap": 2.0}
    hidden, gradients = kernel.under(cap)(arrays, {"bias": bias}, (D_OUT, D_LSE))
    masked, expected = kernel.under({**cap, "attention_mask": mask})(arrays, {}, (D_OUT, D_LSE))
    assert_equal(hidden, masked)
    assert_equal(gradients[0], expected[0])
    assert (gradients[1]["bias"][~mask] == 0).all()
    assert np.isfinite(gradients[1]["bias"]).all()


@flash_kernels
def test_empty_rows_and_padding_with_sinks(kernel):
    """S11: an empty row has the lse of its sinks, which its d_lse reaches; S9: a padding row has neither."""
    arrays, sinks = qkv(batch=1), normal(4, 2)
    empty, padding = slice(10, 25), slice(25, 40)
    options = {
        "q_segment_ids": np.array([[0] * 10 + [7] * 15 + [-1] * 15], np.int32),
        "kv_segment_ids": np.zeros((1, 50), np.int32),
    }
    cotangents = D_OUT.at[:, :10].set(0), D_LSE.at[..., :10].set(0)
    (out, lse), gradients = kernel.under(options)(arrays, {"softmax_aux": sinks}, cotangents)
    assert (out[:, 10:] == 0).all()
    of_sinks = jnp.broadcast_to(jax.nn.logsumexp(sinks, axis=-1)[:, None], (4, 15))
    np.testing.assert_allclose(lse[0, :, empty], of_sinks, rtol=1e-6)
    assert (lse[..., padding] == -jnp.inf).all()
    expected = jax.nn.softmax(sinks, axis=-1) * D_LSE[0, :, empty].sum(axis=-1)[:, None]
    np.testing.assert_allclose(gradients[1]["softmax_aux"], expected, rtol=1e-5)
    assert all((x == 0).all() for x in gradients[0])


@all_kernels
@pytest.mark.parametrize(
    ("shapes", "sinks"),
    [({"q_length": 0}, None), ({"k_length": 0}, None), ({"k_length": 0}, 2), ({"batch": 0}, 1)],
)
def test_zero_lengths(shapes, sinks, kernel):
    """Nothing to attend from, or to: empty outputs or empty rows, and finite gradients."""
    arrays = qkv(**shapes)
    floats = {} if sinks is None else {"softmax_aux": normal(4, sinks)}
    if shapes.get("k_length") == 0:
        floats["bias"] = normal(1, 1, 1, 0)
    batch, q_length = arrays[0].shape[:2]
    cotangents = normal(batch, q_length, 4, 16), normal(batch, 4, q_length)
    (out, *lse), gradients = kernel.under({"causal": True})(arrays, floats, cotangents)
    assert out.shape == (batch, q_length, 4, 16)
    assert (out == 0).all()
    want = -np.inf if sinks is None else jax.nn.logsumexp(floats["softmax_aux"], axis=-1)[None, :, None]
    for x in lse:
        np.testing.assert_allclose(x, np.broadcast_to(want, (batch, 4, q_length)), rtol=1e-6)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, (arrays, floats))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
