"""The order of the tiles of the Hopper kernels: each once, long ones first, so that programs end together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from attest.kernels.pallas.mosaic_gpu.blocks import TILE_BLOCKS, Blocks
from attest.kernels.pallas.mosaic_gpu.schedule.order import (
    locate_fused_tile,
    locate_key_tile,
    locate_query_tile,
    schedule,
)
from attest.kernels.pallas.mosaic_gpu.schedule.tiles import over_tiles
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.visibility.tile_order import L2_BYTES
from tests.kernels.mosaic_gpu.test_scratch import changed, spec

PROGRAMS = 132


def causal(
    batch: int, heads: int, group: int, q_length: int, k_length: int, q_block: int = 128
) -> KernelSpec:
    sizes = {"batch": batch, "heads": heads, "group": group, "q_length": q_length, "k_length": k_length}
    dims = {"head_dim": 128, "value_dim": 128, "q_block": q_block}
    return changed(spec(128), shape={**sizes, **dims}, visibility={"causal": True})


SPECS = {
    "multi-query": causal(1, 8, 8, 65536, 65536),
    "more heads than the cache holds": causal(4, 16, 1, 8192, 8192),
    "a last group of fewer heads": causal(3, 7, 1, 8192, 8192),
    "grouped": causal(2, 32, 4, 4096, 4096),
    "tiles of 192": causal(8, 16, 1, 1024, 1024, q_block=192),
    "fewer queries than keys": causal(2, 4, 2, 300, 5000),
    "more queries than keys": causal(2, 4, 2, 5000, 300),
    "one tile": causal(1, 1, 1, 8, 8),
    "not causal": changed(causal(2, 4, 2, 1024, 1024), visibility={"causal": False}),
}

each_spec = pytest.mark.parametrize("it", SPECS.values(), ids=SPECS.keys())


def visited(it: KernelSpec, block: np.ndarray) -> np.ndarray:
    """The key blocks that a block of queries sees in causal order, by the last of its rows."""
    shape = it.shape
    last = block * shape.q_block + shape.q_block - 1 + shape.k_length - shape.q_length
    return np.maximum(np.minimum(last, shape.k_length - 1) // shape.k_block + 1, 1)


@each_spec
def test_each_tile_is_taken_once(it: KernelSpec) -> None:
    for order, heads, blocks in (
        (locate_query_tile, it.shape.heads, it.shape.q_blocks),
        (locate_key_tile, it.shape.key_heads, it.shape.k_blocks),
        (locate_fused_tile, it.shape.key_heads, it.shape.k_blocks),
    ):
        tiles = it.shape.entries * heads * blocks
        places = np.stack([np.asarray(x) for x in order(it, jnp.arange(tiles, dtype=jnp.int32))])
        assert (places < np.array([[it.shape.entries], [heads], [blocks]])).all()
        assert (places >= 0).all()
        assert len(np.unique(places, axis=1).T) == tiles


@each_spec
def test_the_heads_of_a_group_fit_the_cache_and_their_long_tiles_come_first(it: KernelSpec) -> None:
    tiles = it.shape.entries * it.shape.heads * it.shape.q_blocks
    entry, head, block = (np.asarray(x) for x in locate_query_tile(it, jnp.arange(tiles, dtype=jnp.int32)))
    # A group ends where the blocks start again from the last one.
    groups = np.split(np.arange(tiles), 1 + np.flatnonzero(np.diff(block) > 0))
    for group in groups:
        assert (np.diff(block[group]) <= 0).all()
        key_heads = {(e, h // it.shape.group) for e, h in zip(entry[group], head[group], strict=True)}
        of_one = it.shape.k_length * (it.shape.head_dim + it.shape.value_dim) * 2
        assert len(key_heads) <= max(1, L2_BYTES // of_one)


@each_spec
def test_programs_that_wait_for_others_start_behind_them(it: KernelSpec) -> None:
    """A program adds to dquery after those of its head with earlier keys: these have smaller indices."""
    tiles = jnp.arange(it.shape.entries * it.shape.key_heads * it.shape.k_blocks, dtype=jnp.int32)
    entry, head, block = (np.asarray(x) for x in locate_fused_tile(it, tiles))
    for of_head in range(it.shape.entries * it.shape.key_heads):
        own = block[entry * it.shape.key_heads + head == of_head]
        assert own.tolist() == list(range(it.shape.k_blocks))


@each_spec
def test_a_schedule_has_each_tile_once(it: KernelSpec) -> None:
    table = schedule(it, PROGRAMS)
    tiles = [tile for row in table.tolist() for tile in row[1 : 1 + row[0]]]
    assert sorted(tiles) == list(range(it.shape.entries * it.shape.heads * it.shape.q_blocks))


@pytest.mark.parametrize("name", ["multi-query", "more heads than the cache holds", "grouped"])
def test_programs_of_a_schedule_end_together(name: str) -> None:
    """In turns, the program with most to do would have 24 % more than the mean of the multi-query call."""
    it = SPECS[name]
    table = schedule(it, PROGRAMS)
    loads = []
    for row in table:
        _, _, block = locate_query_tile(it, jnp.asarray(row[1 : 1 + row[0]]))
        loads.append((visited(it, np.asarray(block)) + TILE_BLOCKS).sum())
    assert max(loads) <= 1.02 * np.mean(loads)


@pytest.mark.parametrize("programs", [1, 3, 7])
@pytest.mark.parametrize("is_causal", [False, True])
def test_each_tile_is_worked_on_once_with_what_was_loaded_of_it(
    is_causal: bool, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program begins to load of the next tile while this one is at work, and of none past the last."""
    it = changed(causal(1, 4, 1, 640, 640), visibility={"causal": is_causal})
    blocks = Blocks(k=128, stages=2, consumers=2, registers=(240, 24), partial_sums=True, programs=programs)
    loads: list[int] = []
    worked: list[list[int]] = []

    def load(tile: Any) -> Any:
        jax.debug.callback(lambda tile: loads.append(int(tile)), tile, ordered=True)
        return 3 * tile + 1

    def work(nth: Any, tile: Any, loaded: Any, count: Any) -> Any:
        jax.debug.callback(
            lambda *x: worked.append([int(n) for n in x]), nth, tile, loaded, count, ordered=True
        )
        return count + 2

    def walk(_: int) -> None:
        arrays = {"schedule": jax.new_ref(jnp.asarray(schedule(it, programs)))} if is_causal else {}
        over_tiles(it, blocks, arrays, load, work)

    for program in range(programs):
        monkeypatch.setattr(lax, "axis_index", lambda _, program=program: jnp.int32(program))
        before = len(worked)
        jax.jit(walk, static_argnums=0)(program)  # traced anew for each
        jax.effects_barrier()
        of_program = worked[before:]
        assert [[nth, count] for nth, _, _, count in of_program] == [
            [n, 2 * n] for n in range(len(of_program))
        ]
    assert sorted(tile for _, tile, _, _ in worked) == list(range(20))
    assert all(loaded == 3 * tile + 1 for _, tile, loaded, _ in worked)
    assert set(loads) == set(range(20))
