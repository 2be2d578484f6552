"""Ring attention with a MaskInfo: what one device computes with it, or a refusal by name."""

from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attest.kernels import flash_attention_with_lse
from attest.kernels.operations import MaskInfo, RingAttention, create_default_executor
from attest.kernels.ring import ring_attention, ring_attention_with_lse
from tests.kernels.drawn_masks import built, drawn
from tests.kernels.kernel_cases import normal
from tests.kernels.ring.ring_cases import STRATEGIES, assert_same, both_passes, mesh_of

DEVICES = 2
here = pytest.mark.process(devices=DEVICES)
# Batch, query heads, Sq, Sk; devices divide the lengths of those inside, whose halves zigzag needs.
OUTSIDE = ((2, 2, 5, 9), (1, 2, 7, 7))
INSIDE = ((2, 2, 4, 8), (1, 2, 8, 8))
# The axes that the devices split, of the arrays of a MaskInfo inside of jax.shard_map.
SPLIT = dict.fromkeys(
    ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions", "kv_start", "kv_end"), P(None, "x")
)
SPECS = dict.fromkeys(("query", "key", "value"), P(None, "x"))
ARRAYS = tuple(field.name for field in fields(MaskInfo) if not field.metadata.get("static"))


def inputs(shape: tuple[int, int, int, int]) -> dict[str, jax.Array]:
    batch, heads, q, k = shape
    arrays = {"query": (batch, q, heads, 8), "key": (batch, k, 1, 8), "value": (batch, k, 1, 4)}
    return {name: normal(*sizes, seed=seed) for seed, (name, sizes) in enumerate(arrays.items())}


# Sinks tell padding from rows that see no key.
SINKS = {"softmax_aux": normal(2, 1)}


def wanted(shape: tuple[int, int, int, int], info: MaskInfo, **options: Any) -> Any:
    return both_passes(flash_attention_with_lse, {**SINKS, **options, "mask_info": info}, inputs(shape))


def inside(info: MaskInfo, specs: MaskInfo, strategy: str, **options: Any) -> Any:
    """The call within jax.shard_map, whose MaskInfo is split as the specs say."""

    def call(**arrays: Any) -> Any:
        return jax.shard_map(
            lambda arrays, info: ring_attention_with_lse(
                **arrays, **options, mask_info=info, axis_name="x", strategy=strategy
            ),
            mesh=mesh_of(DEVICES),
            in_specs=({name: SPECS.get(name, P()) for name in arrays}, specs),
            out_specs=(P(None, "x"), P(None, None, "x")),
        )(arrays, info)

    return call


def specs_of(info: MaskInfo, rows: str | None = "x", keys: str | None = "x") -> MaskInfo:
    """How arrays lie on devices; those of the whole are the same ones on each. rows, keys: of a mask."""
    specs = {name: SPLIT.get(name, P()) for name in ARRAYS if getattr(info, name) is not None}
    if info.attention_mask is not None:
        axes = zip((rows, keys), info.attention_mask.shape[2:], strict=True)
        specs["attention_mask"] = P(None, None, *(None if size == 1 else name for name, size in axes))
    return replace(info, **specs)


@here
@settings(max_examples=6)
@given(drawn(OUTSIDE), st.sampled_from(STRATEGIES))
def test_over_a_mesh_it_is_of_the_whole(case: Any, strategy: str) -> None:
    """Whatever is in it: of lengths that devices do not divide, and of several chunks."""
    info = built(case)
    call = partial(ring_attention_with_lse, mesh=mesh_of(DEVICES), axis_name="x", strategy=strategy)
    found = both_passes(call, {**SINKS, "mask_info": info}, inputs(case.shape))
    assert_same(found, wanted(case.shape, info))


@here
@settings(max_examples=6)
@given(
    drawn(INSIDE),
    st.sampled_from(STRATEGIES),
    st.sampled_from((None, "x")),
    st.sampled_from((None, "x")),
)
def test_inside_of_shard_map_arrays_are_parts(case: Any, strategy: str, rows: Any, keys: Any) -> None:
    """Static kinds, lengths, offsets and the numbers of ranges count in the whole."""
    info = built(case)
    assume(len(info.chunk_sizes) < 2)
    # A spec names an axis of the mesh once.
    specs = specs_of(info, rows, None if rows else keys)
    found = both_passes(inside(info, specs, strategy), SINKS, inputs(case.shape))
    assert_same(found, wanted(case.shape, info))


