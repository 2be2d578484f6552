"""`jax.nn.dot_product_attention` on our kernels, against JAX's."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.kernels.adapters.jax_nn import dot_product_attention
from tests.adapters.roundings import check
from tests.examples import examples
from tests.kernels.kernel_cases import normal, qkv

QUERY, KEY, VALUE = qkv(2, 7, 9, 4, 2, 8, 8)
MASK = normal(2, 1, 7, 9) > -1.0
MASK = MASK.at[..., 0].set(True)
LENGTHS = {
    "query_seq_lengths": jnp.array([4, 7], jnp.int32),
    "key_value_seq_lengths": jnp.array([9, 5], jnp.int32),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "mask": {"mask": MASK},
    "a mask of two axes": {"mask": MASK[0, 0]},
    "causal from the first key": {"is_causal": True},
    "a window from the first key": {"local_window_size": (2, 1)},
    "one number as window": {"local_window_size": 2, "is_causal": True},
    "lengths": LENGTHS,
    "lengths of queries": {"query_seq_lengths": LENGTHS["query_seq_lengths"], "is_causal": True},
    "lengths of keys": {"key_value_seq_lengths": LENGTHS["key_value_seq_lengths"], "is_causal": True},
    "xla": {"implementation": "xla"},
    "all": {"mask": MASK, "is_causal": True, "local_window_size": (8, 8), "scale": 0.4, **LENGTHS},
}


def test_the_signature_is_that_of_jax() -> None:
    ours, theirs = (
        [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]
        for function in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_gradients_are_those_of_jax(name: str) -> None:
    options = OPTIONS[name]
    check(
        lambda *x: dot_product_attention(*x, **options),
        lambda *x: jax.nn.dot_product_attention(*x, **options),
        QUERY,
        KEY,
        VALUE,
    )


@pytest.mark.parametrize("shape", [(2, 4, 7, 9), (1, 4, 1, 9), (4, 7, 9), (7, 9)])
def test_a_bias_has_a_gradient(shape: tuple[int, ...]) -> None:
    check(dot_product_attention, jax.nn.dot_product_attention, QUERY, KEY, VALUE, normal(*shape))


def test_more_queries_than_keys() -> None:
    """JAX's order starts at the first key: the last queries see all keys."""
    arrays = qkv(1, 9, 5, 2, 2, 8, 8)
    check(
        lambda *x: dot_product_attention(*x, is_causal=True),
        lambda *x: jax.nn.dot_product_attention(*x, is_causal=True),
        *arrays,
    )


