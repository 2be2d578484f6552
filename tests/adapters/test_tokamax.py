"""`attest.kernels.adapters.tokamax` against the oracle: who sees whom, options, residuals and refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attest.kernels.adapters.tokamax import attention_op, dot_product_attention
from attest.reference.oracle import attention
from attest.reference.problem import make_problem
from tests.adapters.exact import assert_close, assert_exact, normal
from tests.adapters.tokamax_masks import HQ, SK, SQ, B, CausalMask, Mask, arrays_of, masks, visible
from tests.examples import examples

HKV, D = 2, 8
ARRAYS = {
    "query": normal(B, SQ, HQ, D, seed=1),
    "key": normal(B, SK, HKV, D, seed=2),
    "value": normal(B, SK, HKV, 6, seed=3),
}
QKV = tuple(ARRAYS.values())


@settings(max_examples=25)
@given(
    masks(),
    st.none() | arrays_of((B, HQ, SQ), -2, 8, full_last=True),
    st.none() | arrays_of((B, HQ, SK), -2, 8, full_last=True),
)
def test_a_mask_shows_what_tokamax_documents(mask: Mask, q_indices: Any, k_indices: Any) -> None:
    seen = visible(mask, q_indices, k_indices)

    def call(query: Any, key: Any, value: Any) -> jax.Array:
        return attention_op(query, key, value, mask=mask, q_indices=q_indices, k_indices=k_indices)

    assert_exact(call, ARRAYS, options={"attention_mask": seen})


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("offset", "window"), [(0, None), (0, 3), (1, 4), (-1, 2), (3, 1), (2, 0), (0, -1)])
def test_a_causal_mask(offset: int, window: int | None, traced: bool) -> None:
    """The edges of order and window, with numbers that are static and as arrays."""
    numbers = (offset, window)
    if traced:
        numbers = tuple(None if x is None else jnp.int32(x) for x in numbers)
    mask = CausalMask(*numbers)

    def call(query: Any, key: Any, value: Any) -> jax.Array:
        return attention_op(query, key, value, mask=mask)

    seen = visible(Mask(causal_mask=CausalMask(offset, window)))
    assert_exact(call, ARRAYS, options={"attention_mask": seen})


def test_causal_masks_count_together() -> None:
    mask = Mask(causal_mask=CausalMask(2, 4))
    seen = visible(mask) & visible(Mask(causal_mask=CausalMask(0)))

    def call(query: Any, key: Any, value: Any) -> jax.Array:
        return attention_op(query, key, value, mask=mask, is_causal=True)

    assert_exact(call, ARRAYS, options={"attention_mask": seen})


@examples(5)
@given(
    st.booleans(),
    st.none() | st.integers(0, 8) | st.tuples(st.integers(0, 8), st.integers(-2, 8)),
    st.none() | arrays_of((B,), 0, SQ),
    st.none() | arrays_of((B,), 0, SK),
    st.none() | st.sampled_from([(B, HQ, SQ, SK), (1, HQ, SQ, 1), (B, 1, 1, SK), (1, 1, SQ, SK)]),
    st.none() | st.sampled_from([0.5, 20.0]),
    st.none() | st.sampled_from([0.25, -1.0]),
)
def test_the_public_function(
    is_causal: bool, window: Any, q_lengths: Any, k_lengths: Any, bias: Any, cap: Any, scale: Any
) -> None:
    """Causal order and windows begin in the top-left corner, beside lengths, a bias, a cap and a scale."""
    left, right = (window, window) if isinstance(window, int) else (window or (SK, SK))
    i, j = np.arange(SQ)[:, None], np.arange(SK)[None]
    seen = np.ones((B, 1, SQ, SK), bool) & (j >= i - left) & (j <= i + right)
    if is_causal:
        seen = seen & (j <= i)
    if q_lengths is not None:
        seen = seen & (i < np.broadcast_to(q_lengths, B)[:, None, None, None])
    if k_lengths is not None:
        seen = seen & (j < np.broadcast_to(k_lengths, B)[:, None, None, None])
    arrays = ARRAYS if bias is None else ARRAYS | {"bias": normal(*bias, seed=4)}

    def call(**arrays: Any) -> jax.Array:
        return dot_product_attention(
            **arrays,
            is_causal=is_causal,
            local_window_size=window,
            query_seq_lengths=q_lengths,
            key_value_seq_lengths=k_lengths,
            logits_soft_cap=cap,
            scale=scale,
        )

    options = {"attention_mask": seen, "logits_soft_cap": cap, "softmax_scale": scale}
    assert_exact(call, arrays, options=options)


@pytest.mark.parametrize("leading", [(), (1,), (2, 1), (2, 3)])
def test_batch_dimensions(leading: tuple[int, ...]) -> None:
    """S27: the merged call, with ranges and masks that lack batch dimensions or have a 1 for them."""
    q, k, v = (normal(*leading, *x.shape[1:], seed=n) for n, x in enumerate(QKV))
    k_start = np.arange(SQ, dtype=np.int32) % 3
    ones = (1,) * len(leading)
    mask = Mask(causal_mask=CausalMask(1), k_start=k_start, q_end=np.full((*ones, 1, 1), 4, np.int32))
    got = attention_op(q, k, v, mask=mask)
    flat = [x.reshape(-1, *x.shape[len(leading) :]) for x in (q, k, v)]
    count = flat[0].shape[0]
    seen = np.broadcast_to(visible(mask_of_one(mask))[:1, :1], (count, 1, SQ, SK))
    want = attention(make_problem(*flat, attention_mask=seen)).out
    assert_close("out", got, want.reshape(got.shape), 2e-5)


def mask_of_one(mask: Mask) -> Mask:
    return Mask(causal_mask=mask.causal_mask, k_start=mask.k_start, q_end=np.array([4]))


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float16", "float32"),
        ("float16", "float16", "bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_dtypes_may_differ(dtypes: tuple[str, ...]) -> None:
    """The result has the dtype of query, and each gradient that of its array."""
    arrays = {name: jnp.asarray(x, dtype) for (name, x), dtype in zip(ARRAYS.items(), dtypes, strict=True)}
    assert dot_product_attention(**arrays).dtype == dtypes[0]
    exact = {name: np.asarray(x.astype(jnp.float32)) for name, x in arrays.items()}
    out, pull = jax.vjp(lambda xs: dot_product_attention(**xs), arrays)
    (gradients,) = pull(jnp.ones_like(out))
    want, want_pull = jax.vjp(lambda xs: dot_product_attention(**xs), exact)
    assert_close("out", out.astype(jnp.float32), np.asarray(want), 1e-2)
    for name, x in want_pull(jnp.ones_like(want))[0].items():
        assert gradients[name].dtype == arrays[name].dtype
        assert_close(name, gradients[name].astype(jnp.float32), np.asarray(x), 2e-2)


@examples(5)
@given(masks(), st.booleans(), st.sampled_from(["float32", "bfloat16"]))
def test_residuals_are_the_maximum_and_the_sum(mask: Mask, normalize: bool, dtype: str) -> None:
    q, k, v = (jnp.asarray(x, dtype) for x in QKV)
    out, (m, total) = attention_op(
        q, k, v, mask=mask, normalize_output=normalize, return_residuals=True, logits_scale=0.5
    )
    seen = visible(mask)
    wide = np.repeat(np.asarray(k, np.float64), HQ // HKV, 2)
    logits = 0.5 * np.einsum("bqhd,bkhd->bhqk", np.asarray(q, np.float64), wide)
    logits = np.where(seen, logits, -np.inf)
    some = seen.any(-1)
    peak = np.where(some, np.max(logits, -1, initial=-np.inf), np.finfo(np.float32).min)
    weights = np.where(seen, np.exp(np.where(seen, logits - peak[..., None], 0.0)), 0.0)
    assert m.dtype == total.dtype == jnp.float32
    np.testing.assert_allclose(m, peak, rtol=1e-5, atol=1e-5)
    assert_close("l", total, weights.sum(-1), 2e-5)
    if not normalize:
        values = np.repeat(np.asarray(v, np.float64), HQ // HKV, 2)
        want = np.einsum("bhqk,bkhd->bqhd", weights, values)
        assert_close("out", out.astype(jnp.float32), want, 2e-5 if dtype == "float32" else 2e-2)


def test_parts_of_the_keys_merge_by_their_residuals() -> None:
    parts = [
        attention_op(
            QKV[0], QKV[1][:, keys], QKV[2][:, keys], normalize_output=False, return_residuals=True,
            mask=Mask(k_end=np.array(ends)),
        )
        for keys, ends in ((slice(0, 4), [4, 0, 4, 0, 4]), (slice(4, 7), [3, 3, 3, 0, 0]))
    ]  # fmt: skip
    peak = jnp.maximum(parts[0][1][0], parts[1][1][0])
    numerator, total = 0, 0
    for out, (m, part) in parts:
        factor = jnp.exp(m - peak)
        numerator += out * jnp.swapaxes(factor, 1, 2)[..., None]
        total += part * factor
    total = jnp.swapaxes(total, 1, 2)[..., None]
    merged = jnp.where(total == 0, 0, numerator / total)
    seen = np.zeros((1, 1, SQ, SK), bool)
    for row, columns in enumerate(
        ([0, 1, 2, 3, 4, 5, 6], [4, 5, 6], [0, 1, 2, 3, 4, 5, 6], [], [0, 1, 2, 3])
    ):
        seen[..., row, columns] = True
    assert_close("out", merged, attention(make_problem(*QKV, attention_mask=seen)).out, 2e-5)


@examples(5)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5]), st.booleans(), st.booleans())
def test_a_dropout_mask_multiplies_the_weights(seed: int, rate: float, causal: bool, normalize: bool) -> None:
    """Forward and, where the output is normalised, all gradients, against the formula in float64."""
    keep = np.random.default_rng(seed).random((B, 1, SQ, SK)) < 0.6
    i, j = np.arange(SQ)[:, None], np.arange(SK)[None]
    seen = np.broadcast_to((j <= i - 1) | (not causal), (B, HQ, SQ, SK))
    factor = np.where(keep, 1 / (1 - rate), 0.0)

    def call(query: Any, key: Any, value: Any) -> jax.Array:
        mask = CausalMask(-1) if causal else None
        return attention_op(
            query, key, value, mask=mask, dropout_mask=keep, dropout_rate=rate, normalize_output=normalize
        )

    out, weights, wide = dropped(factor, seen, normalize)
    if not normalize:
        assert_close("out", call(**ARRAYS), out, 2e-5)
        return
    got, pull = jax.vjp(lambda xs: call(**xs), ARRAYS)
    assert_close("out", got, out, 2e-5)
    d_out = normal(*out.shape, seed=7).astype(np.float64)
    (gradients,) = pull(jnp.asarray(d_out, jnp.float32))
    d_weights = np.einsum("bqhd,bkhd->bhqk", d_out, wide[2]) * factor
    d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / np.sqrt(D)
    per_head = {
        "key": np.einsum("bhqk,bqhd->bkhd", d_logits, wide[0]),
        "value": np.einsum("bhqk,bqhd->bkhd", weights * factor, d_out),
    }
    assert_close("dquery", gradients["query"], np.einsum("bhqk,bkhd->bqhd", d_logits, wide[1]), 2e-5)
    for name, x in per_head.items():
        shared = x.reshape(B, SK, HKV, HQ // HKV, -1).sum(3)
        assert_close(f"d{name}", gradients[name], shared, 2e-5)


def dropped(factor: np.ndarray, seen: np.ndarray, normalize: bool) -> tuple[np.ndarray, np.ndarray, Any]:
    """out, the undropped weights, and query, key and value for every query head, in float64."""
    q, k, v = (np.repeat(x.astype(np.float64), HQ // x.shape[2], 2) for x in QKV)
    logits = np.where(seen, np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(D), -np.inf)
    peak = np.maximum(logits.max(-1, keepdims=True), -1e300)
    weights = np.exp(logits - peak)
    if normalize:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bhqk,bkhd->bqhd", weights * factor, v), weights, (q, k, v)


class AUTO:
    """tokamax's marker of a default."""