@here
@pytest.mark.parametrize(
    ("shape", "info", "strategy"),
    [
        pytest.param(INSIDE[0], MaskInfo().apply_chunked(3), "ring", id="chunks"),
        pytest.param(
            INSIDE[1],
            MaskInfo().apply_chunked(3).with_positions(None, np.array([[5, 1, 7, 0, 3, 2, 6, 4]])),
            "zigzag",
            id="chunks of keys in another order",
        ),
        pytest.param(
            INSIDE[0],
            MaskInfo().apply_sliding_window((3, 1)).with_positions(q_offset=np.array([0, 3])),
            "ulysses",
            id="window, offsets",
        ),
        pytest.param(
            INSIDE[1],
            MaskInfo.from_attention_mask(np.array([[1, 1, 0, 1, 1, 1, 1, 0]])).apply_causal(),
            "zigzag",
            id="tokens, causal",
        ),
        pytest.param(
            INSIDE[1],
            MaskInfo.from_cu_seqlens(np.array([0, 3, 7])).apply_causal().apply_kv_lengths(5),
            "ring",
            id="packed sequences and a length, causal",
        ),
        pytest.param(
            INSIDE[0],
            MaskInfo()
            .apply_kv_ranges(np.array([[0, 2, 1, 7]]), np.array([[4, 6, 8, 8]]))
            .apply_kv_lengths(np.array([5, 8])),
            "all_gather",
            id="ranges and lengths",
        ),
    ],
)
def test_each_condition_counts_in_the_whole(shape: Any, info: MaskInfo, strategy: str) -> None:
    found = both_passes(inside(info, specs_of(info), strategy), SINKS, inputs(shape))
    assert_same(found, wanted(shape, info))


LENGTHS = MaskInfo().apply_causal().apply_kv_lengths(jnp.array([3, 7]))


def test_without_an_axis_it_is_that_of_the_local_kernel() -> None:
    given = inputs((2, 2, 4, 8))
    np.testing.assert_array_equal(
        ring_attention(**given, mask_info=LENGTHS), flash_attention_with_lse(**given, mask_info=LENGTHS)[0]
    )


@here
def test_the_conditions_of_other_arguments_count() -> None:
    """A mask of rows on this device beside one of all keys, and a window."""
    info = LENGTHS.apply_attention_mask(np.arange(8)[None, None, None] != 1)
    rows = np.arange(4)[None, None, :, None] != 2
    specs = {**SPECS, "attention_mask": P(None, None, "x")}

    def call(**arrays: Any) -> Any:
        return jax.shard_map(
            lambda arrays: ring_attention_with_lse(
                **arrays, sliding_window=(5, 0), mask_info=info, axis_name="x"
            ),
            mesh=mesh_of(DEVICES),
            in_specs=({name: specs.get(name, P()) for name in arrays},),
            out_specs=(P(None, "x"), P(None, None, "x")),
        )(arrays)

    shape = (2, 2, 4, 8)
    found = both_passes(call, {**SINKS, "attention_mask": rows}, inputs(shape))
    assert_same(found, wanted(shape, info, attention_mask=rows, sliding_window=(5, 0)))


@here
def test_the_batch_may_be_sharded_beside_lengths_of_keys() -> None:
    mesh = jax.make_mesh((1, DEVICES), ("x", "data"), axis_types=(AxisType.Auto,) * 2)
    call = partial(ring_attention_with_lse, mesh=mesh, axis_name="x", batch_axes="data")
    found = both_passes(call, {**SINKS, "mask_info": LENGTHS}, inputs((2, 2, 4, 8)))
    assert_same(found, wanted((2, 2, 4, 8), LENGTHS))


@here
def test_the_operation_takes_one(tmp_path: Any) -> None:
    spec = P(None, "x")
    where = {"mesh": mesh_of(DEVICES), "in_specs": (spec,) * 3, "out_specs": spec}
    run = partial(create_default_executor(str(tmp_path)), RingAttention(), **where)
    given = inputs((2, 2, 4, 8))
    found = jax.jit(lambda given, info: run(**given, mask_info=info))(given, LENGTHS)
    assert_same(found, flash_attention_with_lse(**given, mask_info=LENGTHS)[0])


def mask(*shape: int) -> MaskInfo:
    return MaskInfo().apply_attention_mask(np.ones(shape, bool))


