"""MaskInfo shows what the oracle shows: as a mask, as arguments, as segment ids, under transforms."""

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given

from attest import flash_attention
from attest.kernels.operations import MaskInfo
from tests.examples import examples
from tests.kernels.drawn_masks import (
    Drawn,
    as_numpy,
    built,
    drawn,
    expected,
    lengths,
    like_arrays,
    positions,
    problem_of,
    shown,
)
from tests.kernels.kernel_cases import qkv

CAUSAL = ("causal", None)
UNEQUAL = lengths([0, 1, 4], [0, 3, 4])
ENTRIES = lengths([0, 2, 5], [0, 4, 5])
OFFSETS = {"q_offset": np.array([1, -1])}
HEADS = ("mask", (np.array([[1, 1, 0, 1], [0, 1, 1, 1]]).reshape(1, 2, 1, 4), "bhqk"))


@examples(40)
@given(drawn())
@example(Drawn((1, 2, 4, 4), (UNEQUAL, CAUSAL), {}))
@example(Drawn((1, 2, 4, 4), (HEADS,), {}))
@example(Drawn((1, 2, 4, 4), (("mask", (np.tri(4, dtype=int), "qk")), HEADS), {}))
@example(Drawn((1, 2, 4, 4), (UNEQUAL, CAUSAL, ("kv_lengths", np.array([2]))), OFFSETS))
@example(Drawn((2, 2, 3, 4), (ENTRIES, CAUSAL, ("chunk", 2)), OFFSETS))
@example(Drawn((2, 2, 3, 4), (("kv_lengths", np.array([2, 4])), ("window", 1)), {}))
def test_the_mask_and_the_arguments_show_what_the_oracle_shows(case):
    info, problem = built(case), expected(case)
    visible, padding = shown(problem)
    mask = info.get_or_compute_attention_mask(*case.shape[2:])
    np.testing.assert_array_equal(np.broadcast_to(mask, case.shape), visible)
    arguments = as_numpy(info.arguments(*like_arrays(case.shape)))
    again, padding_again = shown(problem_of(case.shape, **arguments))
    np.testing.assert_array_equal(again, visible)
    np.testing.assert_array_equal(padding_again, padding)
    whole = info.get_or_compute_positions(*case.shape[2:])
    tokens = ~padding
    for got, of_oracle, counted in zip(whole, positions(problem), (tokens, None), strict=True):
        got = np.broadcast_to(got, of_oracle.shape)
        counted = slice(None) if counted is None else counted
        np.testing.assert_array_equal(got[counted], of_oracle[counted])


@examples(15)
@given(drawn())
def test_segment_ids_make_the_mask_or_are_refused(case):
    """Masks that no ids make are refused: where two rows share some of their keys, or heads differ."""
    info = built(case)
    if info.q_segment_ids is not None:
        assert info.get_or_compute_segment_ids() == (info.q_segment_ids, info.kv_segment_ids)
        return
    mask = info.get_or_compute_attention_mask(*case.shape[2:])
    visible = np.broadcast_to(mask, case.shape)
    overlap = (visible[:, :, :, None] & visible[:, :, None]).any(-1)
    same = (visible[:, :, :, None] == visible[:, :, None]).all(-1)
    if (overlap & ~same).any() or (visible != visible[:, :1]).any():
        with pytest.raises(ValueError, match="mask_info: got"):
            info.get_or_compute_segment_ids(*case.shape[2:])
    else:
        ids = info.get_or_compute_segment_ids(*case.shape[2:])
        again = MaskInfo.from_segments(*ids).get_or_compute_attention_mask()
        np.testing.assert_array_equal(np.broadcast_to(again, case.shape), visible)


def test_a_row_that_sees_no_key_does_not_become_padding():
    """S11: it counts its sinks."""
    mask = np.array([[[1, 1, 0], [0, 0, 0], [0, 0, 1]]], bool)
    q_ids, kv_ids = MaskInfo.from_attention_mask(mask).get_or_compute_segment_ids()
    np.testing.assert_array_equal(q_ids, [[0, 2, 1]])
    np.testing.assert_array_equal(kv_ids, [[0, 0, 1]])
    _, kv_ids = MaskInfo.from_attention_mask(mask[:, :1]).get_or_compute_segment_ids(1)
    np.testing.assert_array_equal(kv_ids, [[0, 0, -1]])


IDS = np.array([[0, 0, 1, 1, -1], [0, 1, 1, 1, 1]])
PADDED = np.array([0, 4, 7])
PACKED = np.array([0, 2, 5])
ONE_MASK = np.ones((2, 1, 5, 5), bool)
KEY_MASK = np.array([1, 1, 0, 1, 1] * 2, bool).reshape(2, 1, 1, 5)
SEGMENTS = {"q_segment_ids", "kv_segment_ids"}
LENGTHS = {"cum_seqlens_q", "cum_seqlens_k"}


