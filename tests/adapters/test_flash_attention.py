"""`attest.kernels.adapters.flash_attention` against the oracle: options, layouts, caches and refusals."""

import inspect
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attest.kernels.adapters.flash_attention import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from attest.reference.oracle import Cotangents, attention
from attest.reference.problem import make_problem
from tests.adapters.exact import assert_close, assert_exact, normal
from tests.examples import examples

B, SQ, SK, HQ, HKV, D = 2, 5, 7, 4, 2, 8
ARRAYS = {
    "query": normal(B, SQ, HQ, D, seed=1),
    "key": normal(B, SK, HKV, D, seed=2),
    "value": normal(B, SK, HKV, 6, seed=3),
}
QKV = tuple(ARRAYS.values())
PACKED = tuple(x.reshape(-1, *x.shape[2:]) for x in QKV)

sides = st.sampled_from([-1, 0, 1, 3, 9])


def seen_by(window: tuple[int, int], causal: bool, rows: int = SQ, keys: int = SK) -> np.ndarray:
    """Who sees whom, [rows, keys], in the words of FlashAttention's documentation."""
    i, j = np.arange(rows)[:, None] + keys - rows, np.arange(keys)[None]
    left, right = window
    seen = np.ones((rows, keys), bool)
    if left != -1:
        seen &= j >= i - left
    if right != -1:
        seen &= j <= i + right
    return seen & (j <= i) if causal else seen


@examples(6)
@given(
    st.booleans(),
    st.tuples(sides, sides),
    st.sampled_from([0.0, 0.5, 20.0]),
    st.none() | st.sampled_from([0.25, -1.0]),
    st.sampled_from([0.0, 0.4]),
    st.booleans(),
)
def test_options(
    causal: bool,
    window: tuple[int, int],
    cap: float,
    scale: float | None,
    dropout: float,
    deterministic: bool,
) -> None:
    """Windows and causal order end in the bottom-right corner; -1 and 0.0 are off."""
    options = {
        "attention_mask": np.broadcast_to(seen_by(window, causal), (1, 1, SQ, SK)),
        "logits_soft_cap": cap or None,
        "softmax_scale": scale,
        "dropout_prob": dropout,
        "dropout_seed": 2**40 + 7,
    }

    def call(query: Any, key: Any, value: Any) -> jax.Array:
        return flash_attn_func(
            query, key, value, dropout, scale, causal, window, cap, None, deterministic,
            dropout_seed=2**40 + 7,
        )  # fmt: skip

    assert_exact(call, ARRAYS, options=options)


