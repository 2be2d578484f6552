"""Calls on a mesh: each device computes its own batch entries and heads, and nothing is gathered."""

from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attest.kernels import xla
from attest.kernels.call.call import Call
from attest.kernels.call.positions import Positions
from attest.kernels.sharding.explicit import LAYOUTS
from tests.kernels.kernel_cases import normal
from tests.kernels.meshes import assert_same, collectives, kinds, mesh_of

DEVICES = 8
BATCH, Q, K, DIM, VALUE_DIM = 4, 12, 16, 8, 4

here = pytest.mark.process(devices=DEVICES)


def ids(length: int) -> np.ndarray:
    return np.repeat(np.array([[0, 1], [2, 0], [1, -1], [0, 0]], np.int32), length // 2, axis=1)


# name: options that are arrays, with the axes that are a batch and that are heads; and those that are static.
OPTIONS: dict[str, tuple[dict[str, tuple[Any, tuple[str | None, ...]]], dict[str, Any]]] = {
    "causal, dropout from an origin": (
        {},
        {"causal": True, "dropout_prob": 0.4, "dropout_seed": 5, "origin": (2, 3, 4, 8)},
    ),
    "dropout that all heads share": (
        {},
        {"dropout_prob": 0.4, "dropout_seed": 5, "dropout_shared": "h", "origin": (2, 3, 4, 8)},
    ),
    "dropout that all entries and heads share": (
        {},
        {"causal": True, "dropout_prob": 0.4, "dropout_seed": 5, "dropout_shared": "bh"},
    ),
    "bias, sinks": (
        {"bias": (normal(BATCH, 4, 1, K), ("data", "model")), "softmax_aux": (normal(4, 2), ("model",))},
        {},
    ),
    "mask of all heads, offsets, ALiBi": (
        {
            "attention_mask": (np.random.default_rng(2).random((BATCH, 1, Q, K)) < 0.7, ("data",)),
            "q_offset": (np.array([-2, 0, 4, 30], np.int32), ("data",)),
            "alibi_slopes": (np.array([[0.5, -0.25, 0.125, 1.0]], np.float32), (None, "model")),
        },
        {"causal": True},
    ),
    "segments": (
        {"q_segment_ids": (ids(Q), ("data",)), "kv_segment_ids": (ids(K), ("data",))},
        {"causal": True},
    ),
    "lengths": (
        {
            "cum_seqlens_q": (np.array([0, 3, 3, 15, 20], np.int32), ()),
            "cum_seqlens_k": (np.array([0, 16, 20, 30, 40], np.int32), ()),
        },
        {"causal": True},
    ),
    "ranges, chunks": (
        {
            "kv_start": (np.arange(BATCH * Q, dtype=np.int32).reshape(BATCH, Q) % 5, ("data",)),
            "kv_end": (np.arange(4, 4 + Q, dtype=np.int32)[None], ()),
        },
        {"chunk_size": 9},
    ),
    "ALiBi of each entry, offsets": (
        {
            "alibi_slopes": (np.random.default_rng(4).normal(0, 0.2, (BATCH, 4)).astype(np.float32), ()),
            "q_offset": (np.array([-2, 0, 4, 30], np.int32), ("data",)),
        },
        {"causal": True},
    ),
    "positions": (
        {"kv_positions": (np.arange(K, dtype=np.int32)[None, ::-1], ())},
        {"sliding_window": (5, 2)},
    ),
}


def tensors(heads: int, key_heads: int) -> dict[str, jax.Array]:
    return {
        "query": normal(BATCH, Q, heads, DIM),
        "key": normal(BATCH, K, key_heads, DIM, seed=2),
        "value": normal(BATCH, K, key_heads, VALUE_DIM, seed=3),
    }


def both_passes(options: dict[str, Any], floats: dict[str, Any], others: dict[str, Any]) -> Any:
    def call(floats: dict[str, Any]) -> Any:
        return xla.flash_attention_with_lse(**floats, **others, **options)

    (out, lse), pull = jax.vjp(call, floats)
    return (out, lse), pull((jnp.sin(out), jnp.where(lse == -jnp.inf, 0.0, jnp.cos(lse))))[0]


def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = ("query", "key", "value", "bias", "softmax_aux")
    floats = {name: x for name, x in options.items() if name in names}
    return floats, {name: x for name, x in options.items() if name not in names}


@lru_cache
def on_one_device(name: str) -> Any:
    arrays, static = OPTIONS[name]
    given = tensors(4, 2) | {key: x for key, (x, _) in arrays.items()}
    return jax.jit(partial(both_passes, static))(*split(given))


@here
@kinds
@pytest.mark.parametrize(("name", "placed"), [*((name, True) for name in OPTIONS), ("bias, sinks", False)])
def test_each_device_computes_its_own(name: str, placed: bool, kind: AxisType) -> None:
    """placed: whether the options are sharded, too; else they are whole on every device."""
    arrays, static = OPTIONS[name]
    mesh = mesh_of(4, 2, kind)
    given = tensors(4, 2)
    axes = dict.fromkeys(given, ("data", None, "model")) | {
        key: own if placed else () for key, (_, own) in arrays.items()
    }
    values = given | {key: x for key, (x, _) in arrays.items()}
    with jax.set_mesh(mesh):
        sharded = {key: jax.device_put(x, NamedSharding(mesh, P(*axes[key]))) for key, x in values.items()}
        run = jax.jit(partial(both_passes, static)).lower(*split(sharded)).compile()
        found = run(*split(sharded))
    assert_same(found, on_one_device(name))
    assert found[0][0].sharding.is_equivalent_to(NamedSharding(mesh, P("data", None, "model")), 4)
    if kind == AxisType.Explicit:
        for key, x in found[1].items():
            assert jax.typeof(x).sharding.spec == jax.typeof(sharded[key]).sharding.spec
    counted = collectives(run.as_text())
    # A gradient of what several devices read is summed over each axis of the mesh that they are on.
    shared = sum(key in ("bias", "softmax_aux") and axes[key] != ("data", "model") for key in values)
    assert set(counted) <= {"all-reduce"}
    assert counted["all-reduce"] <= 2 * shared


@here
@pytest.mark.parametrize(
    ("heads", "key_heads", "devices"),
    [
        pytest.param(8, 2, 4, id="two devices share a key head"),
        pytest.param(8, 1, 2, id="one key head"),
        pytest.param(6, 3, 2, id="groups lie on two devices"),
    ],
)
@kinds
def test_key_heads_that_devices_share_are_whole_on_each(
    heads: int, key_heads: int, devices: int, kind: AxisType
) -> None:
    mesh = mesh_of(8 // devices, devices, kind)
    given = tensors(heads, key_heads)
    options = {"causal": True, "dropout_prob": 0.3, "dropout_seed": 5}
    wanted = jax.jit(partial(both_passes, options))(given, {})
    with jax.set_mesh(mesh):
        axes = {"query": P("data", None, "model"), "key": P("data"), "value": P("data")}
        sharded = {name: jax.device_put(x, NamedSharding(mesh, axes[name])) for name, x in given.items()}
        assert_same(jax.jit(partial(both_passes, options))(sharded, {}), wanted)


@here
@kinds
def test_gradients_of_bfloat16(kind: AxisType) -> None:
    """Whole keys and a bias that all batch entries share: their gradients are sums over devices."""
    mesh = mesh_of(4, 2, kind)
    given = {name: x.astype(jnp.bfloat16) for name, x in tensors(4, 1).items()}
    given["bias"] = normal(1, 4, Q, K, dtype="bfloat16")
    wanted = jax.jit(partial(both_passes, {}))(given, {})
    with jax.set_mesh(mesh):
        axes = {"query": P("data", None, "model"), "key": P("data"), "value": P("data"), "bias": P()}
        sharded = {name: jax.device_put(x, NamedSharding(mesh, axes[name])) for name, x in given.items()}
        found = jax.jit(partial(both_passes, {}))(sharded, {})
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)


@here
def test_packed_sequences_are_not_cut_where_one_device_has_the_batch() -> None:
    mesh = mesh_of(1, 2)
    given = {name: x[:1] for name, x in tensors(4, 2).items()}
    lengths = {
        "cum_seqlens_q": np.array([0, 5, 12], np.int32),
        "cum_seqlens_k": np.array([0, 9, 16], np.int32),
    }
    wanted = jax.jit(partial(both_passes, {"causal": True}))(given, lengths)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("data", None, "model"))
        sharded = {name: jax.device_put(x, sharding) for name, x in given.items()}
        assert_same(jax.jit(partial(both_passes, {"causal": True}))(sharded, lengths), wanted)


