"""The shared memory of the Hopper kernels: what a record describes is what a launch allocates."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import jax.numpy as jnp
import pytest

from attest.kernels.pallas.mosaic_gpu.blocks import BackwardBlocks, Blocks
from attest.kernels.pallas.mosaic_gpu.bodies import (
    backward_bias,
    backward_fused,
    backward_key,
    backward_query,
    backward_split,
    forward,
    repair_tile,
)
from attest.kernels.pallas.mosaic_gpu.launch.overlay import Overlay, shared_bytes
from attest.kernels.pallas.mosaic_gpu.launch.scratch import scratch, tile_bytes
from attest.kernels.pallas.mosaic_gpu.launch.transfers import matrix, tiled
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import barriers, launch, vector
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec, Logits, PairArray, Results, Shape, Visibility

FORWARD = Blocks(k=128, stages=3, consumers=2, registers=(240, 24), partial_sums=False)
BACKWARD = BackwardBlocks(step=128, stages=3, consumers=2, registers=(240, 24))
FUSED = replace(BACKWARD, registers=(232, 24), fused=True)
SPLIT = replace(BACKWARD, consumers=1, split=True)


@dataclass(frozen=True)
class Toy:
    """One field that is always allocated, and one that is not where its size is 0."""

    numbers: Annotated[Any, lambda size: vector(64, 2)]
    spare: Annotated[Any, lambda size: vector(64, size) if size else None] = None


def spec(k_block: int, value_dim: int = 64, head_dim: int = 64, length: int = 128) -> KernelSpec:
    return KernelSpec(
        dtype="bfloat16",
        shape=Shape(
            batch=1,
            heads=1,
            group=1,
            q_length=length,
            k_length=length,
            head_dim=head_dim,
            value_dim=value_dim,
            q_block=128,
            k_block=k_block,
        ),
        logits=Logits(scale=0.125, cap=None, dtype=None),
        visibility=Visibility(causal=False, first=False, last=False, segments=False, by_batch=False),
        results=Results(normalize=True, exact_reference=False),
    )


def changed(it: KernelSpec, **groups: dict[str, Any]) -> KernelSpec:
    """A spec with other fields in some of its groups."""
    return replace(it, **{name: replace(getattr(it, name), **fields) for name, fields in groups.items()})


def with_pairs(k_block: int, dtype: str = "bfloat16") -> KernelSpec:
    """With a mask and a bias of every pair."""
    mask, bias = (PairArray(jnp.dtype(x), True, True, True, True) for x in ("int8", dtype))
    return changed(spec(k_block), visibility={"mask": mask}, logits={"bias": bias})


def rows(count: int, rows: int, channels: int = 64) -> Any:
    return matrix("bfloat16", count, rows, channels)


def test_each_field_is_allocated_as_it_is_described() -> None:
    assert scratch(Toy, 3) == {"numbers": vector(64, 2), "spare": vector(64, 3)}


def test_a_field_that_is_described_as_none_is_not_allocated() -> None:
    allocated = scratch(Toy, 0)
    assert allocated == {"numbers": vector(64, 2)}
    assert Toy(**allocated).spare is None


@pytest.mark.parametrize(
    ("record", "blocks"),
    [
        (forward.Shared, replace(FORWARD, programs=4)),
        (backward_query.Shared, BACKWARD),
        (backward_fused.Shared, FUSED),
        (backward_key.Shared, BACKWARD),
        (backward_split.Shared, SPLIT),
        (backward_bias.Shared, BACKWARD),
    ],
)
def test_a_launch_fills_every_field_of_a_record(record: type[Any], blocks: Blocks | BackwardBlocks) -> None:
    names = [field.name for field in fields(record)]
    assert list(scratch(record, with_pairs(128), blocks)) == names
    of_pairs = ("mask", "bias", "pairs_full", "pairs_empty", "d_bias", "bias_full")
    of_repairs = ("marks", "ended", "of_repair")
    assert list(scratch(record, spec(128), blocks)) == [
        name for name in names if name not in (*of_pairs, *of_repairs)
    ]


def test_only_a_persistent_kernel_has_room_for_the_next_query() -> None:
    """Two slots, each with a tile and a barrier for each consumer."""
    persistent = scratch(forward.Shared, spec(128), replace(FORWARD, programs=4))
    alone = scratch(forward.Shared, spec(128), FORWARD)
    slots = {"query": (rows(4, 64),), "query_full": barriers(4), "query_empty": barriers(2, arrivals=2)}
    assert persistent == {**alone, **slots}


@pytest.mark.parametrize(
    ("record", "blocks", "name", "expected"),
    [
        (forward.Shared, FORWARD, "query", (rows(2, 64),)),
        (forward.Shared, FORWARD, "key", (rows(3, 128),)),
        (forward.Shared, FORWARD, "query_full", barriers(2)),
        (forward.Shared, FORWARD, "query_empty", barriers(1, arrivals=2)),
        (forward.Shared, FORWARD, "key_full", barriers(3)),
        (forward.Shared, FORWARD, "key_empty", barriers(3, arrivals=2)),
        (backward_query.Shared, BACKWARD, "own_full", barriers(2, arrivals=2)),
        (backward_key.Shared, BACKWARD, "lse", vector(128, 3)),
        (backward_key.Shared, BACKWARD, "query_full", barriers(3, arrivals=2)),
        (backward_bias.Shared, BACKWARD, "key", rows(6, 64)),
        (backward_bias.Shared, BACKWARD, "full", barriers(3, arrivals=8)),
    ],
)
def test_sizes_and_arrivals_follow_the_blocks(
    record: type[Any], blocks: Blocks | BackwardBlocks, name: str, expected: Any
) -> None:
    assert scratch(record, spec(128), blocks)[name] == expected


@pytest.mark.parametrize(
    ("record", "blocks", "arrivals"),
    [
        (forward.Shared, FORWARD, {"query_full": 8, "key_full": 16, "value_full": 16}),
        (backward_query.Shared, BACKWARD, {"own_full": 16, "key_full": 16, "value_full": 16}),
        (backward_key.Shared, BACKWARD, {"own_full": 16, "query_full": 17, "d_out_full": 17}),
        (backward_bias.Shared, BACKWARD, {"full": 2 * 16 + 2 + 2 * 2 * 8}),
    ],
)
def test_each_group_of_eight_rows_arrives_alone_where_it_is_copied_alone(
    record: type[Any], blocks: Blocks | BackwardBlocks, arrivals: dict[str, int]
) -> None:
    allocated = scratch(record, spec(128, 128, 128, length=197), blocks)
    assert {name: allocated[name].num_arrivals for name in arrivals} == arrivals


@pytest.mark.parametrize(
    ("record", "blocks", "name", "expected"),
    [
        (forward.Shared, FORWARD, "bias", tiled("float32", 6, 64, 128)),
        (forward.Shared, FORWARD, "mask", tiled("int8", 6, 64, 128)),
        (forward.Shared, FORWARD, "key_full", barriers(3)),
        (forward.Shared, FORWARD, "pairs_full", barriers(3, arrivals=4)),
        (forward.Shared, FORWARD, "pairs_empty", barriers(3, arrivals=2)),
        (backward_query.Shared, BACKWARD, "bias", tiled("float32", 6, 64, 128)),
        (backward_query.Shared, BACKWARD, "key_full", barriers(3, arrivals=5)),
        (backward_key.Shared, BACKWARD, "mask", tiled("int8", 6, 128, 64)),
        (backward_key.Shared, BACKWARD, "query_full", barriers(3, arrivals=6)),
        (backward_split.Shared, SPLIT, "mask", tiled("int8", 3, 128, 64)),
        (backward_split.Shared, SPLIT, "query_full", barriers(3, arrivals=4)),
        (backward_split.Shared, SPLIT, "query_empty", barriers(3, arrivals=2)),
        (backward_split.Shared, SPLIT, "weights", tiled("float32", 2, 64, 128)),
        (backward_bias.Shared, BACKWARD, "bias", tiled("float32", 2, 128, 64)),
        (backward_bias.Shared, BACKWARD, "d_bias", tiled("float32", 2, 128, 64)),
        (backward_bias.Shared, BACKWARD, "mask", tiled("int8", 6, 128, 64)),
        (backward_bias.Shared, BACKWARD, "full", barriers(3, arrivals=10)),
        (backward_bias.Shared, BACKWARD, "bias_full", barriers(2)),
    ],
)
def test_each_consumer_has_tiles_of_pairs_of_its_own(
    record: type[Any], blocks: Blocks | BackwardBlocks, name: str, expected: Any
) -> None:
    """A slot is full once the tiles of all consumers are there, one of each."""
    assert scratch(record, with_pairs(128, "float32"), blocks)[name] == expected


@pytest.mark.parametrize(
    ("record", "wide", "narrow"),
    [
        (forward.Shared, {"query": 4, "key": 3}, {"value": 3}),
        (backward_query.Shared, {"query": 2, "key": 3}, {"d_out": 2, "value": 3}),
        (backward_key.Shared, {"key": 2, "query": 3}, {"value": 2, "d_out": 3}),
        (backward_bias.Shared, {"key": 6, "query": 3}, {"value": 6, "d_out": 3}),
    ],
)
def test_value_and_its_cotangent_have_the_head_dim_of_value(
    record: type[Any], wide: dict[str, int], narrow: dict[str, int]
) -> None:
    blocks = replace(FORWARD, programs=4) if record is forward.Shared else BACKWARD
    allocated = scratch(record, spec(128, value_dim=32), blocks)
    for counts, channels in ((wide, 64), (narrow, 32)):
        for name, count in counts.items():
            (room,) = allocated[name] if isinstance(allocated[name], tuple) else (allocated[name],)
            tiled, _ = room.refs
            assert tiled.shape[::2] == (count, channels)


@pytest.mark.parametrize("value_dim", [64, 32])
@pytest.mark.parametrize(
    ("kernel", "record", "blocks"),
    [
        ("forward", forward.Shared, FORWARD),
        ("forward", forward.Shared, replace(FORWARD, programs=4)),
        ("backward_query", backward_query.Shared, BACKWARD),
        ("backward_key", backward_key.Shared, BACKWARD),
        ("backward_key", backward_fused.Shared, FUSED),
        ("backward_key", backward_split.Shared, SPLIT),
        ("backward_bias", backward_bias.Shared, BACKWARD),
    ],
)
def test_tiles_take_what_a_launch_allocates(
    kernel: str, record: type[Any], blocks: Blocks | BackwardBlocks, value_dim: int
) -> None:
    """The numbers of rows, lse, delta and the marks of a repair, are the rest: some KiB."""
    allocated = shared_bytes(scratch(record, spec(128, value_dim), blocks))
    tiles = tile_bytes(kernel, blocks, (64, value_dim), 2)
    numbers = 2 * 2048 if kernel in ("backward_key", "backward_bias") else 0
    assert allocated == tiles + numbers
    beside = changed(with_pairs(128), shape={"value_dim": value_dim})
    allocated = shared_bytes(scratch(record, beside, blocks))
    numbers += 1024 if "marks" in scratch(record, beside, blocks) else 0
    assert allocated == tile_bytes(kernel, blocks, (64, value_dim), 2, {"mask": 1, "bias": 2}) + numbers


def test_what_does_not_fit_is_refused_in_a_sentence() -> None:
    many = {"key": matrix("bfloat16", 4, 256, 128)}
    with pytest.raises(
        ValueError, match="flash_toy needs 262144 bytes of shared memory, and a block has at most"
    ):
        launch(lambda *_: None, dict, "flash_toy", {}, {}, many, 1, 1)


def test_a_repair_lies_where_the_tiles_of_its_kernel_lay_but_for_the_marks() -> None:
    rooms = {"tile": rows(1, 64), "marks": vector(64, 2)}
    few, many = (Overlay(dict, {"own": rows(count, 64)}, keeps=("marks",)) for count in (1, 4))
    assert shared_bytes({**rooms, "later": few}) == shared_bytes(rooms)
    assert shared_bytes({**rooms, "later": many}) == shared_bytes(
        {"own": rows(4, 64), "marks": vector(64, 2)}
    )


def test_a_repair_visits_blocks_of_the_fast_kernels_keys() -> None:
    allocated = scratch(repair_tile.Shared, with_pairs(256))
    assert list(allocated) == [field.name for field in fields(repair_tile.Shared)]
    assert allocated["visited"] == rows(1, 256)
    assert allocated["bias"] == tiled("bfloat16", 1, 128, 256)
