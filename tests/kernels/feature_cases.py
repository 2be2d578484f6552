"""The features of the clauses in cases that cross blocks, with what the clauses make of them.

Every option, every broadcast of a bias and every sharing of key heads is in some case; some head dims are
powers of two and some are not, some lengths are multiples of 16 and some are not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels.kernel_cases import normal, plain_attention, qkv, split_options

HIDING_BIAS = jnp.where(normal(2, 1, 1, 50, seed=3) < -0.8, -jnp.inf, normal(2, 1, 1, 50, seed=4))
SEGMENTS = {
    "q_segment_ids": np.array([[0] * 13 + [1] * 13 + [-1] * 8 + [5] * 6] * 2, np.int32),
    "kv_segment_ids": np.array([[0] * 19 + [1] * 17 + [-1] * 14] * 2, np.int32),
}
SHUFFLED_SEGMENTS = {
    "q_segment_ids": np.random.default_rng(6).integers(-1, 3, (2, 40), np.int32),
    "kv_segment_ids": np.random.default_rng(7).integers(-1, 3, (2, 50), np.int32),
}
PACKED = {
    "cum_seqlens_q": np.array([0, 13, 13, 29, 37], np.int32),
    "cum_seqlens_k": np.array([0, 9, 17, 44, 44], np.int32),
}
PADDED = {
    "cum_seqlens_q": np.array([0, 18, 18, 58], np.int32),
    "cum_seqlens_k": np.array([0, 50, 70, 97], np.int32),
}
DROPOUT = {"dropout_prob": 0.3, "dropout_seed": 2**40 + 7}

SLOPES = np.array([0.5, 0.25, 0.125, 1.0], np.float32)

POSITIONS = np.random.default_rng(11).integers(0, 50, 50)

# name: (shape arguments, options)
FEATURES = {
    "nothing": ({"q_length": 32, "k_length": 48}, {}),
    "scale, causal, more keys": ({}, {"softmax_scale": 0.7, "causal": True}),
    "causal, fewer keys, sinks, no shared heads": (
        {"q_length": 50, "k_length": 40, "k_heads": 4, "head_dim": 16, "value_dim": 80},
        {"causal": True, "softmax_aux": normal(2)},
    ),
    "window pair, cap, head_dim 1": (
        {"q_length": 48, "k_length": 32, "head_dim": 1},
        {"sliding_window": (2, 19), "logits_soft_cap": 1.5},
    ),
    "bias over rows, window to the left": ({}, {"bias": normal(1, 4, 1, 50), "sliding_window": (21, None)}),
    "bias, mask, sinks, one key head": (
        {"k_length": 48, "k_heads": 1, "head_dim": 80, "value_dim": 24},
        {
            "bias": normal(2, 4, 40, 48),
            "attention_mask": normal(1, 4, 40, 48, seed=5) > 0,
            "softmax_aux": normal(1, 4),
        },
    ),
    "bias hides, cap, segments, sinks": (
        {"value_dim": 1},
        {**SEGMENTS, "bias": HIDING_BIAS, "logits_soft_cap": 2.0, "softmax_aux": normal(4, 2)},
    ),
    "segments in any order, integer mask": (
        {},
        {**SHUFFLED_SEGMENTS, "attention_mask": np.arange(4000).reshape(2, 1, 40, 50) % 5},
    ),
    "padded lengths, causal": ({"batch": 3}, {**PADDED, "causal": True}),
    "packed lengths, window, sinks": (
        {"batch": 1},
        {**PACKED, "sliding_window": (2, 0), "softmax_aux": normal(4, 1)},
    ),
    "dropout, bias": ({}, {**DROPOUT, "bias": normal(1, 1, 40, 50)}),
    "dropout, causal, negative scale, one key head": (
        {"q_length": 48, "k_length": 48, "k_heads": 1},
        {**DROPOUT, "causal": True, "softmax_scale": -0.5},
    ),
    "offset of each batch entry, causal, window": (
        {},
        {"q_offset": np.array([4, -3]), "causal": True, "sliding_window": (12, None)},
    ),
    "offset of each packed sequence, window": (
        {"batch": 1},
        {**PACKED, "q_offset": np.array([3, 0, -2, 1]), "sliding_window": (4, 2)},
    ),
    "positions of rows in any order, padded lengths, sinks": (
        {"batch": 3},
        {**PADDED, "q_positions": POSITIONS[None, :40], "causal": True, "softmax_aux": normal(1, 2)},
    ),
    "a mask of keys, of heads; a bias of rows, cap, sinks": (
        {},
        {
            "attention_mask": normal(2, 4, 1, 50, seed=5) > -0.5,
            "bias": normal(2, 1, 40, 1),
            "logits_soft_cap": 2.0,
            "softmax_aux": normal(4, 2),
        },
    ),
    "a mask of rows, of heads; a bias of heads, cap": (
        {"k_length": 48, "k_heads": 1},
        {
            "attention_mask": normal(1, 4, 40, 1, seed=5) > -1,
            "bias": normal(1, 4, 1, 1),
            "logits_soft_cap": 1.0,
        },
    ),
    "a mask of keys, integer, causal; a bias that hides rows, dropout": (
        {},
        {
            "attention_mask": np.arange(100).reshape(2, 1, 1, 50) % 4,
            "bias": jnp.where(normal(1, 4, 40, 1, seed=3) < -1.2, -jnp.inf, normal(1, 4, 40, 1)),
            "causal": True,
            **DROPOUT,
        },
    ),
    "a mask of rows": ({}, {"attention_mask": normal(2, 1, 40, 1, seed=5) > -1, "softmax_aux": normal(1, 2)}),
    "ranges, sinks": (
        {},
        {
            "kv_start": (STARTS := np.random.default_rng(12).integers(-9, 45, (2, 40))),
            "kv_end": STARTS[::-1] + 9,
            "softmax_aux": normal(4, 1),
        },
    ),
    "a first key, causal, cap": (
        {},
        {"kv_start": np.arange(40)[None], "causal": True, "logits_soft_cap": 1.5},
    ),
    "a last key, packed lengths": (
        {"batch": 1},
        {**PACKED, "kv_end": np.arange(12, 52, dtype=np.int32)[None]},
    ),
    "chunks, causal, one key head": ({"k_heads": 1}, {"chunk_size": 18, "causal": True}),
    "chunks of rows in any order, padded lengths": (
        {"batch": 3},
        {**PADDED, "chunk_size": 7, "q_positions": POSITIONS[None, :40] - 9},
    ),
    "ALiBi of each batch entry, offsets, a last key of all entries": (
        {},
        {
            "alibi_slopes": np.random.default_rng(13).uniform(-0.25, 0.25, (2, 4)).astype(np.float32),
            "q_offset": np.array([4, -3]),
            "kv_end": np.arange(40)[None] + 7,
        },
    ),
    "ALiBi, packed lengths, causal, bias, cap": (
        {"batch": 1},
        {
            **PACKED,
            "alibi_slopes": SLOPES,
            "causal": True,
            "bias": normal(1, 1, 40, 50),
            "logits_soft_cap": 2.0,
        },
    ),
    "dropout that all entries share": ({"k_length": 48}, {**DROPOUT, "dropout_shared": "b"}),
    "dropout that all heads share, causal, bias": (
        {},
        {**DROPOUT, "dropout_shared": "h", "causal": True, "bias": normal(1, 4, 40, 50)},
    ),
    "dropout that all entries and heads share, origin": (
        {"k_heads": 1, "head_dim": 16},
        {**DROPOUT, "dropout_shared": "bh", "origin": (3, 5, 70, 2**30 + 8)},
    ),
    "dropout that all heads share, one query, origin": (
        {"batch": 1, "q_length": 1},
        {**DROPOUT, "dropout_shared": "h", "origin": (3, 5, 70, 8)},
    ),
    "origin, dropout, causal": ({}, {**DROPOUT, "causal": True, "origin": (3, 5, 70, 2**30 + 8)}),
}

# Of the implementations that take positions of keys.
KEY_POSITIONS = {
    "positions of keys in any order, causal": (
        {},
        {"kv_positions": POSITIONS[None], "q_offset": 5, "causal": True, "bias": normal(1, 1, 40, 50)},
    ),
    "positions of rows and keys, window, sinks": (
        {"k_heads": 1},
        {
            "q_positions": np.stack([POSITIONS[:40], POSITIONS[10:]]) * 100 - 900,
            "kv_positions": np.stack([POSITIONS[::-1], POSITIONS]) * 100,
            "sliding_window": (1500, 700),
            "softmax_aux": normal(1, 2),
        },
    ),
    "positions of keys, chunks, ranges": (
        {},
        {"kv_positions": POSITIONS[None] - 20, "chunk_size": 12, "kv_start": np.arange(40)[None] // 2},
    ),
    "positions of keys, ALiBi, window": (
        {},
        {"kv_positions": POSITIONS[None], "alibi_slopes": SLOPES, "q_offset": 5, "sliding_window": (30, 9)},
    ),
    "positions of keys, packed lengths": (
        {"batch": 1},
        {**PACKED, "kv_positions": POSITIONS[None], "sliding_window": (20, 5)},
    ),
}


def problem(name, dtype="float32"):
    """A case in a dtype: options, arrays, floats, cotangents of out and lse."""
    shapes, options = (FEATURES | KEY_POSITIONS)[name]
    arrays = qkv(**shapes, dtype=dtype)
    floats, rest = split_options(options)
    batch, q_length, heads, _ = arrays[0].shape
    d_out = normal(batch, q_length, heads, arrays[2].shape[3], seed=8, dtype=dtype)
    d_lse = normal(batch, heads, q_length, seed=9)
    return rest, arrays, cast(floats, dtype), (d_out, d_lse)


def expected(name, dtype="float32", lse=True):
    """What the clauses give it, in float32: (out, lse), or (out,), and the gradients of (arrays, floats)."""
    _, arrays, floats, (d_out, d_lse) = problem(name, dtype)
    d_lse = d_lse if lse else jnp.zeros_like(d_lse)
    primal, gradients = _plain(name)(*cast((arrays, floats, d_out, d_lse), "float32"))
    return primal if lse else primal[:1], gradients


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


@functools.cache
def _plain(name):
    _, options = (FEATURES | KEY_POSITIONS)[name]

    @jax.jit
    def run(arrays, floats, d_out, d_lse):
        def finite(arrays, floats):
            out, lse, _ = plain_attention(*arrays, options, floats)
            # The lse of an empty row has no gradient, and plain autodiff would make 0 * inf of it.
            return (out, jnp.where(lse == -jnp.inf, 0.0, lse)), lse

        (out, _), vjp, lse = jax.vjp(finite, arrays, floats, has_aux=True)
        return (out, lse), vjp((d_out, d_lse))

    return run


def assert_close(got, want, rtol=2e-5, atol=2e-5):
    want = dict(jax.tree_util.tree_leaves_with_path(want))
    for path, a in jax.tree_util.tree_leaves_with_path(got):
        np.testing.assert_allclose(a.astype(jnp.float32), want[path], rtol=rtol, atol=atol, err_msg=str(path))