@pytest.mark.parametrize(
    ("info", "names"),
    [
        (MaskInfo(), set()),
        (MaskInfo().apply_causal(), {"causal"}),
        (MaskInfo().apply_sliding_window((2, None)), {"sliding_window"}),
        (MaskInfo.from_segments(IDS).apply_causal(), {"causal"} | SEGMENTS),
        (MaskInfo.from_attention_mask(KEY_MASK), SEGMENTS),
        (MaskInfo.from_attention_mask(KEY_MASK[:, 0, 0]), SEGMENTS),
        (MaskInfo.from_segments(IDS).apply_attention_mask(KEY_MASK), SEGMENTS),
        (MaskInfo.from_attention_mask(ONE_MASK), {"attention_mask"}),
        (MaskInfo.from_attention_mask(ONE_MASK[:, :, :, :1]), {"attention_mask"}),
        (MaskInfo().apply_chunked(2), {"chunk_size"}),
        (MaskInfo().apply_chunked(2).with_positions(q_offset=3), {"chunk_size", "q_offset"}),
        (MaskInfo().apply_chunked(2).with_positions(None, IDS), SEGMENTS),
        (MaskInfo().apply_kv_ranges(IDS), {"kv_start"}),
        (MaskInfo().apply_kv_ranges(None, IDS).apply_kv_ranges(IDS, IDS), {"kv_start", "kv_end"}),
        (MaskInfo.from_segments(IDS).apply_chunked(2), SEGMENTS | {"chunk_size"}),
        (MaskInfo().apply_chunked(2).apply_chunked(3), SEGMENTS | {"chunk_size"}),
        (
            MaskInfo().apply_chunked(2).apply_chunked(3).apply_chunked(5),
            SEGMENTS | {"chunk_size", "attention_mask"},
        ),
        (MaskInfo().apply_chunked(2).apply_chunked(4), {"chunk_size"}),
        (MaskInfo.from_cu_seqlens(PADDED, padded=True), LENGTHS),
        (MaskInfo.from_cu_seqlens(PADDED, padded=True).apply_kv_lengths(3), LENGTHS | SEGMENTS),
        (MaskInfo().apply_kv_lengths(3), LENGTHS),
        (MaskInfo().apply_kv_lengths(3).apply_causal(), LENGTHS | {"causal", "q_offset"}),
        (MaskInfo().with_positions(q_offset=3), set()),
        (MaskInfo().with_positions(q_offset=3).apply_causal(), {"causal", "q_offset"}),
    ],
)
def test_structure_stays_structure(info, names):
    """A dense mask is what nothing else says; positions that nothing compares are not passed."""
    arguments = info.arguments(*like_arrays((2, 1, 5, 5)))
    assert set(arguments) == names
    mask = info.attention_mask
    if "attention_mask" in names and mask is not None:  # its axes of 1 stay as they are
        assert arguments["attention_mask"].shape == mask.shape


@pytest.mark.parametrize(
    "info",
    [
        MaskInfo.from_attention_mask(KEY_MASK).apply_causal(),
        MaskInfo()
        .apply_kv_lengths(np.array([3, 5]))
        .with_positions(q_offset=np.array([0, 2]))
        .apply_causal(),
        MaskInfo.from_segments(IDS[:, :3], IDS).apply_chunked(2).apply_sliding_window(1),
    ],
    ids=["key mask", "decoding", "chunks"],
)
def test_a_call_with_the_arguments_computes_what_the_mask_says(info):
    query, key, value = qkv(q_length=3, k_length=5)
    out = jax.jit(lambda info, *arrays: flash_attention(*arrays, **info.arguments(*arrays[:2])))(
        info, query, key, value
    )
    mask = jnp.broadcast_to(info.get_or_compute_attention_mask(3, 5), (2, 1, 3, 5))
    np.testing.assert_allclose(out, flash_attention(query, key, value, mask), rtol=1e-5, atol=1e-6)
    bias = jnp.broadcast_to(info.bias(3, 5), (2, 1, 3, 5))
    np.testing.assert_allclose(out, flash_attention(query, key, value, bias=bias), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("leading", "packed"), [((), False), ((2, 1), False), ((1, 1), True)], ids=["none", "two", "packed"]
)
def test_arguments_have_the_batch_dimensions_of_the_call(leading, packed):
    """S27. Where sequences are packed an offset is one of each, and has no batch dimensions."""
    batch = 2 if leading == (2, 1) else 1
    query, key, value = qkv(batch=batch, q_length=5, k_length=5)
    if packed:
        info = MaskInfo.from_cu_seqlens(PACKED).with_positions(q_offset=np.arange(2))
    else:
        info = MaskInfo.from_attention_mask(ONE_MASK[:batch]).apply_segments(IDS[:batch])
        info = info.with_positions(q_offset=np.arange(batch))
    info = info.apply_causal().apply_sliding_window((2, 0))
    whole = flash_attention(query, key, value, **info.arguments(query, key))
    parts = [x.reshape(*leading, *x.shape[1:]) for x in (query, key, value)]
    out = flash_attention(*parts, **info.arguments(*parts[:2]))
    np.testing.assert_array_equal(out.reshape(whole.shape), whole)


