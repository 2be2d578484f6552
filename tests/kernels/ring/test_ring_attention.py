"""Ring attention on eight devices: what one device computes, forward and backward, with every clause."""

import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attest.kernels import flash_attention_with_lse
from attest.kernels.ring import passes as ring_passes
from attest.kernels.ring import ring_attention, ring_attention_with_lse
from attest.kernels.xla.blocks import ChunkSizes
from tests.kernels.jaxprs import equations
from tests.kernels.kernel_cases import normal
from tests.kernels.ring import ring_cases
from tests.kernels.ring.ring_cases import (
    HEADS,
    NAMES,
    SEQUENCE,
    STRATEGIES,
    assert_same,
    both_passes,
    features,
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


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, STRATEGIES[i % len(STRATEGIES)]) for i, name in enumerate(NAMES)]
    + [
        ("window, dropout", "ring"),
        ("positions in any order, ALiBi", "zigzag"),
    ],
)
def test_a_ring_gives_what_one_device_gives(name: str, strategy: str) -> None:
    """Lengths that the devices do not divide, and more keys than rows; all strategies run at night."""
    devices = 2 if strategy in ("zigzag", "ulysses") else 3
    assert_same(on_ring(name, 29, 37, devices, strategy), on_one_device(name, 29, 37))


@pytest.mark.parametrize(
    ("spec", "strategy"), [(P(None, None, "x"), "zigzag"), (P(None, None, None, "x"), "ring")]
)
def test_a_bias_may_be_split_by_rows_or_by_keys(spec: P, strategy: str) -> None:
    """Its gradient comes back in the same layout; a mask lies likewise."""
    options = {"bias": normal(1, HEADS, 32, 32, seed=7), "attention_mask": numbers(0, 4, 2, 1, 32, 32) > 0}
    call = in_shard_map(2, {**SEQUENCE, "bias": spec, "attention_mask": spec}, {"strategy": strategy})
    found = both_passes(call, options, inputs(32, 32))
    assert_same(found, both_passes(flash_attention_with_lse, options, inputs(32, 32)))


