"""What counts as one attention call: everything else is refused by the name of the argument."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attest.reference.problem import make_problem


def arrays(
    q_shape: tuple[int, ...] = (2, 3, 4, 5),
    k_shape: tuple[int, ...] = (2, 6, 2, 5),
    v_shape: tuple[int, ...] = (2, 6, 2, 7),
    dtype: Any = np.float32,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros(q_shape, dtype), np.zeros(k_shape, dtype), np.zeros(v_shape, dtype)


def cums(q: list[int], k: list[int], dtype: Any = np.int32) -> dict[str, np.ndarray]:
    return {"cum_seqlens_q": np.array(q, dtype), "cum_seqlens_k": np.array(k, dtype)}


SHAPES_REFUSED = [
    (arrays(q_shape=(2, 3, 5)), r"query: got shape \(2, 3, 5\), expected 4 axes"),
    (arrays(k_shape=(2, 6, 5)), "key: got shape"),
    (arrays(v_shape=(2, 6, 2, 7, 1)), "value: got shape"),
    (arrays(dtype=np.float64), "query: got dtype float64, expected float16, bfloat16 or float32"),
    (arrays(dtype=np.int32), "query: got dtype int32"),
    (arrays(q_shape=(2, 3, 0, 5)), "query: got shape .* at least one head"),
    (arrays(k_shape=(2, 6, 0, 5), v_shape=(2, 6, 0, 7)), "key: got shape .* at least one head"),
    (arrays(v_shape=(2, 6, 2, 0)), "value: got shape .* at least one head"),
    (arrays(k_shape=(1, 6, 2, 5)), "key: got shape .* batch 2 and head dim 5"),
    (arrays(k_shape=(2, 6, 2, 4)), "key: got shape .* batch 2 and head dim 5"),
    (arrays(k_shape=(2, 6, 3, 5), v_shape=(2, 6, 3, 7)), "key: got 3 heads, expected a divisor of query's 4"),
    (arrays(v_shape=(2, 5, 2, 7)), r"value: got shape .*\(2, 6, 2\) as key"),
    (arrays(v_shape=(2, 6, 1, 7)), "value: got shape"),
    (
        (*arrays()[:2], np.zeros((2, 6, 2, 7), np.float16)),
        "key and value: got dtypes float32, float16, expected float32",
    ),
    ((arrays()[0], arrays(dtype=ml_dtypes.bfloat16)[1], arrays()[2]), "key and value: got dtypes bfloat16"),
]

# For B = 2, Hq = 4, Sq = 3, Sk = 6.
OPTIONS_REFUSED = [
    ({"attention_mask": np.ones((2, 4, 3, 6), np.float32)}, "attention_mask: got dtype float32"),
    ({"attention_mask": np.ones((4, 3, 6), bool)}, "attention_mask: got shape"),
    ({"attention_mask": np.ones((3, 4, 3, 6), bool)}, "attention_mask: got shape"),
    (
        {"attention_mask": np.ones((2, 4, 2, 6), bool)},
        "attention_mask: .* each axis of which may be 1",
    ),
    ({"attention_mask": np.ones((2, 4, 3, 2), bool)}, "attention_mask: got shape"),
    ({"bias": np.ones((2, 4, 3, 6), bool)}, "bias: got dtype bool"),
    ({"bias": np.ones((2, 4, 3, 6), np.int32)}, "bias: got dtype int32"),
    ({"bias": np.ones((2, 4, 3, 2), np.float32)}, "bias: .* each axis of which may be 1"),
    ({"bias": np.ones((2, 2, 3, 6), np.float32)}, "bias: got shape"),
    ({"softmax_scale": float("nan")}, "softmax_scale: got nan, expected a finite number or None"),
    ({"softmax_scale": float("inf")}, "softmax_scale: got inf"),
    ({"logits_soft_cap": 0.0}, "logits_soft_cap: got 0.0"),
    ({"logits_soft_cap": -1.0}, "logits_soft_cap: got -1.0"),
    ({"logits_soft_cap": float("inf")}, "logits_soft_cap: got inf"),
    ({"logits_soft_cap": float("nan")}, "logits_soft_cap: got nan"),
    ({"dropout_prob": 1.0, "dropout_seed": 1}, "dropout_prob: got 1.0"),
    ({"dropout_prob": -0.1, "dropout_seed": 1}, "dropout_prob: got -0.1"),
    ({"dropout_prob": float("nan"), "dropout_seed": 1}, "dropout_prob: got nan"),
    ({"dropout_prob": 0.1}, "dropout_seed: got None, expected an integer of 64 bits"),
    ({"dropout_seed": -1}, "dropout_seed: got -1"),
    ({"dropout_seed": 2**64}, "dropout_seed: got 18446744073709551616"),
    ({"dropout_seed": 1.5}, "dropout_seed: got 1.5"),
    ({"dropout_shared": "hb"}, "dropout_shared: got 'hb', expected 'b', 'h', 'bh' or None"),
    ({"dropout_shared": ""}, "dropout_shared: got ''"),
    ({"dropout_shared": True}, "dropout_shared: got True"),
    ({"dropout_shared": ["b"]}, r"dropout_shared: got \['b'\]"),
    ({"dropout_keep": np.ones((2, 4, 3, 5), bool)}, r"dropout_keep: got bool \(2, 4, 3, 5\), expected bool"),
    ({"dropout_keep": np.ones((2, 4, 3, 6))}, "dropout_keep: got float64"),
    ({"sliding_window": -1}, "sliding_window: got -1"),
    ({"sliding_window": (0, -2)}, "sliding_window: got"),
    ({"sliding_window": (1,)}, "sliding_window: got"),
    ({"sliding_window": (1, 2, 3)}, "sliding_window: got"),
    ({"sliding_window": (1.5, 2)}, "sliding_window: got"),
    ({"softmax_aux": np.ones(2, np.int32)}, "softmax_aux: got dtype int32"),
    ({"softmax_aux": np.float32(1.0)}, r"softmax_aux: got shape \(\)"),
    ({"softmax_aux": np.ones(0, np.float32)}, "softmax_aux: got shape .* at least one sink"),
    (
        {"softmax_aux": np.ones((2, 3), np.float32)},
        r"softmax_aux: .* \[sinks\], \[1, sinks\] or \[4, sinks\]",
    ),
    ({"softmax_aux": np.ones((1, 4, 3), np.float32)}, "softmax_aux: got shape"),
    ({"q_segment_ids": np.zeros((2, 3), int)}, "q_segment_ids and kv_segment_ids: .* both or neither"),
    ({"kv_segment_ids": np.zeros((2, 6), int)}, "q_segment_ids and kv_segment_ids: .* both or neither"),
    (
        {"q_segment_ids": np.zeros((2, 3)), "kv_segment_ids": np.zeros((2, 6), int)},
        "q_segment_ids: got dtype float64",
    ),
    (
        {"q_segment_ids": np.zeros((2, 3), int), "kv_segment_ids": np.zeros((2, 6), np.uint8)},
        "kv_segment_ids: got dtype uint8, expected a signed int",
    ),
    (
        {"q_segment_ids": np.zeros((2, 3), int), "kv_segment_ids": np.zeros((2, 3), int)},
        r"kv_segment_ids: got shape \(2, 3\), expected \(2, 6\)",
    ),
    ({"cum_seqlens_q": np.int32([0, 1, 2])}, "cum_seqlens_q and cum_seqlens_k: .* both or neither"),
    ({"cum_seqlens_k": np.int32([0, 1, 2])}, "cum_seqlens_q and cum_seqlens_k: .* both or neither"),
    (cums([0, 1, 2], [0, 1]), r"cum_seqlens_k: got shape \(2,\), expected \(3,\), as cum_seqlens_q"),
    (cums([0, 1, 2], [0, 1, 2], np.int64), "cum_seqlens_q: got int64"),
    (cums([0], [0]), "cum_seqlens_q: .* n >= 1"),
    ({name: np.zeros((2, 2), np.int32) for name in cums([], [])}, "cum_seqlens_q: got int32 of shape"),
    (cums([1, 2, 3], [0, 1, 2]), r"cum_seqlens_q: got \[1, 2, 3\], expected a non-decreasing sequence"),
    (cums([0, 2, 1], [0, 1, 2]), "cum_seqlens_q: .* non-decreasing"),
    (cums([0, 1, 2], [0, 2, 1]), "cum_seqlens_k: .* non-decreasing"),
    (cums([0, 1, 2, 3], [0, 1, 2, 3]), "cum_seqlens_q: got 3 sequences, expected 2"),
    (cums([0, 1, 5], [0, 1, 2]), "cum_seqlens_q: .* lengths that fit into 3 tokens"),
    (cums([0, 1, 2], [0, 7, 8]), "cum_seqlens_k: .* lengths that fit into 6 tokens"),
    (
        {"q_offset": 1, "q_positions": np.zeros((2, 3), int)},
        "q_offset and q_positions: got both, expected at most one",
    ),
    ({"q_offset": np.zeros(2)}, "q_offset: got dtype float64, expected a signed int dtype"),
    ({"q_offset": np.zeros(2, np.uint8)}, "q_offset: got dtype uint8"),
    ({"q_offset": np.zeros(3, int)}, r"q_offset: got shape \(3,\), expected an integer or \[2\]"),
    ({"q_offset": np.zeros((2, 1), int)}, r"q_offset: got shape \(2, 1\)"),
    ({"q_offset": 2**30}, "q_offset: got 1073741824, expected numbers from -1073741824 to 1073741821"),
    ({"q_offset": -(2**70)}, "q_offset: got -1180591620717411303424"),
    ({"q_offset": np.array([0, -(2**30) - 1])}, r"q_offset: got \[0, -1073741825\]"),
    ({"q_positions": np.zeros((2, 3))}, "q_positions: got dtype float64, expected a signed int dtype"),
    ({"kv_positions": np.zeros((2, 6), np.uint32)}, "kv_positions: got dtype uint32"),
    (
        {"q_positions": np.zeros((2, 6), int)},
        r"q_positions: got shape \(2, 6\), expected \(2, 3\), the first",
    ),
    ({"q_positions": np.zeros(3, int)}, r"q_positions: got shape \(3,\)"),
    ({"kv_positions": np.zeros((3, 6), int)}, r"kv_positions: got shape \(3, 6\), expected \(2, 6\)"),
    (
        {"kv_positions": np.array([[0, 1, 2**30, 3, 4, 5]])},
        "kv_positions: got 1073741824, expected positions from -1073741824 to 1073741823",
    ),
    ({"q_positions": np.array([[0, 1, -(2**30) - 1]])}, "q_positions: got -1073741825"),
    ({"kv_start": np.zeros((2, 3))}, "kv_start: got dtype float64, expected a signed int dtype"),
    ({"kv_end": np.zeros((2, 6), int)}, r"kv_end: got shape \(2, 6\), expected \(2, 3\), the first"),
    ({"kv_end": np.zeros(3, int)}, r"kv_end: got shape \(3,\)"),
    ({"chunk_size": 0}, "chunk_size: got 0, expected an integer above 0"),
    ({"chunk_size": 2.0}, "chunk_size: got 2.0"),
    ({"chunk_size": True}, "chunk_size: got True"),
    ({"chunk_size": 2**31}, "chunk_size: got 2147483648"),
    ({"alibi_slopes": np.ones(2)}, "alibi_slopes: got dtype float64, expected float32"),
    ({"alibi_slopes": np.ones(3, np.float32)}, r"alibi_slopes: got shape \(3,\), expected \(4,\) or"),
    ({"alibi_slopes": np.ones((2, 1), np.float32)}, r"alibi_slopes: got shape \(2, 1\)"),
    ({"alibi_slopes": np.float32([1, 1, 1, np.nan])}, "alibi_slopes: got nan, expected finite numbers"),
    ({"alibi_slopes": np.float32([-(2.0**65), 1, 1, 1])}, "alibi_slopes: got -3.68"),
    ({"origin": (0, 0, 0)}, r"origin: got \(0, 0, 0\), expected four integers of at least 0"),
    ({"origin": 0}, "origin: got 0"),
    ({"origin": (0, 0, -1, 0)}, "origin: got"),
    ({"origin": (0, 0, 1.0, 0)}, "origin: got"),
    ({"origin": (0, 0, True, 0)}, "origin: got"),
    ({"origin": (0, 0, 0, 2**32 - 5)}, r"origin: .* below 2\*\*32"),
]


@pytest.mark.parametrize(("qkv", "message"), SHAPES_REFUSED)
def test_shapes_refused(qkv: tuple[np.ndarray, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_problem(*qkv)


@pytest.mark.parametrize(("options", "message"), OPTIONS_REFUSED)
def test_options_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_problem(*arrays(), **options)


def test_packed_lengths_have_to_fit_together() -> None:
    one = arrays((1, 3, 4, 5), (1, 6, 2, 5), (1, 6, 2, 7))
    assert make_problem(*one, **cums([0, 1, 1, 3], [0, 2, 4, 6])).batch == 1
    with pytest.raises(ValueError, match=r"cum_seqlens_q: .* lengths that fit into 3 tokens"):
        make_problem(*one, **cums([0, 2, 4], [0, 2, 4]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q_offset": 1.0}, "q_offset: got 1.0, expected an integer or an array of integers"),
        ({"q_offset": True}, "q_offset: got True"),
        ({"q_offset": [0, 1]}, "q_offset: got"),
        ({"q_positions": [[0, 1, 2]]}, "q_positions: got list, expected an array of integers"),
        ({"kv_positions": 1}, "kv_positions: got int, expected an array of integers"),
        ({"kv_end": 1}, "kv_end: got int, expected an array of integers"),
        ({"alibi_slopes": [1.0, 1.0]}, "alibi_slopes: got list, expected an array of float32"),
    ],
)
def test_types_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make_problem(*arrays(), **options)


def test_positions_are_kept_as_stored() -> None:
    positions = np.array([[0, 2**30 - 1, -(2**30)]])
    assert make_problem(*arrays(), q_positions=positions).q_positions is positions
    offset = np.array([-(2**30), 2**30 - 3])
    assert make_problem(*arrays(), q_offset=offset).q_offset is offset
    for one in (np.int8(3), np.array(3), 3):
        assert type(make_problem(*arrays(), q_offset=one).q_offset) is int


def test_offsets_of_packed_sequences_are_one_a_sequence() -> None:
    one = arrays((1, 3, 4, 5), (1, 6, 2, 5), (1, 6, 2, 7))
    three = cums([0, 1, 1, 3], [0, 2, 4, 6])
    make_problem(*one, **three, q_offset=np.array([1, 2, 3]))
    with pytest.raises(ValueError, match=r"q_offset: got shape \(1,\), expected an integer or \[3\]"):
        make_problem(*one, **three, q_offset=np.array([1]))


@pytest.mark.parametrize("origin", [None, (0, 0, 0, 0), [0, 0, 0, 0], np.zeros(4, int)])
def test_origins(origin: Any) -> None:
    assert make_problem(*arrays(), origin=origin).origin == (0, 0, 0, 0)
    largest = (2**32 - 2, 2**32 - 4, 2**32 - 3, 2**32 - 6)
    assert make_problem(*arrays(), origin=np.array(largest)).origin == largest


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match=r"unknown options \['scale'\]"):
        make_problem(*arrays(), scale=1.0)


def test_sizes() -> None:
    problem = make_problem(*arrays())
    sizes = (problem.batch, problem.q_len, problem.kv_len, problem.q_heads, problem.kv_heads)
    assert sizes == (2, 3, 6, 4, 2)
    assert (problem.group, problem.head_dim, problem.value_dim) == (2, 5, 7)
    assert problem.sinks() is None


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_arrays_are_kept_as_stored(dtype: Any) -> None:
    query, key, value = arrays(dtype=dtype)
    problem = make_problem(query, key, value)
    assert problem.query is query
    assert problem.key is key
    assert problem.value is value


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint8, np.int64])
def test_a_mask_is_true_where_it_is_not_zero(dtype: Any) -> None:
    mask = np.array([0, 1, 0, 1, 1, 1]).astype(dtype) * np.ones((1, 1, 3, 1), dtype)
    problem = make_problem(*arrays(), attention_mask=mask)
    assert problem.attention_mask is not None
    assert problem.attention_mask.dtype == np.bool_
    assert problem.attention_mask[0, 0, 0].tolist() == [False, True, False, True, True, True]


@pytest.mark.parametrize(
    ("window", "sides"),
    [(2, (2, 2)), (np.int32(2), (2, 2)), ((None, 1), (None, 1)), ([0, None], (0, None)), (None, None)],
)
def test_windows(window: Any, sides: Any) -> None:
    assert make_problem(*arrays(), sliding_window=window).sliding_window == sides


def test_numbers_become_python_numbers() -> None:
    """A float32 scalar would otherwise pull float64 arithmetic down to its own precision."""
    problem = make_problem(
        *arrays(),
        softmax_scale=np.float32(0.1),
        logits_soft_cap=np.float16(3),
        dropout_prob=np.float32(0.1),
        dropout_seed=np.uint64(2**64 - 1),
    )
    assert type(problem.softmax_scale) is type(problem.logits_soft_cap) is float
    assert type(problem.dropout_prob) is float
    assert problem.dropout_prob == float(np.float32(0.1))
    assert problem.dropout_seed == 2**64 - 1
    assert type(problem.dropout_seed) is int


@pytest.mark.parametrize("shape", [(3,), (1, 3), (4, 3)])
def test_sinks_are_spread_over_heads(shape: tuple[int, ...]) -> None:
    aux = np.arange(np.prod(shape), dtype=np.float16).reshape(shape)
    sinks = make_problem(*arrays(), softmax_aux=aux).sinks()
    assert sinks is not None
    assert sinks.dtype == np.float64
    np.testing.assert_array_equal(sinks, np.broadcast_to(aux, (4, 3)))
    assert make_problem(*arrays(), softmax_aux=aux).shares_sinks == (shape != (4, 3))