@here
@pytest.mark.parametrize(
    ("info", "options", "words"),
    [
        ("causal", {}, "mask_info: got a str; expected a MaskInfo"),
        (
            mask(1, 1, 2, 3),
            {},
            r"mask_info\.attention_mask: got shape .* expected 1, 4 or 8 keys: a shard's, ",
        ),
        (
            mask(1, 1, 3, 1),
            {},
            r"mask_info\.attention_mask: got shape .* expected 1, 2 or 4 rows: a shard's, ",
        ),
        (mask(3, 1, 2, 4), {}, r"mask_info\.attention_mask: got shape .* expected batch 2 or 1"),
        (
            mask(1, 1, 2, 4),
            {"attention_mask": np.ones((1, 1, 2, 8), bool)},
            "attention_mask: got shape .* expected axes of size 1 or those of the mask that is there",
        ),
        (mask(1, 1, 2, 4), {"attention_mask": np.ones((3, 4), bool)}, "attention_mask: got shape .* 4 rows"),
        (
            MaskInfo.from_segments(np.zeros((2, 4), np.int32), np.zeros((2, 8), np.int32)),
            {},
            r"mask_info\.q_segment_ids: got shape \(2, 4\); expected q_length 2",
        ),
        (
            MaskInfo().apply_causal().with_positions(None, np.zeros((1, 8), np.int32)),
            {},
            r"mask_info\.kv_positions: got shape \(1, 8\); expected kv_length 4",
        ),
        (MaskInfo().apply_kv_lengths(np.array([1, 2, 3])), {}, r"mask_info\.kv_lengths: got shape"),
        (
            MaskInfo.from_cu_seqlens(np.array([0, 4]), np.array([0, 8])),
            {},
            r"mask_info\.cum_seqlens_q: got 1 packed sequences and batch 2",
        ),
        (
            MaskInfo.from_cu_seqlens(np.array([0, 4, 8]), np.array([0, 8, 17]), padded=True),
            {},
            "cum_seqlens_k: got 9 tokens; expected at most 8",
        ),
        (
            MaskInfo().apply_chunked(4).apply_chunked(6),
            {},
            "mask_info: got chunks of 4 and 6 positions; expected one size inside jax.shard_map",
        ),
        (LENGTHS, {"cum_seqlens_q": np.array([0, 4, 8]), "cum_seqlens_k": np.array([0, 8, 16])}, "cum_seql"),
    ],
)
def test_what_cannot_be_is_refused_inside(info: Any, options: dict[str, Any], words: str) -> None:
    def call(given: dict[str, jax.Array]) -> jax.Array:
        return ring_attention(**given, **options, mask_info=info, axis_name="x")

    run = jax.shard_map(call, mesh=mesh_of(DEVICES), in_specs=(P(None, "x"),), out_specs=P(None, "x"))
    with pytest.raises(ValueError, match=f"^{words}"):
        jax.eval_shape(run, inputs((2, 2, 4, 8)))


@here
def test_one_entry_of_a_shard_of_one_key_is_not_taken_for_one_of_all() -> None:
    def call(given: dict[str, jax.Array], info: MaskInfo) -> jax.Array:
        return ring_attention(
            **given, attention_mask=np.ones((1, 1, 1, 2), bool), mask_info=info, axis_name="x"
        )

    specs = (P(None, "x"), replace(mask(1, 1, 1, 2), attention_mask=P(None, None, None, "x")))
    run = jax.shard_map(call, mesh=mesh_of(DEVICES), in_specs=specs, out_specs=P(None, "x"))
    words = r"^mask_info\.attention_mask: got shape .* other entries on each device; expected all 2"
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(run, inputs((2, 2, 2, 2)), mask(1, 1, 1, 2))


@here
@pytest.mark.parametrize(
    ("info", "words"),
    [
        (3, "mask_info: got a int; expected a MaskInfo"),
        (mask(1, 1, 2, 8), r"mask_info\.attention_mask: got shape .* expected q_length 4 or 1"),
        (MaskInfo().apply_kv_lengths(np.array([1, 2, 3])), r"mask_info\.kv_lengths: got shape"),
    ],
)
def test_what_cannot_be_is_refused_over_a_mesh(info: Any, words: str) -> None:
    call = partial(ring_attention, mask_info=info, mesh=mesh_of(DEVICES), axis_name="x")
    with pytest.raises(ValueError, match=f"^{words}"):
        jax.eval_shape(call, **inputs((2, 2, 4, 8)))