def test_rows_that_are_not_normalised_ask_pairs_for_their_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass may return a smaller row_max where it is not told that row_max is read."""
    real = ring_passes._forward

    def lower(passes: Any, settings: Any, call: Any) -> Any:
        found = real(passes, settings, call)
        return found if settings.reads_row_max else found._replace(row_max=found.row_max - 3.0)

    monkeypatch.setattr(ring_passes, "_forward", lower)
    name = "chunks, causal, not normalised, shared sinks"
    assert_same(on_ring(name, 28, 36, 2, "ring"), on_one_device(name, 28, 36))


@strategies
def test_the_same_ring_has_the_same_bits_twice(strategy: str) -> None:
    call = partial(ring_attention_with_lse, mesh=mesh_of(2), axis_name="x", strategy=strategy)
    options = features(32, 32)["causal, sinks, cap"]
    run = jax.jit(lambda given: both_passes(call, options, given))
    first, second = (run(inputs(32, 32)) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_ring_of_one_is_the_local_kernel() -> None:
    """To the bit, if the kernel, too, is compiled under jax.shard_map."""
    name = "causal, dropout from an origin"
    options = features(64, 64)[name]
    local = jax.shard_map(
        lambda arrays: flash_attention_with_lse(**arrays, **options),
        mesh=mesh_of(1),
        in_specs=(P(None, "x"),),
        out_specs=(P(None, "x"), P(None, None, "x")),
    )
    wanted = jax.tree.leaves(both_passes(lambda **arrays: local(arrays), {}, inputs(64, 64)))
    for strategy in ("ring", "zigzag", "ulysses"):
        found = jax.tree.leaves(on_ring(name, 64, 64, 1, strategy))
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=strategy)


@strategies
def test_gradients_of_what_devices_share_are_rounded_after_their_sum(strategy: str) -> None:
    given = inputs(32, 32, "bfloat16")
    given |= {"softmax_aux": normal(HEADS, 2, dtype="bfloat16"), "bias": normal(1, 1, 1, 1, dtype="bfloat16")}
    call = partial(ring_attention, mesh=mesh_of(2), axis_name="x", strategy=strategy)
    program = str(jax.make_jaxpr(jax.grad(lambda given: call(**given).astype("float32").sum()))(given))
    summed = set(re.findall(r"(\w+)\[[\d,]*\][^=]*= psum", program))
    assert summed == {"f32"}


def test_eager_calls_that_are_alike_compile_once(caplog: pytest.LogCaptureFixture) -> None:
    given = inputs(32, 32)

    def call() -> None:
        options: dict[str, Any] = {"causal": True, "sliding_window": (7, 0)}
        ring_attention(**given, **options, mesh=mesh_of(4), axis_name="x", strategy="ring")

    def compiled() -> int:
        caplog.clear()
        with caplog.at_level("WARNING"), jax.log_compiles():
            call()
        return sum("Finished XLA compilation" in record.getMessage() for record in caplog.records)

    assert compiled() > 0
    assert compiled() == 0


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("ring", AxisType.Auto),
        ("ring", AxisType.Explicit),
        ("zigzag", AxisType.Explicit),
        ("all_gather", AxisType.Auto),
    ],
)
def test_batch_and_heads_may_be_sharded_beside_the_sequence(strategy: str, kind: AxisType) -> None:
    name = "causal, dropout from an origin"
    mesh = mesh_of(2, kind, data=2, model=2)
    call = partial(
        ring_attention_with_lse,
        mesh=mesh,
        axis_name="x",
        batch_axes="data",
        head_axes="model",
        strategy=strategy,
    )
    with jax.set_mesh(mesh):
        found = both_passes(call, features(32, 32)[name], inputs(32, 32))
    assert_same(found, on_one_device(name, 32, 32))


@pytest.mark.parametrize(
    "counted",
    [
        {"cum_seqlens_q": np.array([0, 9, 20]), "cum_seqlens_k": np.array([0, 14, 18])},
        {"q_offset": np.array([3, -2]), "alibi_slopes": np.float32([0.5, -0.25, 0.125, 1])},
    ],
    ids=["lengths", "offsets"],
)
def test_what_is_counted_by_batch_entry_is_that_of_the_own_entries(counted: dict[str, Any]) -> None:
    """A device that has one padded sequence must not take the lengths of all for those of packed ones."""
    given = inputs(16, 16)
    call = partial(
        ring_attention_with_lse,
        causal=True,
        mesh=mesh_of(2, data=2),
        axis_name="x",
        batch_axes="data",
        strategy="ring",
    )
    wanted = both_passes(partial(flash_attention_with_lse, causal=True), counted, given)
    assert_same(both_passes(call, counted, given), wanted)


def test_ulysses_with_padding_alone_on_some_devices() -> None:
    """XLA must not exchange what is computed and the padding in two layouts."""
    given = {
        name: normal(1, 8, heads, 16, seed=heads) for name, heads in (("query", 8), ("key", 4), ("value", 4))
    }
    call = partial(ring_attention_with_lse, mesh=mesh_of(4), axis_name="x", strategy="ulysses")
    assert_same(both_passes(call, {}, given), both_passes(flash_attention_with_lse, {}, given))


def test_sinks_of_a_shard_without_rows_have_a_gradient() -> None:
    given = {**inputs(0, 8), "softmax_aux": normal(HEADS, 2)}
    call = in_shard_map(2, SEQUENCE, {})
    gradient = jax.jit(jax.grad(lambda given: call(**given)[1].sum()))(given)
    np.testing.assert_array_equal(gradient["softmax_aux"], np.zeros((HEADS, 2)))


def permutes(strategy: str, devices: int, options: dict[str, Any], gradients: bool = False) -> Counter[str]:
    """The collectives of the compiled program, by name; of permutes, also the number of sends."""
    given = inputs(128, 128)
    call = partial(ring_attention, **options, mesh=mesh_of(devices), axis_name="x", strategy=strategy)

    def run(given: dict[str, jax.Array]) -> Any:
        return jax.grad(lambda given: call(**given).sum())(given) if gradients else call(**given)

    mesh = mesh_of(devices)
    place = jax.sharding.NamedSharding(mesh, P(None, "x"))
    given = {name: jax.device_put(x, place) for name, x in given.items()}
    text = jax.jit(run).lower(given).compile().as_text()
    found = Counter(
        re.findall(r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", text)
    )
    found["sends"] = sum(
        pairs.count("{") for pairs in re.findall(r"source_target_pairs={((?:{\d+,\d+},?)*)}", text)
    )
    return found


def test_hidden_pairs_are_not_sent() -> None:
    """Keys and values: of full attention each to all others, of causal order to later devices alone."""
    full = permutes("ring", 4, {})
    assert full["sends"] == 2 * 4 * 3
    assert set(full) == {"collective-permute", "sends"}
    assert permutes("ring", 4, {"causal": True})["sends"] == 2 * (3 + 2 + 1)
    assert permutes("ring", 8, {"causal": True, "sliding_window": (10, 0)})["sends"] == 2 * 7


def test_keys_and_values_of_one_shape_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one exchange, and so do their gradients."""
    monkeypatch.setattr(ring_cases, "VALUE_DIM", ring_cases.DIM)
    assert permutes("ring", 4, {})["sends"] == 4 * 3
    assert permutes("ring", 4, {"causal": True}, gradients=True)["sends"] == 3 * (3 + 2 + 1)


