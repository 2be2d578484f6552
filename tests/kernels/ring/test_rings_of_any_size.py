"""Ring attention on rings of every size, by every strategy, with every clause: the long form."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attest.kernels import flash_attention_with_lse, xla
from attest.kernels.ring import ring_attention, ring_attention_with_lse
from tests.kernels.kernel_cases import normal
from tests.kernels.ring.ring_cases import (
    BATCH,
    HEADS,
    KEY_HEADS,
    NAMES,
    SEQUENCE,
    assert_same,
    both_passes,
    in_shard_map,
    inputs,
    mesh_of,
    numbers,
    on_eight_devices,
    on_one_device,
    on_ring,
    strategies,
)

pytestmark = on_eight_devices


@strategies
@pytest.mark.parametrize("name", NAMES)
def test_a_ring_gives_what_one_device_gives(name: str, strategy: str) -> None:
    """Lengths that four devices do not divide, and as many keys more than rows."""
    assert_same(on_ring(name, 29, 37, 4, strategy), on_one_device(name, 29, 37))


@strategies
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_rings_of_any_size(name: str, devices: int, strategy: str) -> None:
    if strategy == "ulysses" and HEADS % devices:
        pytest.skip("heads that devices do not divide are refused")
    assert_same(on_ring(name, 32, 32, devices, strategy), on_one_device(name, 32, 32))


@strategies
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        pytest.param((1, HEADS, 32, 32), P(None, None, "x"), id="rows split"),
        pytest.param((1, HEADS, 32, 32), P(None, None, None, "x"), id="keys split"),
        pytest.param((BATCH, 1, 32, 32), P(), id="whole"),
        pytest.param((BATCH, 1, 1, 32), P(None, None, None, "x"), id="keys alone, split"),
        pytest.param((1, HEADS, 32, 1), P(None, None, "x"), id="rows alone, split"),
        pytest.param((1, 1, 1, 1), P(), id="one entry"),
    ],
)
def test_a_bias_may_lie_in_any_way(shape: tuple[int, ...], spec: P, strategy: str) -> None:
    """Its gradient comes back in the same layout; a mask lies likewise."""
    bias, mask = normal(*shape, seed=7), numbers(0, 4, *shape) > 0
    options = {"bias": bias, "attention_mask": mask, "causal": True}
    specs = {**SEQUENCE, "bias": spec, "attention_mask": spec}
    call = in_shard_map(4, specs, {"causal": True, "strategy": strategy})
    found = both_passes(call, {"bias": bias, "attention_mask": mask}, inputs(32, 32))
    assert_same(found, both_passes(flash_attention_with_lse, options, inputs(32, 32)))


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_longer_ring_needs_no_more_memory(strategy: str) -> None:
    """With as many tokens on each device: nothing that a device was sent is kept, forward or backward."""
    sizes: list[int] = []
    for devices in (4, 8):
        mesh = mesh_of(devices)
        place = NamedSharding(mesh, P(None, "x"))
        x = jax.ShapeDtypeStruct((1, 256 * devices, 8, 64), "bfloat16", sharding=place)
        call = partial(ring_attention_with_lse, causal=True, mesh=mesh, axis_name="x", strategy=strategy)

        def loss(q: Any, k: Any, v: Any, call: Any = call) -> Any:
            return call(q, k, v)[0].astype("float32").sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[1] <= 1.1 * sizes[0]


@strategies
def test_lengths_that_divide_are_not_padded(strategy: str) -> None:
    """Whole pieces of the diagonal are calls in causal order of their own."""
    name = "causal, sinks, cap"
    assert_same(on_ring(name, 64, 64, 2, strategy), on_one_device(name, 64, 64))


@strategies
def test_dropout_keeps_what_one_device_keeps(strategy: str) -> None:
    """One-hot values show each weight: those that are 0 are the same ones on any ring."""
    q = k = 32
    given = inputs(q, k) | {"value": jnp.broadcast_to(jnp.eye(k)[None, :, None], (BATCH, k, KEY_HEADS, k))}
    options: dict[str, Any] = {"dropout_prob": 0.5, "dropout_seed": 9, "causal": True}
    wanted = flash_attention_with_lse(**given, **options)[0] != 0
    for devices in (2, 4):
        call = partial(ring_attention, **options, mesh=mesh_of(devices), axis_name="x", strategy=strategy)
        found = jax.jit(lambda given, call=call: call(**given))(given)
        np.testing.assert_array_equal(found != 0, wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_rounded_once(dtype: str) -> None:
    """Sums are float32: a ring of eight is no further off than one device, up to a bit of the results."""
    given = inputs(32, 32, dtype)
    wanted = both_passes(flash_attention_with_lse, {"causal": True}, inputs(32, 32))
    call = partial(ring_attention_with_lse, mesh=mesh_of(8), axis_name="x", strategy="ring")
    for run in (call, flash_attention_with_lse):
        found = both_passes(run, {"causal": True}, given)
        assert found[0][0].dtype == dtype
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            off = jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max()
            assert off < (0.03 if dtype == "bfloat16" else 0.004)


def test_transforms() -> None:
    """Under jax.checkpoint, scan and vmap."""
    given = inputs(32, 32)
    call = partial(ring_attention, causal=True, mesh=mesh_of(2), axis_name="x")

    def loss(call: Any, given: dict[str, jax.Array]) -> jax.Array:
        return (call(**given) ** 2).sum()

    wanted = jax.grad(partial(loss, partial(ring_attention, causal=True)))(given)
    assert_same(jax.jit(jax.grad(jax.checkpoint(partial(loss, call))))(given), wanted)

    def twice(given: dict[str, jax.Array]) -> jax.Array:
        return jax.lax.scan(lambda total, _: (total + loss(call, given), None), 0.0, length=2)[0] / 2

    assert_same(jax.jit(jax.grad(twice))(given), wanted)
    several = jax.tree.map(lambda x: jnp.stack((x, x)), given)
    found = jax.jit(jax.vmap(jax.grad(partial(loss, call))))(several)
    assert_same(jax.tree.map(lambda x: x[1], found), wanted)


def test_block_sizes_reach_every_pair() -> None:
    given = inputs(64, 64)
    sizes = xla.ChunkSizes(q=8, k=8)
    call = partial(ring_attention, mesh=mesh_of(2), axis_name="x", strategy="ring", platform="xla")
    plain, cut = (jax.jit(partial(call, fwd_params=x)).lower(**given).as_text() for x in (None, sizes))
    assert plain != cut
    np.testing.assert_allclose(call(**given, fwd_params=sizes), call(**given), rtol=1e-5, atol=1e-6)