@pytest.mark.parametrize("rows", [1, SQ, SK, 9])
def test_causal_order_with_any_lengths(rows: int) -> None:
    query = normal(B, rows, HQ, D, seed=5)
    out, lse, probabilities = flash_attn_func(query, *QKV[1:], causal=True, return_attn_probs=True)
    seen = np.broadcast_to(seen_by((-1, 0), False, rows), (1, 1, rows, SK))
    want = attention(make_problem(query, *QKV[1:], attention_mask=seen))
    assert probabilities is None
    assert lse.dtype == jnp.float32
    assert_close("out", out, want.out, 2e-5)
    np.testing.assert_allclose(lse, want.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks(chunk: int) -> None:
    def call(query: Any, key: Any, value: Any) -> jax.Array:
        return flash_attn_func(query, key, value, attention_chunk=chunk)

    assert_exact(call, ARRAYS, options={"chunk_size": chunk})


def test_packed_arrays() -> None:
    q, k, v = (normal(B, SQ, HQ, D, seed=n) for n in range(3))
    want = flash_attn_func(q, k, v, 0.0, 0.5, True, (2, -1), 9.0)
    options = (0.0, 0.5, True, (2, -1), 9.0, None, True, True)
    out, lse, _ = flash_attn_qkvpacked_func(np.stack([q, k, v], 2), *options)
    np.testing.assert_array_equal(out, want)
    again, _, _ = flash_attn_kvpacked_func(q, np.stack([k, v], 2), *options)
    np.testing.assert_array_equal(again, want)
    assert lse.shape == (B, HQ, SQ)


@st.composite
def cumulative(draw: Any, count: int, total: int) -> np.ndarray:
    """Where each of the sequences begins and the last one ends, before or at the end of the array."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=count, max_size=count)))
    return np.array([0, *cuts], draw(st.sampled_from([np.int32, np.int64])))


@settings(max_examples=15)
@given(st.data(), st.integers(1, 4), st.booleans(), st.tuples(sides, sides), st.booleans())
def test_sequences(data: Any, count: int, causal: bool, window: tuple[int, int], traced: bool) -> None:
    """S9: out, lse and all gradients of packed sequences, with order and windows in each of them."""
    q_at, k_at = data.draw(cumulative(count, B * SQ)), data.draw(cumulative(count, B * SK))
    longest = [int(np.diff(x).max()) for x in (q_at, k_at)]

    def call(q: Any, k: Any, v: Any, q_at: Any, k_at: Any) -> Any:
        return flash_attn_varlen_func(
            q, k, v, q_at, k_at, *longest, causal=causal, window_size=window, return_attn_probs=True
        )[:2]

    if traced:
        call = jax.jit(call)
    (out, lse), pull = jax.vjp(lambda *xs: call(*xs, q_at, k_at), *PACKED)
    d_out, d_lse = normal(*out.shape, seed=8), normal(*lse.shape, seed=9)
    gradients = pull((jnp.asarray(d_out), jnp.asarray(d_lse)))
    left, right = (None if side == -1 else side for side in window)
    options = {"causal": causal, "sliding_window": (left, right)}
    cumulated = {name: x.astype(np.int32) for name, x in (("cum_seqlens_q", q_at), ("cum_seqlens_k", k_at))}
    problem = make_problem(*(x[None] for x in PACKED), **options, **cumulated)
    want = attention(problem, cotangents=Cotangents(d_out[None], d_lse[None]))
    assert_close("out", out, want.out[0], 2e-5)
    np.testing.assert_allclose(lse, want.lse[0], rtol=1e-5, atol=1e-5)
    for name, gradient in zip(("dquery", "dkey", "dvalue"), gradients, strict=True):
        assert_close(name, gradient, getattr(want, name)[0], 2e-5)


@examples(8)
@given(
    st.lists(st.integers(0, SK), min_size=B, max_size=B),
    st.none() | st.lists(st.integers(0, 3), min_size=B, max_size=B),
    st.booleans(),
    st.tuples(sides, sides),
    st.booleans(),
)
def test_caches(lengths: list[int], pad: Any, causal: bool, window: tuple[int, int], traced: bool) -> None:
    """The last row of each entry stands at its last key that counts."""
    seen = np.zeros((B, 1, SQ, SK), bool)
    for entry, length in enumerate(lengths):
        first = 0 if pad is None else pad[entry]
        seen[entry, 0, :, :length] = seen_by(window, causal, SQ, length)
        seen[entry, 0, :, :first] = False

    def call(lengths: Any, pad: Any) -> Any:
        return flash_attn_with_kvcache(
            *QKV, cache_seqlens=lengths, cache_leftpad=pad, causal=causal, window_size=window,
            return_softmax_lse=True,
        )  # fmt: skip

    if traced:
        call = jax.jit(call)
    out, lse = call(np.array(lengths, np.int32), None if pad is None else np.array(pad, np.int32))
    want = attention(make_problem(*QKV, attention_mask=seen))
    assert_close("out", out, want.out, 2e-5)
    np.testing.assert_allclose(lse, want.lse, rtol=1e-5, atol=1e-5)


def test_a_cache_of_one_length_and_a_whole_one() -> None:
    whole = flash_attn_with_kvcache(*QKV, causal=True)
    np.testing.assert_array_equal(whole, flash_attn_func(*QKV, causal=True))
    np.testing.assert_array_equal(flash_attn_with_kvcache(*QKV, cache_seqlens=SK, causal=True), whole)


SLOPES = np.linspace(0.1, 0.4, HQ, dtype=np.float32)


@pytest.mark.parametrize("lengths", [None, (3, 6)])
def test_slopes_count_from_the_last_key_that_counts(lengths: Any) -> None:
    out = flash_attn_with_kvcache(
        *QKV, cache_seqlens=None if lengths is None else np.int32(lengths), alibi_slopes=SLOPES
    )
    ends = np.array(lengths or (SK, SK))[:, None, None]
    i, j = np.arange(SQ)[:, None] + ends - SQ, np.arange(SK)[None]
    bias = np.where(j < ends, -np.abs(i - j), -np.inf)[:, None] * SLOPES[:, None, None]
    want = attention(make_problem(*QKV, bias=bias.astype(np.float32)))
    assert_close("out", out, want.out, 2e-5)


def test_slopes_of_packed_sequences() -> None:
    at = (np.array([0, 4, B * SQ], np.int32), np.array([0, 5, B * SK], np.int32))
    out = flash_attn_varlen_func(*PACKED, *at, B * SQ, B * SK, alibi_slopes=SLOPES)
    cumulated = dict(zip(("cum_seqlens_q", "cum_seqlens_k"), at, strict=True))
    want = attention(make_problem(*(x[None] for x in PACKED), alibi_slopes=SLOPES, **cumulated))
    assert_close("out", out, want.out[0], 2e-5)
    with pytest.raises(NotImplementedError, match=r"^alibi_slopes: got shape \(2, 4\); expected \[heads\]"):
        flash_attn_varlen_func(*PACKED, *at, B * SQ, B * SK, alibi_slopes=np.stack([SLOPES] * 2))


@pytest.mark.found_outside
@examples(6)
@given(st.data(), st.booleans(), st.tuples(sides, sides), st.sampled_from(["", "starts", "used", "all"]))
def test_used_keys_of_sequences(data: Any, causal: bool, window: tuple[int, int], traced: str) -> None:
    """The last row of a sequence stands at the last key that is used, as FlashAttention counts them."""
    q_at, k_at = data.draw(cumulative(3, B * SQ)), data.draw(cumulative(3, B * SK))
    used = np.array([data.draw(st.integers(0, int(n))) for n in np.diff(k_at)], np.int32)
    seen = np.zeros((B * SQ, B * SK), bool)
    for (q_first, q_end), first, count in zip(pairwise(q_at), k_at[:-1], used, strict=True):
        part = seen[q_first:q_end, first : first + count]
        part[:] = seen_by(window, causal, q_end - q_first, count)
    names = ("q_at", "k_at", "used")
    arrays = dict(zip(names, (q_at.astype(np.int32), k_at.astype(np.int32), used), strict=True))
    known = {
        name: arrays[name] for name in {"starts": names[2:], "used": names[:2], "": names}.get(traced, ())
    }

    def call(tokens: Any, unknown: Any) -> Any:
        at = {**known, **unknown}
        return flash_attn_varlen_func(
            *tokens, at["q_at"], at["k_at"], B * SQ, B * SK, causal=causal, window_size=window,
            return_attn_probs=True, seqused_k=at["used"],
        )[:2]  # fmt: skip

    unknown = {name: x for name, x in arrays.items() if name not in known}
    out, lse = (jax.jit(call) if unknown else call)(PACKED, unknown)
    want = attention(make_problem(*(x[None] for x in PACKED), attention_mask=seen[None, None]))
    assert_close("out", out, want.out[0], 2e-5)
    np.testing.assert_allclose(lse, want.lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.found_outside
def test_slopes_count_from_the_last_used_key() -> None:
    at = (np.array([0, 4, B * SQ], np.int32), np.array([0, 5, B * SK], np.int32))
    used = np.array([3, 9], np.int32)
    out = flash_attn_varlen_func(*PACKED, *at, B * SQ, B * SK, alibi_slopes=SLOPES, seqused_k=used)
    bias = np.full((1, HQ, B * SQ, B * SK), -np.inf, np.float32)
    for (q_first, q_end), first, count in zip(pairwise(at[0]), at[1][:-1], used, strict=True):
        i, j = np.arange(q_end - q_first)[:, None] + count - (q_end - q_first), np.arange(count)[None]
        bias[0, :, q_first:q_end, first : first + count] = -np.abs(i - j) * SLOPES[:, None, None]
    want = attention(make_problem(*(x[None] for x in PACKED), bias=bias))
    assert_close("out", out, want.out[0], 2e-5)


@pytest.mark.found_outside
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("starts", [None, [0, 4, 10], np.array(0), np.zeros(1, int), np.zeros(3, "m8[s]")])
def test_cumulative_lengths_are_needed(name: str, starts: Any) -> None:
    given = {"cu_seqlens_q": AT, "cu_seqlens_k": AT, name: starts}
    with pytest.raises(ValueError, match=f"^{name}: got "):
        flash_attn_varlen_func(*PACKED, **given, max_seqlen_q=6, max_seqlen_k=6)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: got a NoneType; expected a JAX or NumPy array"):
        flash_attn_varlen_func(*PACKED, None, None, 6, 6)


def test_slopes_beside_a_cap_are_refused() -> None:
    """Theirs joins the logits behind the cap."""
    with pytest.raises(
        NotImplementedError, match=r"^alibi_slopes: got slopes beside softcap 5; expected one"
    ):
        flash_attn_func(*QKV, softcap=5.0, alibi_slopes=SLOPES)


# The order and the defaults of flash_attn 2.8, with `...` where there is none.
SIGNATURES = {
    flash_attn_func: {"q": ..., "k": ..., "v": ...},
    flash_attn_kvpacked_func: {"q": ..., "kv": ...},
    flash_attn_qkvpacked_func: {"qkv": ...},
    flash_attn_varlen_func: dict.fromkeys(
        ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), ...
    ),
}
SHARED = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_signatures(function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    found = {
        x.name: ... if x.default is x.empty else x.default for x in parameters if x.kind != x.KEYWORD_ONLY
    }
    last = {"block_table": None} if function is flash_attn_varlen_func else {}
    assert list(found.items()) == list((SIGNATURES[function] | SHARED | last).items())


AT = np.array([0, 4, 10], np.int32)
REFUSED = {
    "dropout without a seed": (
        ValueError, "^dropout_seed: got None; .*torch's generator", lambda: flash_attn_func(*QKV, 0.1)
    ),
    "a share of 1": (ValueError, "^dropout_p: got 1", lambda: flash_attn_func(*QKV, 1.0, dropout_seed=1)),
    "a window of -2": (
        ValueError, r"^window_size: got \(-2, 0\)", lambda: flash_attn_func(*QKV, window_size=(-2, 0))
    ),
    "a window of one side": (
        ValueError, "^window_size: got 3", lambda: flash_attn_func(*QKV, window_size=3)
    ),
    "a negative cap": (ValueError, "^softcap: got -1", lambda: flash_attn_func(*QKV, softcap=-1.0)),
    "a negative chunk": (
        ValueError, "^attention_chunk: got -1", lambda: flash_attn_func(*QKV, attention_chunk=-1)
    ),
    "deterministic as a number": (
        ValueError, "^deterministic: got 1", lambda: flash_attn_func(*QKV, deterministic=1)
    ),
    "probabilities as a number": (
        ValueError, "^return_attn_probs: got 1", lambda: flash_attn_func(*QKV, return_attn_probs=1)
    ),
    "packed in another order": (
        ValueError, r"^kv: got shape \(2, 2, 7", lambda: flash_attn_kvpacked_func(
            QKV[0], np.zeros((2, 2, 7, 2, 8), "f")
        )
    ),
    "packed as a list": (ValueError, "^qkv: got a list", lambda: flash_attn_qkvpacked_func([1])),
    "sequences with a batch": (
        ValueError, r"^q: got shape \(2, 5", lambda: flash_attn_varlen_func(*QKV, AT, AT, 6, 6)
    ),
    "sequences that are longer": (
        ValueError, "^max_seqlen_k: got 5; expected at least 6",
        lambda: flash_attn_varlen_func(*PACKED, AT, AT, 6, 5),
    ),
    "pages": (
        NotImplementedError, "^block_table: got a list.*jnp.take",
        lambda: flash_attn_varlen_func(*PACKED, AT, AT, 6, 6, block_table=[1]),
    ),
    "slopes of each sequence": (
        NotImplementedError, "^alibi_slopes: got shape",
        lambda: flash_attn_varlen_func(*PACKED, AT, AT, 6, 6, alibi_slopes=np.zeros((2, HQ), "f")),
    ),
    "new keys": (
        NotImplementedError, "^k: got a ndarray.*dynamic_update_slice",
        lambda: flash_attn_with_kvcache(*QKV, QKV[1], QKV[2]),
    ),
    "rotary embeddings": (
        NotImplementedError, "^rotary_cos: got", lambda: flash_attn_with_kvcache(*QKV, rotary_cos=QKV[0])
    ),
    "splits": (
        NotImplementedError, "^num_splits: got 4", lambda: flash_attn_with_kvcache(*QKV, num_splits=4)
    ),
    "more used keys than the sequence has": (
        ValueError, "^seqused_k: got 5 for sequence 0; expected at most 4, its keys",
        lambda: flash_attn_varlen_func(*PACKED, AT, AT, 6, 6, seqused_k=np.array([5, 6])),
    ),
    "more used keys than any sequence has": (
        ValueError, "^seqused_k: got 8; expected numbers from 0 to 6",
        lambda: flash_attn_varlen_func(*PACKED, AT, AT, 6, 6, seqused_k=np.array([4, 8])),
    ),
    "used keys of other sequences": (
        ValueError, r"^seqused_k: got int64 of shape \(3,\)",
        lambda: flash_attn_varlen_func(*PACKED, AT, AT, 6, 6, seqused_k=np.array([4, 4, 4])),
    ),
    "a cache that is too short": (
        ValueError, "^cache_seqlens: got 8; expected numbers from 0 to 7",
        lambda: flash_attn_with_kvcache(*QKV, cache_seqlens=8),
    ),
    "lengths of floats": (
        ValueError, "^cache_seqlens: got float32",
        lambda: flash_attn_with_kvcache(*QKV, cache_seqlens=np.ones(B, np.float32)),
    ),
    "another batch": (
        ValueError, "^cache_leftpad: got int32 of shape",
        lambda: flash_attn_with_kvcache(*QKV, cache_leftpad=np.ones(3, np.int32)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    kind, message, call = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()
