"""S20: every malformed argument is refused by name, with what was got, what was expected and what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.arguments import check_call
from kernels.xla import ChunkSizes, attention, flash_attention

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
    ("query", "float64", {"query": Q.astype("float64")}),
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
    ("attention_mask", "(2, 7)", {"attention_mask": np.ones((2, 7), bool)}),
    ("attention_mask", "(1, 3, 5, 7)", {"attention_mask": np.ones((1, 3, 5, 7), bool)}),
    ("attention_mask", "(1, 1, 7, 5)", {"attention_mask": np.ones((1, 1, 7, 5), bool)}),
    ("bias", "int32", {"bias": np.ones((1, 1, 5, 7), "int32")}),
    ("bias", "float64", {"bias": np.ones((1, 1, 5, 7))}),
    ("bias", "(3, 1, 5, 7)", {"bias": np.ones((3, 1, 5, 7), F32)}),
    ("bias", "(1, 1, 5, 1)", {"bias": np.ones((1, 1, 5, 1), F32)}),
    ("bias", "a float", {"bias": 1.0}),
    ("softmax_scale", "finite", {"softmax_scale": NAN}),
    ("softmax_scale", "finite", {"softmax_scale": INF}),
    ("softmax_scale", "number", {"softmax_scale": "1"}),
    ("softmax_scale", "number", {"softmax_scale": np.ones(2)}),
    ("softmax_scale", "number", {"softmax_scale": True}),
    ("logits_soft_cap", "positive", {"logits_soft_cap": 0.0}),
    ("logits_soft_cap", "positive", {"logits_soft_cap": -1.0}),
    ("logits_soft_cap", "finite", {"logits_soft_cap": NAN}),
    ("dropout_prob", "< 1", {"dropout_prob": 1.0, "dropout_seed": 0}),
    ("dropout_prob", "< 1", {"dropout_prob": -0.1, "dropout_seed": 0}),
    ("dropout_prob", "finite", {"dropout_prob": NAN, "dropout_seed": 0}),
    ("dropout_seed", "a seed where dropout_prob > 0", {"dropout_prob": 0.5}),
    ("dropout_seed", "2**64", {"dropout_prob": 0.5, "dropout_seed": 2**64}),
    ("dropout_seed", "2**64", {"dropout_seed": -1}),
    ("dropout_seed", "integer", {"dropout_prob": 0.5, "dropout_seed": 1.5}),
    ("dropout_seed", "integer", {"dropout_prob": 0.5, "dropout_seed": np.zeros(3, "uint32")}),
    ("dropout_seed", "integer", {"dropout_prob": 0.5, "dropout_seed": True}),
    ("causal", "bool", {"causal": 1}),
    ("sliding_window", "sides >= 0", {"sliding_window": -1}),
    ("sliding_window", "sides >= 0", {"sliding_window": (1, -2)}),
    ("sliding_window", "integer", {"sliding_window": 1.5}),
    ("sliding_window", "integer", {"sliding_window": True}),
    ("sliding_window", "pair", {"sliding_window": (1, 2, 3)}),
    ("softmax_aux", "num_sinks", {"softmax_aux": np.ones((3, 1), F32)}),
    ("softmax_aux", "num_sinks", {"softmax_aux": np.ones((1, 4, 1), F32)}),
    ("softmax_aux", "num_sinks", {"softmax_aux": np.ones(0, F32)}),
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
        "int32",
        {"cum_seqlens_q": ints(0, 5, 10, dtype="int64"), "cum_seqlens_k": ints(0, 7, 14)},
    ),
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
        ("fwd_params.q", {"fwd_params": ChunkSizes(q=0)}),
        ("bwd_params.k", {"bwd_params": ChunkSizes(k=-1)}),
        ("bwd_params.k", {"bwd_params": ChunkSizes(k=1.5)}),
        ("normalize_output", {"normalize_output": 1}),
        ("precision", {"precision": "most"}),
        ("logits_dtype", {"logits_dtype": "int8"}),
        ("bias", {"bias": np.ones((1, 1, 1), F32)}),
    ],
)
def test_flash_attention_refuses_its_own(name, options):
    with pytest.raises(ValueError, match=f"^{name}: got "):
        flash_attention(Q, K, V, **options)


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
