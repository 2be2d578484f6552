"""Ring attention on rings of every size, by every strategy, with every clause: the long form."""

from functools import partial
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_cases import normal

from attest.kernels import flash_attention_with_lse
from attest.kernels.ring import ring_attention_with_lse
from tests.kernels.alone import run_alone
from tests.kernels.ring.ring_cases import (
    BATCH,
    DEVICES,
    HEADS,
    NAMES,
    SEQUENCE,
    assert_same,
    both_passes,
    here,
    in_shard_map,
    inputs,
    mesh_of,
    numbers,
    on_one_device,
    on_ring,
    strategies,
)


@pytest.mark.skipif(jax.device_count() >= DEVICES, reason="this is the process of eight devices")
def test_all_of_this_in_a_process_of_eight_devices() -> None:
    run_alone(__file__, {"JAX_PLATFORMS": "cpu"}, seconds=3000, devices=DEVICES)


@here
@strategies
@pytest.mark.parametrize("name", NAMES)
def test_a_ring_gives_what_one_device_gives(name: str, strategy: str) -> None:
    """Lengths that four devices do not divide, and as many keys more than rows."""
    assert_same(on_ring(name, 29, 37, 4, strategy), on_one_device(name, 29, 37))


@here
@strategies
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_rings_of_any_size(name: str, devices: int, strategy: str) -> None:
    if strategy == "ulysses" and HEADS % devices:
        pytest.skip("heads that devices do not divide are refused")
    assert_same(on_ring(name, 32, 32, devices, strategy), on_one_device(name, 32, 32))


@here
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


@here
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