def of_scan(call: Any) -> Any:
    return lambda *arrays: jax.lax.scan(lambda carry, _: (carry, call(*arrays)), None, None, length=1)[1][0]


def of_vmap(call: Any) -> Any:
    return lambda *arrays: jax.vmap(call)(*(x[None] for x in arrays))[0]


@here
@kinds
def test_every_transform_gives_the_same_answer(kind: AxisType) -> None:
    """The last one is eager."""
    mesh = mesh_of(2, 4, kind)
    given = tuple(tensors(4, 4).values())

    def gradients(call: Any, arrays: Any) -> Any:
        out, pull = jax.vjp(call, *arrays)
        return out, pull(jnp.sin(out))

    call = partial(xla.flash_attention, causal=True)
    wanted = gradients(call, given)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("data", None, "model"))
        sharded = tuple(jax.device_put(x, sharding) for x in given)
        for way in (jax.checkpoint, of_scan, of_vmap, lambda call: call):
            assert_same(gradients(way(call), sharded), wanted)


def gradient_of(query: jax.Array) -> jax.Array:
    out, pull = jax.vjp(lambda x: xla.flash_attention(x, x, x, causal=True), query)
    return pull(out)[0]


@here
@kinds
@pytest.mark.parametrize("by_hand", [False, True], ids=["dispatched", "shard_map"])
def test_export_over_several_devices(by_hand: bool, kind: AxisType) -> None:
    mesh = mesh_of(4, 2, kind)
    spec = P("data", None, "model")
    query = normal(BATCH, Q, 4, DIM)
    wanted = gradient_of(query)
    run = jax.shard_map(gradient_of, mesh=mesh, in_specs=spec, out_specs=spec) if by_hand else gradient_of
    with jax.set_mesh(mesh):
        query = jax.device_put(query, NamedSharding(mesh, spec))
        if kind == AxisType.Auto and not by_hand:
            words = (
                r"^flash_attention: got exported in a program for 8 devices that XLA partitions; expected "
                r"arrays on an explicit mesh, or a call inside jax\.shard_map\."
            )
            with pytest.raises(NotImplementedError, match=words):
                export.export(jax.jit(run))(query)
            return
        program = export.export(jax.jit(run))(query)
        assert program.nr_devices == DEVICES
        assert_same(jax.jit(program.call)(query), wanted)