def test_defaults_of_tokamax_are_ours() -> None:
    got = attention_op(*QKV, logits_dtype=AUTO, logits_scale=AUTO, precision=("highest", "highest"))
    np.testing.assert_array_equal(got, attention_op(*QKV, logits_scale=D**-0.5, precision="highest"))


@pytest.mark.parametrize("name", [None, "xla", "xla_chunked", ["xla"], ("cudnn", "xla")])
def test_implementations_that_run_here(name: Any) -> None:
    if name == ("cudnn", "xla"):
        with pytest.raises(NotImplementedError, match="cudnn"):
            dot_product_attention(*QKV, implementation="cudnn")
    assert_exact(lambda **xs: dot_product_attention(**xs, implementation=name), ARRAYS, options={})


def test_all_implementations_may_fail() -> None:
    with pytest.raises(ExceptionGroup, match="all implementations failed") as raised:
        dot_product_attention(*QKV, implementation=("mosaic", "cudnn"))
    assert [type(error) for error in raised.value.exceptions] == [NotImplementedError] * 2


REFUSED = {
    "cudnn": (NotImplementedError, "^implementation: got 'cudnn'.*jax.nn", {"implementation": "cudnn"}),
    "unknown": (
        ValueError,
        "^implementation: got 'pallas'; expected one of xla",
        {"implementation": "pallas"},
    ),
    "none named": (ValueError, "^implementation: got an empty sequence", {"implementation": ()}),
    "mask of floats": (
        ValueError,
        "^mask: got dtype float32; expected bool",
        {"mask": np.ones((SQ, SK), "f")},
    ),
    "mask of another shape": (ValueError, r"^mask: got shape \(5, 6\)", {"mask": np.ones((SQ, 6), bool)}),
    "mask of no kind": (ValueError, "^mask: got a str", {"mask": "causal"}),
    "window of three": (ValueError, "^local_window_size: got", {"local_window_size": (1, 2, 3)}),
    "window of a float": (ValueError, "^local_window_size: got 1.5", {"local_window_size": 1.5}),
    "lengths of floats": (
        ValueError,
        "^query_seq_lengths: got dtype float32",
        {"query_seq_lengths": np.ones(B, np.float32)},
    ),
    "lengths as a list": (
        ValueError,
        "^key_value_seq_lengths: got a list",
        {"key_value_seq_lengths": [1, 2]},
    ),
    "lengths of another batch": (
        ValueError,
        "^key_value_seq_lengths: got shape",
        {"key_value_seq_lengths": np.ones(3, np.int32)},
    ),
    "is_causal as a number": (ValueError, "^is_causal: got 1", {"is_causal": 1}),
    "sharding as a spec": (
        ValueError,
        "^q_sharding: got a .*; expected a NamedSharding",
        {"q_sharding": jax.P("x")},
    ),
    "two precisions": (NotImplementedError, "^precision: got .*same", {"precision": ("high", "highest")}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_of_the_public_function(name: str) -> None:
    kind, message, options = REFUSED[name]
    with pytest.raises(kind, match=message):
        dot_product_attention(*QKV, **options)


OP_REFUSED = {
    "pages": (NotImplementedError, "^paging_info: got pages.*jnp.take", {"paging_info": object()}),
    "a rate without a mask": (ValueError, "^dropout_mask: got None", {"dropout_rate": 0.5}),
    "a rate of 1": (ValueError, "^dropout_rate: got 1", {"dropout_rate": 1.0}),
    "a mask of numbers": (
        ValueError,
        "^dropout_mask: got dtype int64; expected bool",
        {"dropout_mask": np.ones((SQ, SK), int)},
    ),
    "too few indices": (ValueError, "^q_indices: got shape", {"q_indices": np.ones((1, 1), np.int32)}),
    "a bound of floats": (
        ValueError,
        "^mask.k_end: got dtype float32",
        {"mask": Mask(k_end=np.ones(1, "f"))},
    ),
    "a float offset": (ValueError, "^mask.offset: got 0.5", {"mask": CausalMask(0.5)}),
    "k_sharding alone": (ValueError, "^k_sharding: got a str", {"k_sharding": "x"}),
}


@pytest.mark.parametrize("name", OP_REFUSED)
def test_refusals_of_the_operation(name: str) -> None:
    kind, message, options = OP_REFUSED[name]
    with pytest.raises(kind, match=message):
        attention_op(*QKV, **options)


def test_the_derivative_of_a_numerator_is_refused() -> None:
    """S26: tokamax differentiates the row maximum, and our kernels hold it constant."""
    with pytest.raises(NotImplementedError, match=r"^normalize_output: got a derivative"):
        jax.grad(lambda q: attention_op(q, *QKV[1:], normalize_output=False).sum())(QKV[0])