@pytest.mark.parametrize(("strategy", "chooses"), [("zigzag", False), ("ring", True)])
def test_no_device_of_a_zigzag_chooses_what_it_computes(strategy: str, chooses: bool) -> None:
    """On a GPU each choice between branches would make the host wait for the device."""
    # Of blocks, the branch for values that are not finite has no loop.
    blocks = dict.fromkeys(("fwd_params", "bwd_params"), ChunkSizes(8, 8))
    options = {"causal": True, "axis_name": "x", "strategy": strategy, "platform": "xla", **blocks}
    call = partial(ring_attention, mesh=mesh_of(4), **options)
    program = jax.make_jaxpr(jax.grad(lambda given: call(**given).sum()))(inputs(64, 64)).jaxpr
    choices = [eqn for eqn in equations(program) if eqn.primitive.name == "cond"]
    loops = {eqn.primitive.name for choice in choices for eqn in equations(choice)} & {"scan", "while"}
    assert bool(loops) == chooses


def test_gradients_are_sent_home() -> None:
    """Backward sends keys and values once more, and their gradients."""
    assert permutes("ring", 4, {"causal": True}, gradients=True)["sends"] == 3 * 2 * (3 + 2 + 1)


@pytest.mark.parametrize("strategy", ["ring", "zigzag"])
def test_a_policy_of_remat_spares_the_exchange_of_the_forward_pass(strategy: str) -> None:
    call = partial(ring_attention, causal=True, mesh=mesh_of(2), axis_name="x", strategy=strategy)

    def permutes_of(policy: Any) -> int:
        layer = jax.checkpoint(lambda given: call(**given).sum(), policy=policy)
        text = str(jax.make_jaxpr(jax.grad(layer))(inputs(32, 32)))
        return text.count("ppermute[")

    names = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse")
    assert permutes_of(names) < permutes_of(None)


@pytest.mark.parametrize(
    ("strategy", "collective"), [("all_gather", "all-gather"), ("ulysses", "all-to-all")]
)
def test_other_strategies_use_their_collective_alone(strategy: str, collective: str) -> None:
    found = permutes(strategy, 4, {"causal": True})
    assert set(found) - {"sends"} == {collective}