@here
def test_inside_shard_map_a_call_runs_as_it_is() -> None:
    """Whatever the mesh is, and where visibility depends on no array."""
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
        call = partial(xla.flash_attention, causal=True)
        given = tuple(tensors(2, 1).values())
        wanted = call(*given)
        with jax.set_mesh(mesh):
            sharded = tuple(jax.device_put(x, NamedSharding(mesh, P("data"))) for x in given)
            run = jax.jit(jax.shard_map(call, in_specs=(P("data"),) * 3, out_specs=P("data")))
            assert_same(run(*sharded), wanted)


@here
@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        (
            "query",
            P(None, "data"),
            r"^query: got axis 1 sharded over data; expected all of it on every device\.",
        ),
        ("key", P(None, None, None, "model"), r"^key: got axis 3 sharded over model"),
        (
            "value",
            P("model"),
            r"^value: got axis 0 sharded over model; expected the batch sharded as those of query",
        ),
    ],
)
def test_what_is_sharded_otherwise_is_refused_by_name(name: str, spec: Any, words: str) -> None:
    mesh = mesh_of(4, 2)
    with jax.set_mesh(mesh):
        arrays = {
            key: jax.device_put(x, NamedSharding(mesh, spec if key == name else P()))
            for key, x in tensors(2, 2).items()
        }
        with pytest.raises(NotImplementedError, match=words):
            xla.flash_attention(**arrays)


@here
def test_what_devices_cannot_divide_is_computed_by_each() -> None:
    """Three heads on two devices: XLA gathers them, and the batch stays where it is."""
    mesh = mesh_of(4, 2, AxisType.Auto)
    given = tensors(3, 3)
    wanted = jax.jit(partial(both_passes, {"causal": True}))(given, {})
    sharding = NamedSharding(mesh, P("data"))
    constrained = NamedSharding(mesh, P("data", None, "model"))

    def run(given: Any) -> Any:
        query = jax.lax.with_sharding_constraint(given["query"], constrained)
        return both_passes({"causal": True}, given | {"query": query}, {})

    sharded = {name: jax.device_put(x, sharding) for name, x in given.items()}
    assert_same(jax.jit(run)(sharded), wanted)


@here
def test_a_program_of_one_device_is_the_pass_itself() -> None:
    """In a process of several devices, too."""
    given = tuple(tensors(2, 1).values())
    program = jax.jit(xla.flash_attention).lower(*given).as_text()
    assert "CustomSPMDPartitioning" not in program


def test_every_array_of_a_call_has_a_layout() -> None:
    arrays = [field.name for field in fields(Call) if not field.metadata.get("static")]
    arrays += [field.name for field in fields(Positions)]
    assert sorted(LAYOUTS) == sorted(set(arrays) - {"positions"})