@pytest.mark.parametrize(
    "order", [{"is_causal": True}, {"local_window_size": (8, 1)}], ids=["causal", "window"]
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths_of_an_array_as_long_as_the_other_move_no_diagonal(
    lengths: str, order: dict[str, Any]
) -> None:
    options = {lengths: LENGTHS[lengths], **order}
    check(
        lambda *x: dot_product_attention(*x, **options),
        lambda *x: jax.nn.dot_product_attention(*x, **options),
        *qkv(2, 9, 9, 2, 2, 8, 8),
    )


@pytest.mark.parametrize("name", ["plain", "causal from the first key", "a mask of two axes"])
def test_arrays_without_a_batch(name: str) -> None:
    options = {**OPTIONS[name], "bias": normal(4, 7, 9)}
    arrays = (QUERY[0], KEY[0], VALUE[0])
    check(
        lambda *x: dot_product_attention(*x, **options),
        lambda *x: jax.nn.dot_product_attention(*x, **options),
        *arrays,
    )
    out, residual = dot_product_attention(*arrays, **options, return_residual=True)
    want = jax.nn.dot_product_attention(*arrays, **options, return_residual=True)
    assert (out.shape, residual.shape) == tuple(x.shape for x in want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_residual_is_the_logsumexp_without_a_gradient(dtype: str) -> None:
    arrays = tuple(x.astype(dtype) for x in (QUERY, KEY, VALUE))

    def residual(*arrays: Any, function: Any = dot_product_attention) -> Any:
        return function(*arrays, is_causal=True, return_residual=True)[1]

    found = residual(*arrays)
    want = residual(*arrays, function=jax.nn.dot_product_attention)
    assert (found.dtype, found.shape) == (want.dtype, want.shape)
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-8}[dtype]
    np.testing.assert_allclose(
        found.astype("float32"), want.astype("float32"), rtol=0, atol=8 * unit * float(abs(want).max())
    )
    for gradient in jax.grad(lambda *x: residual(*x).astype("float32").sum(), argnums=(0, 1, 2))(*arrays):
        assert not gradient.any()


def test_bfloat16() -> None:
    arrays = [x.astype("bfloat16") for x in (QUERY, KEY, VALUE)]
    options = OPTIONS["all"]
    assert dot_product_attention(*arrays, **options).dtype == jnp.bfloat16
    check(
        lambda *x: dot_product_attention(*x, **options),
        lambda *x: jax.nn.dot_product_attention(*x, **options),
        *arrays,
        dtype="bfloat16",
    )


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Sizes, and options by which every query sees the first key."""
    batch, q_length, heads = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 2, 4])),
    )
    k_length = draw(st.integers(1, 5))
    groups = draw(st.sampled_from([x for x in (1, 2, 4) if heads % x == 0]))
    options: dict[str, Any] = {"is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["local_window_size"] = (5, draw(st.integers(0, 5)))
    if draw(st.booleans()):
        pairs = (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), q_length, k_length)
        bits = draw(st.integers(0, 2**32 - 1))
        options["mask"] = (jax.random.bits(jax.random.key(bits), pairs) % 2 == 0).at[..., 0].set(True)
    for name, longest in (("query_seq_lengths", q_length), ("key_value_seq_lengths", k_length)):
        if draw(st.booleans()):
            some = st.integers(1, longest)
            options[name] = jnp.array(draw(st.lists(some, min_size=batch, max_size=batch)), jnp.int32)
    return (batch, q_length, k_length, heads, groups), options


@examples(4)
@given(calls())
def test_any_options_mean_what_they_mean_in_jax(call: Any) -> None:
    sizes, options = call
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        check(
            lambda *x: dot_product_attention(*x, **options),
            lambda *x: jax.nn.dot_product_attention(*x, **options),
            *qkv(*sizes, 4, 4),
        )


def test_a_query_that_sees_no_key_is_zero() -> None:
    mask = MASK.at[:, :, 2].set(False)
    out, residual = dot_product_attention(QUERY, KEY, VALUE, mask=mask, return_residual=True)
    assert not out[:, 2].any()
    assert np.isneginf(residual[:, 2]).all()
    assert jax.nn.dot_product_attention(QUERY, KEY, VALUE, mask=mask)[:, 2].any()


def test_what_is_hidden_counts_nothing() -> None:
    options: Any = LENGTHS
    hidden = VALUE.at[1, 5:].set(jnp.nan)
    np.testing.assert_array_equal(
        dot_product_attention(QUERY, KEY, hidden, **options),
        dot_product_attention(QUERY, KEY, VALUE, **options),
    )


def test_traced_lengths_beyond_the_array_are_all_of_it() -> None:
    lengths = jnp.array([4, 70], jnp.int32)

    @jax.jit
    def ours(lengths: Any) -> Any:
        return dot_product_attention(QUERY, KEY, VALUE, key_value_seq_lengths=lengths)

    np.testing.assert_array_equal(ours(lengths), ours(lengths.at[1].set(9)))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cudnn": ({"implementation": "cudnn"}, "implementation: got 'cudnn'; expected None or 'xla'"),
    "integer mask": ({"mask": jnp.ones((7, 9), int)}, "mask: got dtype int32; expected bool"),
    "mask of other sizes": ({"mask": jnp.ones((7, 8), bool)}, "mask: got shape"),
    "five axes": ({"bias": jnp.ones((1, 1, 1, 7, 9))}, "bias: got shape .* at most 4 axes"),
    "integer bias": ({"bias": jnp.ones((7, 9), int)}, "bias: got dtype int32"),
    "negative window": ({"local_window_size": (-1, 1)}, "local_window_size: got"),
    "scale": ({"scale": float("nan")}, "scale: got nan"),
    "causal": ({"is_causal": 1}, "is_causal: got 1"),
    "residual": ({"return_residual": 1}, "return_residual: got 1"),
    "too long": (
        {"query_seq_lengths": jnp.array([8, 1], jnp.int32)},
        "query_seq_lengths: got .* from 0 to 7",
    ),
    "negative": ({"key_value_seq_lengths": jnp.array([-1, 1], jnp.int32)}, "key_value_seq_lengths: got"),
    "one length": ({"key_value_seq_lengths": jnp.array([1], jnp.int32)}, "key_value_seq_lengths: got int32"),
    "float lengths": ({"key_value_seq_lengths": jnp.ones(2)}, "key_value_seq_lengths: got float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{message}"):
        dot_product_attention(QUERY, KEY, VALUE, **options)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((QUERY[None], KEY, VALUE), r"query: got shape \(1, 2, 7, 4, 8\); expected 4 axes"),
        ((QUERY, KEY.astype("bfloat16"), VALUE), "key: got dtype bfloat16; expected float32"),
        ((QUERY, KEY[..., :4], VALUE), "key: got head_dim 4; expected 8"),
        ((QUERY[:, :, :3], KEY, VALUE), "query: got 3 heads with 2 key heads"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(arrays: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        dot_product_attention(*arrays)
