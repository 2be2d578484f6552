"""Calls under `jax.vmap` on a mesh: each device computes its own entries, and waits for no other one."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attest.kernels import flash_attention, xla
from tests.kernels.kernel_cases import normal
from tests.kernels.meshes import assert_same, collectives, kinds, mesh_of

Q, K, DIM = 12, 16, 8

# The interpreter of Triton is for the kernels of Triton alone.
pytestmark = pytest.mark.process(devices=8, TRITON_INTERPRET="1")
BLOCKS = xla.ChunkSizes(8, 8)
in_pieces = pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["in one piece", "in blocks"])


# name: the axes in front of [length, heads, head dim], the spec of the arrays, and how many are mapped.
CASES = {
    "the mapped axis, and heads": ((4, 2), P("data", None, None, "model"), 1),
    "the batch, and heads": ((3, 4), P(None, "data", None, "model"), 1),
    "the mapped axis, and the batch": ((4, 2), P("data", "model"), 1),
    "both axes of two vmaps": ((4, 2, 1), P("data", "model"), 2),
    "the inner one of two vmaps": ((3, 8, 1), P(None, ("data", "model")), 2),
}


def vmapped(call: Any, levels: int) -> Any:
    for _ in range(levels):
        call = jax.vmap(call)
    return call


def both_passes(call: Any, *arrays: jax.Array) -> Any:
    out, pull = jax.vjp(call, *arrays)
    return out, pull(jnp.sin(out))


def self_attention(call: Any) -> Any:
    return lambda query, key: call(query, key, key)


@cache
def of_case(name: str, blocks: Any) -> Any:
    """A case compiled when it is called, its arrays, and its results on one device."""
    front, _, levels = CASES[name]
    arrays = normal(*front, Q, 4, DIM), normal(*front, K, 4, DIM, seed=2)
    call = self_attention(partial(xla.flash_attention, causal=True, fwd_params=blocks, bwd_params=blocks))
    run = jax.jit(partial(both_passes, vmapped(call, levels)))
    return run, arrays, run(*arrays)


@pytest.mark.found_outside
@kinds
@pytest.mark.parametrize(
    ("name", "blocks"),
    [*((name, None) for name in CASES), ("the mapped axis, and heads", BLOCKS)],
    ids=lambda x: x if isinstance(x, str) else "in blocks" if x else "in one piece",
)
def test_no_device_waits_for_another(name: str, blocks: Any, kind: Any) -> None:
    run, arrays, wanted = of_case(name, blocks)
    spec = CASES[name][1]
    mesh = mesh_of(4, 2, kind)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
        program = run.lower(*sharded).compile()
        found = program(*sharded)
    assert_same(found, wanted)
    assert not collectives(program.as_text())
    for x in jax.tree.leaves(found):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


@pytest.mark.found_outside
def test_kernels_of_triton_run_where_the_mapped_axis_is_sharded() -> None:
    arrays = normal(2, 1, Q, 2, DIM), normal(2, 1, K, 2, DIM, seed=2)
    call = self_attention(partial(flash_attention, platform="triton", causal=True))
    run = jax.jit(partial(both_passes, jax.vmap(call)))
    wanted = run(*arrays)
    mesh = mesh_of(2, 1)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in arrays]
        program = run.lower(*sharded).compile()
        found = program(*sharded)
    assert_same(found, wanted)
    assert not collectives(program.as_text())


@pytest.mark.found_outside
def test_kernels_of_hopper_lower_where_the_mapped_axis_is_sharded() -> None:
    query = jnp.ones((4, 2, 256, 4, 64), jnp.bfloat16)
    call = self_attention(partial(flash_attention, platform="mosaic_gpu", causal=True))
    mesh = mesh_of(4, 2)
    with jax.set_mesh(mesh):
        query = jax.device_put(query, NamedSharding(mesh, P("data", None, None, "model")))
        both = jax.jit(partial(both_passes, jax.vmap(call))).trace(query, query)
        program = jax.jit(jax.vmap(call)).trace(query, query).lower(lowering_platforms=("cuda",)).as_text()
    assert "flash_backward" in str(both.jaxpr)
    assert "flash_forward" in program
    assert "all_reduce" not in program


@kinds
@pytest.mark.parametrize(
    ("mapped", "blocks"),
    [("query", None), ("key", BLOCKS), ("bias", None)],
    ids=lambda x: x if isinstance(x, str) else "in blocks" if x else "in one piece",
)
def test_operands_that_a_vmap_does_not_map_are_shared(mapped: str, blocks: Any, kind: Any) -> None:
    """Only the gradients of what is shared are sums over devices."""
    given = {
        "query": normal(2, Q, 4, DIM),
        "key": normal(2, K, 2, DIM, seed=2),
        "bias": normal(4, Q, K, seed=3),
    }
    given[mapped] = jnp.stack([given[mapped] * scale for scale in (1.0, 0.5, 2.0, -1.0)])
    axes = tuple(0 if name == mapped else None for name in given)

    def call(query: Any, key: Any, bias: Any) -> Any:
        return xla.flash_attention(
            query, key, key, bias=bias, causal=True, fwd_params=blocks, bwd_params=blocks
        )

    forward = jax.jit(jax.vmap(call, in_axes=axes))
    run = jax.jit(partial(both_passes, jax.vmap(call, in_axes=axes)))
    wanted = run(*given.values())
    mesh = mesh_of(4, 2, kind)
    heads = {"query": P(None, None, "model"), "key": P(None, None, "model"), "bias": P("model")}
    with jax.set_mesh(mesh):
        sharded = [
            jax.device_put(x, NamedSharding(mesh, P("data", *spec) if name == mapped else spec))
            for (name, x), spec in zip(given.items(), heads.values(), strict=True)
        ]
        program = run.lower(*sharded).compile()
        assert_same(program(*sharded), wanted)
        assert not collectives(forward.lower(*sharded).compile().as_text())
    assert set(collectives(program.as_text())) == {"all-reduce"}


@kinds
@in_pieces
def test_values_that_are_not_finite_stay_in_their_entry_of_a_vmap(blocks: Any, kind: Any) -> None:
    query, key = normal(4, 1, Q, 2, DIM), normal(4, 1, K, 2, DIM, seed=2)
    value = key.at[2, 0, 3].set(jnp.nan)
    one = partial(xla.flash_attention, causal=True, fwd_params=blocks)
    wanted = jnp.stack([one(query[i], key[i], value[i]) for i in range(4)])
    mesh = mesh_of(4, 2, kind)
    with jax.set_mesh(mesh):
        sharded = (jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (query, key, value))
        found = jax.jit(jax.vmap(one))(*sharded)
    assert_same(found, wanted)
    assert np.isnan(wanted[2]).any()


@kinds
def test_dropout_under_a_vmap_drops_what_one_device_drops(kind: Any) -> None:
    """Batch and heads are sharded beside the mapped axis."""
    arrays = normal(2, 2, Q, 4, DIM), normal(2, 2, K, 4, DIM, seed=2)
    call = self_attention(partial(xla.flash_attention, dropout_prob=0.5, dropout_seed=3))
    run = jax.jit(partial(both_passes, jax.vmap(call)))
    wanted = run(*arrays)
    mesh = jax.make_mesh((2, 2, 2), ("entry", "data", "model"), axis_types=(kind,) * 3)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, NamedSharding(mesh, P("entry", "data", None, "model"))) for x in arrays]
        assert_same(run(*sharded), wanted)