def test_what_all_batch_entries_share_may_have_batch_1():
    """Beside arrays with an entry each."""
    info = MaskInfo.from_segments(IDS[:1], IDS).apply_attention_mask(KEY_MASK[:1]).apply_kv_lengths(4)
    keys = np.where([1, 1, 0, 1, 0], IDS, -1)
    expected = (IDS[:1, :, None] == keys[:, None]) & (keys >= 0)[:, None]
    np.testing.assert_array_equal(info.get_or_compute_attention_mask()[:, 0], expected)
    arguments = info.arguments(*like_arrays((2, 1, 5, 5)))
    np.testing.assert_array_equal(arguments["q_segment_ids"], IDS[[0, 0]])
    np.testing.assert_array_equal(arguments["kv_segment_ids"], keys)


def test_there_may_be_no_queries():
    info = MaskInfo.from_attention_mask(ONE_MASK[:, :, :0]).apply_chunked(2).apply_kv_lengths(3)
    info = info.with_positions(None, IDS)
    arguments = info.arguments(*like_arrays((2, 1, 0, 5)))
    assert {name: arguments[name].shape for name in SEGMENTS} == {
        "q_segment_ids": (2, 0),
        "kv_segment_ids": (2, 5),
    }
    assert [ids.shape for ids in info.get_or_compute_segment_ids()] == [(2, 0), (2, 5)]


def test_a_mask_of_keys_keeps_its_axes_of_size_1():
    """A mask of 1 GB would be one of 32 KB."""
    mask = MaskInfo.from_attention_mask(KEY_MASK).get_or_compute_attention_mask()
    np.testing.assert_array_equal(mask, KEY_MASK)
    assert MaskInfo.from_attention_mask(KEY_MASK).get_or_compute_attention_mask(3).shape == (2, 1, 3, 5)
    assert MaskInfo().get_or_compute_attention_mask(3, 5).all()
    assert MaskInfo.from_attention_mask(KEY_MASK).bias(dtype="bfloat16").dtype == jnp.bfloat16


FULL = (
    MaskInfo.from_cu_seqlens(PADDED, padded=True)
    .apply_attention_mask(ONE_MASK)
    .apply_segments(IDS)
    .apply_kv_lengths(np.array([4, 5]))
    .with_positions(IDS, IDS)
    .apply_causal()
    .apply_sliding_window((3, 1))
    .apply_chunked(2)
)


def test_it_is_a_pytree_of_its_arrays():
    leaves, structure = jax.tree.flatten(FULL)
    assert len(leaves) == 8
    again = jax.tree.unflatten(structure, leaves)
    assert all(getattr(again, field.name) is getattr(FULL, field.name) for field in fields(MaskInfo))
    other = jax.tree.structure(FULL.apply_sliding_window(1))
    assert hash(structure) == hash(jax.tree.structure(again))
    assert structure != other


def test_it_goes_through_jit_vmap_scan_and_grad():
    given_masks = np.random.default_rng(0).random((3, 2, 1, 4, 4)) < 0.6
    infos = jax.vmap(lambda mask: MaskInfo.from_attention_mask(mask).apply_causal())(given_masks)
    masks = jax.jit(jax.vmap(lambda info: info.get_or_compute_attention_mask()))(infos)
    np.testing.assert_array_equal(masks, given_masks & np.tril(np.ones((4, 4), bool)))
    carried, scanned = jax.lax.scan(
        lambda carry, info: (carry, info.get_or_compute_attention_mask()), infos, infos
    )
    np.testing.assert_array_equal(scanned, masks)
    assert carried.causal
    query, key, value = qkv(q_length=4, k_length=4)
    info = jax.tree.map(lambda x: x[0], infos)

    def total(query, info):
        return flash_attention(query, key, value, **info.arguments(query, key)).sum()

    expected = jax.grad(lambda query: flash_attention(query, key, value, masks[0]).sum())(query)
    np.testing.assert_allclose(jax.grad(total)(query, info), expected, rtol=1e-5, atol=1e-6)


def test_stored_ids_and_lengths_become_ids_under_jit_and_masks_are_refused():
    ids = jax.jit(lambda info: info.get_or_compute_segment_ids())(MaskInfo.from_segments(IDS).apply_causal())
    np.testing.assert_array_equal(ids, [IDS, IDS])
    packed = MaskInfo.from_cu_seqlens(PACKED)
    ids = jax.jit(lambda info: info.get_or_compute_segment_ids(6, 6))(packed)
    np.testing.assert_array_equal(ids[0], [[0, 0, 1, 1, 1, -1]])
    with pytest.raises(ValueError, match=r"mask_info: got a traced mask; .*outside of jax\.jit"):
        jax.jit(lambda info: info.get_or_compute_segment_ids())(MaskInfo.from_attention_mask(ONE_MASK))


def test_ids_of_a_constant_mask_are_computed_while_tracing():
    info = MaskInfo.from_attention_mask(ONE_MASK)
    ids = jax.jit(info.get_or_compute_segment_ids)()
    np.testing.assert_array_equal(ids, np.zeros((2, 2, 5)))
