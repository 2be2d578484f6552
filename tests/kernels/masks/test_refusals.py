"""What MaskInfo refuses, by name and with advice (S20), and the shardings of its arrays (S21)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from attest.kernels.operations import MaskInfo

MASK = np.ones((2, 3, 4, 5), bool)
Q_IDS, KV_IDS = np.zeros((2, 4), np.int32), np.zeros((2, 5), np.int32)
CUM = np.array([0, 2, 4])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MaskInfo.from_attention_mask([[True]]), "attention_mask: got a list; .*jnp.asarray"),
        (
            lambda: MaskInfo.from_attention_mask(MASK.astype(np.float32)),
            r"attention_mask: got dtype float32; expected bool.*A mask of 0 and 1\? Pass mask != 0",
        ),
        (lambda: MaskInfo.from_attention_mask(MASK[0, 0, 0]), "attention_mask: got shape .*2 to 4 axes"),
        (lambda: MaskInfo.from_attention_mask(MASK, axes="qk"), "attention_mask: got shape .*2 axes, qk"),
        (lambda: MaskInfo.from_attention_mask(MASK, axes="bqhk"), "axes: got 'bqhk'; expected one of bhqk"),
        (
            lambda: MaskInfo.from_attention_mask(MASK).apply_attention_mask(MASK[:, :2]),
            "attention_mask: got shape .*or those of the mask that is there",
        ),
        (
            lambda: MaskInfo.from_segments(Q_IDS, KV_IDS).apply_attention_mask(MASK[:, 0, 0]),
            "attention_mask: got shape .* for tokens; .*axes='bk'",
        ),
        (
            lambda: MaskInfo.from_segments(Q_IDS).apply_attention_mask(np.ones((3, 4), bool)),
            "attention_mask: got shape .* for tokens",
        ),
        (lambda: MaskInfo.from_segments(Q_IDS[0]), r"q_segment_ids: got shape \(4,\); .*Add the axes"),
        (
            lambda: MaskInfo.from_segments(Q_IDS, np.zeros((3, 5), int)),
            "q_segment_ids: got shape .*batch 1 or 3",
        ),
        (lambda: MaskInfo.from_segments(Q_IDS.astype(float)), "q_segment_ids: got dtype float64"),
        (lambda: MaskInfo.from_segments(Q_IDS).apply_segments(Q_IDS), "q_segment_ids: got .*beside those"),
        (lambda: MaskInfo.from_cu_seqlens(CUM + 1), "cum_seqlens_q: got first entry 1"),
        (lambda: MaskInfo.from_cu_seqlens(CUM, CUM[:2]), "cum_seqlens_k: got shape"),
        (lambda: MaskInfo.from_cu_seqlens(CUM[None]), "cum_seqlens_q: got shape"),
        (lambda: MaskInfo().apply_sliding_window(-1), "sliding_window: got -1"),
        (lambda: MaskInfo().apply_chunked(0), "chunk_size: got 0; expected a positive integer"),
        (lambda: MaskInfo().apply_kv_lengths(-1), "kv_lengths: got -1; expected lengths of 0 and more"),
        (lambda: MaskInfo().apply_kv_lengths(np.ones(2)), "kv_lengths: got dtype float64"),
        (lambda: MaskInfo().apply_kv_lengths(Q_IDS), "kv_lengths: got shape"),
        (
            lambda: MaskInfo().apply_kv_lengths(np.ones(2, int)).apply_kv_lengths(np.ones(3, int)),
            "kv_lengths: got shape .*batch 1 or 2",
        ),
        (lambda: MaskInfo().apply_kv_ranges(Q_IDS[0]), r"kv_start: got shape \(4,\); .*Add the axes"),
        (lambda: MaskInfo().apply_kv_ranges(None, np.ones((1, 4))), "kv_end: got dtype float64"),
        (
            lambda: MaskInfo().apply_kv_ranges(Q_IDS).apply_kv_ranges(KV_IDS),
            "kv_start: got shape .* and 4 rows",
        ),
        (
            lambda: MaskInfo().apply_kv_ranges(Q_IDS).apply_kv_ranges(np.ones((3, 4), int)),
            "kv_start: got shape",
        ),
        (lambda: MaskInfo().with_positions(Q_IDS, q_offset=1), "q_offset: got both"),
        (lambda: MaskInfo().with_positions(Q_IDS + 2**30), "q_positions: got values .*Count from nearer"),
        (lambda: MaskInfo().with_positions(q_offset=-(2**31)), "q_offset: got values"),
        (lambda: MaskInfo().with_positions(kv_positions=KV_IDS[0]), "kv_positions: got shape"),
        (lambda: MaskInfo().get_or_compute_attention_mask(4), "kv_length: got None; .*Pass kv_length="),
        (
            lambda: (
                MaskInfo.from_attention_mask(MASK[:, :, :1]).apply_causal().get_or_compute_attention_mask()
            ),
            "q_length: got None",
        ),
        (
            lambda: MaskInfo.from_segments(Q_IDS, KV_IDS).get_or_compute_attention_mask(5, 5),
            "mask_info.q_segment_ids: got shape .*q_length 5",
        ),
        (
            lambda: MaskInfo.from_attention_mask(MASK).apply_segments(Q_IDS).get_or_compute_attention_mask(),
            "mask_info.kv_segment_ids: got shape .*kv_length 5",
        ),
        (
            lambda: MaskInfo.from_cu_seqlens(CUM).arguments(*arrays(2, 4, 4)),
            "mask_info.cum_seqlens_q: got 2 packed sequences and batch 2; .*padded=True",
        ),
        (
            lambda: MaskInfo.from_cu_seqlens(CUM, padded=True).arguments(*arrays(1, 4, 4)),
            "mask_info.cum_seqlens_q: got 2 padded sequences and batch 1",
        ),
        (lambda: MaskInfo.from_cu_seqlens(CUM).arguments(*arrays(1, 3, 4)), "cum_seqlens_q: got 4 tokens"),
        (
            lambda: (
                MaskInfo.from_cu_seqlens(CUM)
                .with_positions(q_offset=np.zeros(3, int))
                .arguments(*arrays(1, 4, 4))
            ),
            r"mask_info.q_offset: got shape \(3,\); expected \[1\] or \[2\]",
        ),
        (lambda: MaskInfo.from_attention_mask(MASK).arguments(*arrays(2, 4, 5)), "mask_info.attention_mask"),
        (lambda: MaskInfo().arguments(np.ones(3), np.ones(3)), r"query: got shape \(3,\)"),
        (lambda: MaskInfo.from_attention_mask(MASK[:, 0]).bias(dtype="int32"), "dtype: got int32"),
        (
            lambda: MaskInfo.from_attention_mask(np.tril(MASK[0, :1])).get_or_compute_segment_ids(),
            "mask_info: got in batch entry 0 row 0, which shares some but not all of its keys",
        ),
        (
            lambda: MaskInfo.from_attention_mask(
                MASK * np.arange(3)[:, None, None]
            ).get_or_compute_segment_ids(),
            "mask_info: got a mask that differs between its 3 heads",
        ),
    ],
)
def test_a_refusal_names_the_argument_and_says_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def arrays(batch, q_length, k_length):
    query = jax.ShapeDtypeStruct((batch, q_length, 2, 8), jnp.float32)
    return query, jax.ShapeDtypeStruct((batch, k_length, 2, 8), jnp.float32)


def test_traced_values_are_trusted():
    """Their shapes are checked, their values cannot be."""
    info = jax.jit(lambda n, ids: MaskInfo.from_segments(ids).apply_kv_lengths(n))(jnp.array([-1]), Q_IDS)
    assert not info.get_or_compute_attention_mask().any()


def test_segment_id_0_is_a_segment_and_a_negative_one_is_padding():
    info = MaskInfo.from_segments(np.array([[0, 0, -1]]))
    np.testing.assert_array_equal(
        info.get_or_compute_attention_mask()[0, 0], [[1, 1, 0], [1, 1, 0], [0, 0, 0]]
    )


@pytest.mark.parametrize(
    ("q_offset", "first"), [(None, [1, 1, 0]), (0, [1, 0, 0])], ids=["default", "top left"]
)
def test_positions_decide_causal_order(q_offset, first):
    info = MaskInfo().apply_causal().with_positions(q_offset=q_offset)
    np.testing.assert_array_equal(info.get_or_compute_attention_mask(2, 3)[0, 0, 0], first)


def test_positions_are_set_in_place_of_earlier_ones():
    info = MaskInfo().with_positions(q_offset=3).with_positions(Q_IDS)
    assert info.q_offset is None
    assert info.with_positions(kv_positions=KV_IDS).q_positions is info.q_positions


def test_shardings_split_the_axes_that_are_not_1():
    info = (
        MaskInfo.from_attention_mask(MASK[:1])
        .apply_segments(Q_IDS, KV_IDS)
        .apply_kv_lengths(np.array([4, 5]))
    )
    info = info.with_positions(Q_IDS[:1], KV_IDS).with_positions(q_offset=np.array([0, 1]))
    specs = info.shardings(batch=("data", "fsdp"), heads="model", q_length="sequence")
    assert specs.attention_mask == P(None, "model", "sequence", None)
    assert specs.q_segment_ids == P(("data", "fsdp"), "sequence")
    assert specs.kv_segment_ids == specs.kv_positions == P(("data", "fsdp"), None)
    assert specs.kv_lengths == specs.q_offset == P(("data", "fsdp"))
    assert specs.q_positions is None
    packed = MaskInfo.from_cu_seqlens(CUM).with_positions(Q_IDS[:1]).shardings(batch="data", heads="model")
    assert packed.cum_seqlens_q == packed.cum_seqlens_k == P(None)
    assert packed.q_positions == P(None, None)


@pytest.mark.parametrize(
    ("info", "axes", "message"),
    [
        (
            MaskInfo.from_cu_seqlens(CUM),
            {"q_length": "s"},
            "q_length: got mesh axis 's' and cumulative lengths",
        ),
        (MaskInfo.from_cu_seqlens(CUM, padded=True), {"batch": "d"}, "batch: got .*from_segments"),
        (MaskInfo().apply_kv_lengths(3), {"kv_length": "s"}, "kv_length: got mesh axis 's' and kv_lengths"),
        (MaskInfo().apply_kv_ranges(Q_IDS), {"kv_length": "s"}, "kv_length: got mesh axis 's' and ranges"),
        (MaskInfo().apply_causal(), {"q_length": "s"}, "q_length: got .*with_positions"),
        (
            MaskInfo.from_segments(Q_IDS).apply_chunked(2),
            {"kv_length": "s"},
            "kv_length: got .*with_positions",
        ),
        (
            MaskInfo.from_attention_mask(MASK),
            {"q_length": "s", "kv_length": ("s", "t")},
            "mesh axis 's' for two",
        ),
    ],
)
def test_shards_that_would_mean_something_else_are_refused(info, axes, message):
    with pytest.raises(ValueError, match=message):
        info.shardings(**axes)


def test_the_advice_for_shards_works():
    """Lengths as segment ids and stored positions show the same, and split."""
    info = MaskInfo.from_cu_seqlens(CUM, padded=True).apply_causal().apply_kv_lengths(1)
    places = info.get_or_compute_positions(4, 4)
    again = MaskInfo.from_segments(*info.get_or_compute_segment_ids(4, 4), *places).apply_causal()
    np.testing.assert_array_equal(
        again.get_or_compute_attention_mask(), info.get_or_compute_attention_mask(4, 4)
    )
    assert again.shardings(batch="data", q_length="s", kv_length="s").kv_positions == P("data", "s")


def test_shardings_are_what_shard_map_takes():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    info = MaskInfo.from_segments(Q_IDS, KV_IDS).apply_causal().apply_attention_mask(MASK[:, :1])
    whole = jax.shard_map(
        lambda info: info.get_or_compute_attention_mask(),
        mesh=mesh,
        in_specs=(info.shardings(batch="data"),),
        out_specs=P("data"),
    )(info)
    np.testing.assert_array_equal(whole, info.get_or_compute_attention_mask())
