"""S20: every malformed argument is refused by name, with what was got, what was expected and what to do."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attest
from attest.kernels import operations
from attest.kernels.call.call import check_call
from attest.kernels.xla import ChunkSizes, attention, flash_attention

F32 = np.float32
Q, K, V = np.zeros((2, 5, 4, 8), F32), np.zeros((2, 7, 2, 8), F32), np.zeros((2, 7, 2, 6), F32)
Q1, K1, V1 = Q[:1], K[:1], V[:1]
NAN, INF = float("nan"), float("inf")


def ints(*entries, dtype="int32"):
    return np.array(entries, dtype)


def ids(*shape, dtype="int32"):
    return np.zeros(shape, dtype)


# (argument that must be named, words that must appear, options; query, key and value where they are the
# point)
MALFORMED = [
    ("query", "4 axes", {"query": Q[0]}),
    ("query", "list", {"query": [[1.0]]}),
    ("query", "int32", {"query": Q.astype("int32")}),
    ("query", "x.astype('float32')", {"query": Q.astype("float64")}),
    ("query", ">f4", {"query": Q.astype(">f4")}),
    ("query", "MaskedArray", {"query": np.ma.masked_array(Q)}),
    ("query", "multiple of the key heads", {"query": Q[:, :, :3]}),
    ("query", "at least one head", {"query": Q[:, :, :0]}),
    ("query", "at least one head", {"query": Q[..., :0], "key": K[..., :0]}),
    ("key", "4 axes", {"key": K[0]}),
    ("key", "dtype of query", {"key": K.astype("float16")}),
    ("key", "batch of query", {"key": K[:1]}),
    ("key", "head_dim", {"key": K[..., :4]}),
    ("key", "at least one head", {"key": K[:, :, :0], "value": V[:, :, :0]}),
    ("value", "dtype of query", {"value": V.astype("float16")}),
    ("value", "those of key", {"value": V[:, :5]}),
    ("value", "those of key", {"value": V[:, :, :1]}),
    ("value", "batch of query", {"value": V[:1]}),
    ("attention_mask", "float32", {"attention_mask": np.ones((1, 1, 5, 7), F32)}),
    ("attention_mask", "A mask of 0 and 1? Pass it as bool", {"attention_mask": np.ones((5, 7), F32)}),
    ("attention_mask", "(2, 7)", {"attention_mask": np.ones((2, 7), bool)}),
    ("attention_mask", "(1, 3, 5, 7)", {"attention_mask": np.ones((1, 3, 5, 7), bool)}),
    ("attention_mask", "(1, 1, 7, 5)", {"attention_mask": np.ones((1, 1, 7, 5), bool)}),
    ("bias", "int32", {"bias": np.ones((1, 1, 5, 7), "int32")}),
    ("bias", "x.astype('float32')", {"bias": np.ones((1, 1, 5, 7))}),
    ("bias", ">f2", {"bias": np.ones((1, 1, 5, 7), ">f2")}),
    ("bias", "(3, 1, 5, 7)", {"bias": np.ones((3, 1, 5, 7), F32)}),
    ("bias", "(1, 1, 1, 5, 7)", {"bias": np.ones((1, 1, 1, 5, 7), F32)}),
    ("bias", "(7,)", {"bias": np.ones(7, F32)}),
    ("attention_mask", "attention_mask[:, None]", {"attention_mask": np.ones((2, 5, 7), bool)}),
    ("attention_mask", "[2 or 1, 4 or 1, 5 or 1, 7 or 1]", {"attention_mask": np.ones((1, 5), bool)}),
    ("bias", "a float", {"bias": 1.0}),
    ("softmax_scale", "finite", {"softmax_scale": NAN}),
    ("softmax_scale", "finite", {"softmax_scale": INF}),
    ("softmax_scale", "float32 holds", {"softmax_scale": 1e39}),
    ("softmax_scale", "float32 holds", {"softmax_scale": -(10**400)}),
    ("softmax_scale", "number", {"softmax_scale": [[1], [1, 2]]}),
    ("softmax_scale", "number", {"softmax_scale": "1"}),
    ("softmax_scale", "number", {"softmax_scale": np.ones(2)}),
    ("softmax_scale", "number", {"softmax_scale": True}),
    ("logits_soft_cap", "positive", {"logits_soft_cap": 0.0}),
    ("logits_soft_cap", "positive", {"logits_soft_cap": -1.0}),
    ("logits_soft_cap", "finite", {"logits_soft_cap": NAN}),
    ("logits_soft_cap", "float32 holds", {"logits_soft_cap": 10**400}),
    ("logits_soft_cap", "from 7.9e-31 to 1.3e+30", {"logits_soft_cap": 3.4e38}),
    ("logits_soft_cap", "from 7.9e-31 to 1.3e+30", {"logits_soft_cap": 1e-39}),
    ("dropout_prob", "from 0 to below 1", {"dropout_prob": 1.0, "dropout_seed": 0}),
    ("dropout_prob", "from 0 to below 1", {"dropout_prob": -0.1, "dropout_seed": 0}),
    ("dropout_prob", "finite", {"dropout_prob": NAN, "dropout_seed": 0}),
    ("dropout_prob", "finite", {"dropout_prob": 10**400, "dropout_seed": 0}),
    ("dropout_seed", "2**64", {"dropout_prob": 0.5, "dropout_seed": 10**5000}),
    ("dropout_seed", "a seed where dropout_prob > 0", {"dropout_prob": 0.5}),
    ("dropout_seed", "2**64", {"dropout_prob": 0.5, "dropout_seed": 2**64}),
    ("dropout_seed", "2**64", {"dropout_seed": -1}),
    ("dropout_seed", "integer", {"dropout_prob": 0.5, "dropout_seed": 1.5}),
    ("dropout_seed", "integer", {"dropout_prob": 0.5, "dropout_seed": np.zeros(3, "uint32")}),
    ("dropout_seed", "integer", {"dropout_prob": 0.5, "dropout_seed": True}),
    ("dropout_shared", "'b', 'h', 'bh' or None", {"dropout_shared": "hb"}),
    ("dropout_shared", "'b', 'h', 'bh' or None", {"dropout_shared": ""}),
    ("dropout_shared", "'b', 'h', 'bh' or None", {"dropout_shared": True}),
    ("dropout_shared", "'b', 'h', 'bh' or None", {"dropout_shared": ["b"]}),
    ("causal", "bool", {"causal": 1}),
    ("chunk_size", "from 1 to", {"chunk_size": 0}),
    ("chunk_size", "from 1 to", {"chunk_size": 2**31}),
    ("chunk_size", "integer", {"chunk_size": 2.0}),
    ("alibi_slopes", "array", {"alibi_slopes": 0.5}),
    ("alibi_slopes", "float32", {"alibi_slopes": np.ones(4)}),
    ("alibi_slopes", "float32", {"alibi_slopes": np.ones(4, "int32")}),
    ("alibi_slopes", "[4], or [2 or 1, 4]", {"alibi_slopes": np.ones(2, F32)}),
    ("alibi_slopes", "[4], or [2 or 1, 4]", {"alibi_slopes": np.ones((3, 4), F32)}),
    ("alibi_slopes", "[4], or [2 or 1, 4]", {"alibi_slopes": np.ones((2, 4, 1), F32)}),
    ("alibi_slopes", "nan; expected finite", {"alibi_slopes": np.array([1, 1, NAN, 1], F32)}),
    ("alibi_slopes", "1.84e+19", {"alibi_slopes": np.array([1, 1, -INF, 1], F32)}),
    ("kv_start", "int32 or int64", {"kv_start": np.zeros((1, 5), np.uint32)}),
    ("kv_start", "array", {"kv_start": 3}),
    ("kv_start", "[2 or 1, 5]", {"kv_start": np.zeros(5, np.int32)}),
    ("kv_end", "[2 or 1, 5]", {"kv_end": np.zeros((2, 7), np.int32)}),
    ("kv_end", "int32 or int64", {"kv_end": np.zeros((2, 5))}),
    ("sliding_window", "sides >= 0", {"sliding_window": -1}),
    ("sliding_window", "sides >= 0", {"sliding_window": (1, -2)}),
    ("sliding_window", "integer", {"sliding_window": 1.5}),
    ("sliding_window", "integer", {"sliding_window": True}),
    ("sliding_window", "pair", {"sliding_window": (1, 2, 3)}),
    ("sliding_window", "integer", {"sliding_window": np.array([1, 2])}),
    ("softmax_aux", "num_sinks", {"softmax_aux": np.ones((3, 1), F32)}),
    ("softmax_aux", "num_sinks", {"softmax_aux": np.ones((1, 4, 1), F32)}),
    ("softmax_aux", "num_sinks", {"softmax_aux": np.ones(0, F32)}),
    ("softmax_aux", "num_sinks", {"softmax_aux": np.ones((1, 0), F32)}),
    ("softmax_aux", "softmax_aux[:, None]", {"softmax_aux": np.ones(4, F32)}),
    ("softmax_aux", "softmax_aux[None, :]", {"softmax_aux": np.ones(4, F32)}),
    ("softmax_aux", "x.astype('float32')", {"softmax_aux": np.ones((4, 1))}),
    ("softmax_aux", "int32", {"softmax_aux": np.ones(4, "int32")}),
    ("q_segment_ids", "both or neither", {"kv_segment_ids": ids(2, 7)}),
    ("kv_segment_ids", "both or neither", {"q_segment_ids": ids(2, 5)}),
    ("q_segment_ids", "(2, 5)", {"q_segment_ids": ids(2, 7), "kv_segment_ids": ids(2, 7)}),
    ("kv_segment_ids", "(2, 7)", {"q_segment_ids": ids(2, 5), "kv_segment_ids": ids(1, 7)}),
    ("q_segment_ids", "integer", {"q_segment_ids": ids(2, 5, dtype=F32), "kv_segment_ids": ids(2, 7)}),
    (
        "q_segment_ids",
        "int32",
        {"q_segment_ids": ids(2, 5, dtype="int64") + 2**31, "kv_segment_ids": ids(2, 7)},
    ),
    ("cum_seqlens_q", "both or neither", {"cum_seqlens_k": ints(0, 7, 14)}),
    ("cum_seqlens_k", "both or neither", {"cum_seqlens_q": ints(0, 5, 10)}),
    ("cum_seqlens_q", "[3]", {"cum_seqlens_q": ints(0, 5), "cum_seqlens_k": ints(0, 7)}),
    (
        "cum_seqlens_q",
        "int32 or int64",
        {"cum_seqlens_q": ints(0, 5, 10, dtype="uint8"), "cum_seqlens_k": ints(0, 7, 14)},
    ),
    (
        "cum_seqlens_q",
        "fit in int32",
        {
            "cum_seqlens_q": ints(0, 2**63 - 1, -(2**63), dtype="int64"),
            "cum_seqlens_k": ints(0, 1, 2),
            "query": Q1,
        },
    ),
    ("cum_seqlens_k", ">i4", {"cum_seqlens_q": ints(0, 5, 10), "cum_seqlens_k": ints(0, 7, 14, dtype=">i4")}),
    ("cum_seqlens_q", "first entry", {"cum_seqlens_q": ints(1, 5, 10), "cum_seqlens_k": ints(0, 7, 14)}),
    ("cum_seqlens_k", "non-decreasing", {"cum_seqlens_q": ints(0, 5, 10), "cum_seqlens_k": ints(0, 7, 5)}),
    ("cum_seqlens_k", "at most 7", {"cum_seqlens_q": ints(0, 5, 10), "cum_seqlens_k": ints(0, 8, 10)}),
    (
        "cum_seqlens_q",
        "at most 5",
        {"cum_seqlens_q": ints(0, 3, 6), "cum_seqlens_k": ints(0, 1, 2), "query": Q1},
    ),
    ("cum_seqlens_q", "n >= 1", {"cum_seqlens_q": ints(0), "cum_seqlens_k": ints(0, 1), "query": Q1}),
    ("cum_seqlens_k", "that of", {"cum_seqlens_q": ints(0, 1), "cum_seqlens_k": ints(0, 1, 2), "query": Q1}),
]


@pytest.mark.parametrize(("name", "words", "options"), MALFORMED)
def test_malformed_arguments_are_refused_by_name(name, words, options):
    one = options.get("query") is Q1
    arguments = {"query": Q, "key": K1 if one else K, "value": V1 if one else V, **options}
    with pytest.raises(ValueError, match=f"^{name}: got ") as refusal:
        check_call(**arguments)
    assert words in str(refusal.value)
    assert "; expected " in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fwd_params", {"fwd_params": (64, 64)}),
        ("bwd_params", {"bwd_params": 64}),
        ("normalize_output", {"normalize_output": 1}),
        ("precision", {"precision": "most"}),
        ("logits_dtype", {"logits_dtype": "int8"}),
        ("bias", {"bias": np.ones(7, F32)}),
    ],
)
def test_flash_attention_refuses_its_own(name, options):
    with pytest.raises(ValueError, match=f"^{name}: got "):
        flash_attention(Q, K, V, **options)


@pytest.mark.parametrize(("name", "size"), [("q", 0), ("k", -1), ("k", 1.5), ("q", True)])
def test_chunk_sizes_are_positive_integers(name, size):
    with pytest.raises(ValueError, match=rf"^ChunkSizes\.{name}: got "):
        ChunkSizes(**{name: size})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dtype", {"dtype": "float64"}),
        ("softmax_dtype", {"softmax_dtype": "int32"}),
        ("deterministic", {"deterministic": None}),
        ("init_bias", {"init_bias": 3}),
        ("bias", {"init_bias": lambda: 3}),
        ("dropout_rng", {"dropout_rng": "key", "dropout_prob": 0.5, "deterministic": False}),
        ("dropout_seed", {"dropout_prob": 0.5, "deterministic": False}),
    ],
)
def test_attention_refuses_its_own(name, options):
    with pytest.raises(ValueError, match=f"^{name}: got "):
        attention(Q, K, V, **options)


@pytest.mark.parametrize(
    "name", ["softmax_scale", "logits_soft_cap", "dropout_prob", "sliding_window", "causal"]
)
def test_options_must_be_static(name):
    with pytest.raises(ValueError, match=f"^{name}: got a traced value"):
        jax.jit(lambda option: check_call(Q, K, V, dropout_seed=1, **{name: option}).query)(1)


def test_traced_seed_must_be_two_words():
    def run(seed):
        return check_call(Q, K, V, dropout_prob=0.5, dropout_seed=seed).dropout_seed

    np.testing.assert_array_equal(jax.jit(run)(jnp.array([3, 1], jnp.uint32)), run(3 + 2**32))
    with pytest.raises(ValueError, match=r"^dropout_seed: got a traced value.*uint32 \[2\]"):
        jax.jit(run)(3)


def test_canonical_form():
    lengths = {"cum_seqlens_q": ints(0, 5, 5), "cum_seqlens_k": ints(0, 0, 7)}
    call = check_call(Q, K, V, sliding_window=3, attention_mask=np.full((1, 1, 5, 7), 2**32), **lengths)
    assert call.sliding_window == (3, 3)
    assert call.softmax_scale == 1 / 8**0.5
    assert call.dropout_seed is None
    # A 64-bit mask is compared before it is narrowed.
    assert call.attention_mask.all()
    assert check_call(Q, K, V, sliding_window=[None, 0]).sliding_window == (None, 0)
    assert check_call(Q, K, V).sliding_window == (None, None)


@pytest.mark.parametrize(
    "options",
    [{"dropout_prob": 0.5, "dropout_seed": 2**40}, {"causal": True, "q_offset": 2}, {"origin": (1, 2, 3, 8)}],
    ids=lambda options: list(options)[-1],
)
def test_numbers_are_no_transfer_that_a_guard_refuses(options):
    arrays = [jax.device_put(x) for x in (Q, K, V)]
    with jax.transfer_guard("disallow"):
        for x in (flash_attention(*arrays, **options), jax.jit(partial(flash_attention, **options))(*arrays)):
            assert x.shape == (2, 5, 4, 6)


def test_lengths_and_ids_of_64_bits():
    """As NumPy's cumsum and JAX's x64 mode make them."""
    lengths = {"cum_seqlens_q": ints(0, 5, 5, dtype="int64"), "cum_seqlens_k": ints(0, 0, 7, dtype="int64")}
    segments = {"q_segment_ids": ids(2, 5, dtype="int64"), "kv_segment_ids": ids(2, 7, dtype="uint64")}
    call = check_call(Q, K, V, **lengths, **segments)
    for name, given in (lengths | segments).items():
        assert getattr(call, name).dtype == np.int32
        np.testing.assert_array_equal(getattr(call, name), given)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (1, 4), (4, 3), (4, 1), (4, 4), (1,)])
def test_sinks_have_an_axis_of_heads(shape):
    """One axis is shared by all heads, where it cannot be one sink a head."""
    call = check_call(Q, K, V, softmax_aux=np.ones(shape, F32))
    assert call.softmax_aux.shape == (shape if len(shape) == 2 else (1, *shape))
    # A single head has no two readings.
    single = (x[:, :, :1] for x in (Q, K, V))
    assert check_call(*single, softmax_aux=np.ones(1, F32)).softmax_aux.shape == (1, 1)


SEGMENTS = [
    ([0, 1, 2**31, 2**32 - 1], [2**31, 7, 0, 0], "uint32"),
    ([0, 3, 2**32 - 1, 5], [5, 2**32 - 1, 2**31 - 1, 4], "uint32"),
    ([-1, 2**32, 0, -(2**40)], [0, 2**32, 2**33, -(2**40)], "int64"),
    ([2**63, 0, 2**31, 3], [3, 3, 2**63, 2**63 + 1], "uint64"),
]


@pytest.mark.parametrize(("q_ids", "kv_ids", "dtype"), SEGMENTS)
def test_traced_ids_beyond_int32_see_their_equals(q_ids, kv_ids, dtype):
    """S8: nothing can be refused by value there, and nothing may wrap around."""
    with jax.enable_x64(dtype != "uint32"):
        q_ids, kv_ids = np.array([q_ids], dtype), np.array([kv_ids], dtype)

        @jax.jit
        def seen(q_ids, kv_ids):
            call = check_call(Q1[:, :4], K1[:, :4], V1[:, :4], q_segment_ids=q_ids, kv_segment_ids=kv_ids)
            assert call.q_segment_ids.dtype == call.kv_segment_ids.dtype == np.int32
            q, k = call.q_segment_ids, call.kv_segment_ids
            return (q[..., :, None] == k[..., None, :]) & (q >= 0)[..., None]

        equal = (q_ids[..., :, None] == kv_ids[..., None, :]) & (q_ids >= 0)[..., None]
        np.testing.assert_array_equal(seen(q_ids, kv_ids), equal)


def test_ids_that_a_jitted_function_closes_over_are_checked():
    wide = jnp.asarray(ids(2, 5, dtype="uint32") + np.uint32(2**31))
    with pytest.raises(ValueError, match=r"^q_segment_ids: got ids from 2147483648"):
        jax.jit(lambda q: check_call(q, K, V, q_segment_ids=wide, kv_segment_ids=ids(2, 7)).query)(Q)


@pytest.mark.found_outside
@pytest.mark.parametrize("scale", [1e38, -1.4e30, -1e-40])
@pytest.mark.parametrize("function", [attest.flash_attention, attest.attention, operations.flash_attention])
def test_a_scale_whose_products_overflow_or_vanish_is_refused(function, scale):
    array = np.ones((1, 2, 1, 4), F32)
    expected = r"softmax_scale: got .*; expected 0, or a number from 7\.9e-31 to 1\.3e\+30"
    with pytest.raises(ValueError, match=expected):
        function(array, array, array, softmax_scale=scale)
