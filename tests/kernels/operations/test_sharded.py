"""Operations over a mesh: specs of the operands, in a process of eight devices."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attest.kernels import operations, xla
from attest.kernels.configs import tunable
from attest.kernels.operations import (
    AutotunePolicy,
    FlashAttention,
    FlashAttentionConfig,
    MaskInfo,
)
from attest.kernels.operations.easydel import FlashAttn, OperationMetadata
from tests.kernels.kernel_cases import normal, qkv
from tests.kernels.meshes import mesh
from tests.kernels.operations.toy import first_refused

DEVICES = 8
pytestmark = pytest.mark.process(devices=DEVICES)


QKV = qkv(4, 16, 24, 8, 2, 8, 4)
IDS = jnp.repeat(jnp.arange(4), 6)[None].repeat(4, 0)
SEGMENTS = MaskInfo.from_segments(IDS[:, :16], IDS)
SPEC = P("data", None, "model")
# name: operands behind the value by name, the spec of key and value, specs of the others, and options.
CALLS: dict[str, tuple[dict[str, Any], Any, dict[str, Any], dict[str, Any]]] = {
    "causal, dropout": ({}, P("data"), {}, {"causal": True, "dropout_prob": 0.4, "dropout_seed": 5}),
    "shared dropout": ({}, P("data"), {}, {"dropout_prob": 0.4, "dropout_seed": 5, "dropout_shared": "bh"}),
    "bias of all, sinks": (
        {"bias": normal(4, 8, 16, 24), "softmax_aux": normal(8, 2)},
        P("data"),
        {"bias": P("data", "model"), "softmax_aux": P("model")},
        {},
    ),
    "whole bias and sinks": ({"bias": normal(4, 8, 16, 24), "softmax_aux": normal(8, 2)}, None, {}, {}),
    "segments": ({}, P("data"), {}, {"mask_info": SEGMENTS, "sliding_window": (3, 3)}),
    "offsets, a mask": (
        {},
        None,
        {},
        {"q_offset": jnp.array([0, 3, 5, 8]), "causal": True, "attention_mask": normal(4, 1, 16, 24) > -0.5},
    ),
    "a MaskInfo of lengths, offsets": (
        {},
        P("data"),
        {},
        {
            "mask_info": MaskInfo.from_cu_seqlens(
                np.array([0, 16, 20, 30, 41]), np.array([0, 24, 30, 44, 60]), padded=True
            ).with_positions(q_offset=jnp.array([0, 3, 5, 8])),
            "causal": True,
        },
    ),
    "lengths": (
        {"cum_seqlens_q": jnp.array([0, 16, 20, 30, 41]), "cum_seqlens_k": jnp.array([0, 24, 30, 44, 60])},
        P("data"),
        {},
        {"causal": True},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_over_a_mesh_is_that_of_one_device(name: str) -> None:
    operands, of_keys, specs, options = CALLS[name]
    order = ("bias", "cum_seqlens_q", "cum_seqlens_k", "softmax_aux")
    where = {
        "mesh": mesh(),
        "in_specs": (SPEC, of_keys, of_keys, *(specs.get(operand) for operand in order)),
        "out_specs": SPEC,
    }
    floats = {x: operands[x] for x in ("bias", "softmax_aux") if x in operands}
    rest = {x: y for x, y in operands.items() if x not in floats}

    def loss(arrays: tuple[Any, ...], floats: dict[str, Any], where: dict[str, Any]) -> Any:
        out = operations.flash_attention(*arrays, **floats, **rest, **options, **where)
        return (out**2).sum(), out

    for got, want in zip(
        jax.tree.leaves(
            jax.jit(lambda *x: jax.grad(loss, argnums=(0, 1), has_aux=True)(*x, where))(QKV, floats)
        ),
        jax.tree.leaves(jax.grad(loss, argnums=(0, 1), has_aux=True)(QKV, floats, {})),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def sixteen_bits(x: Any) -> Any:
    return x.astype(jnp.bfloat16)


def test_a_kernel_of_somebody_else_gets_keys_in_their_own_dtype() -> None:
    seen: list[Any] = []

    class Theirs(FlashAttention):
        def get_impl(self, cfg: FlashAttentionConfig) -> Any:
            def attend(query: Any, key: Any, value: Any) -> Any:
                seen.extend(x.dtype for x in (query, key, value))
                return xla.flash_attention(query, key, value)

            return attend

    query, key, value = map(sixteen_bits, QKV)
    function, operands = Theirs().create_shard_map_wrapper(
        query, key, value, mesh=mesh(), in_specs=(SPEC,), out_specs=SPEC, cfg=FlashAttentionConfig()
    )
    assert function(*operands).dtype == jnp.bfloat16
    assert set(seen) == {jnp.dtype("bfloat16")}


def test_keys_in_another_dtype_than_query_are_refused() -> None:
    query, key, value = QKV
    with pytest.raises(ValueError, match="key: got dtype bfloat16; expected float32, the dtype of query"):
        operations.flash_attention(
            query, sixteen_bits(key), value, mesh=mesh(), in_specs=(SPEC,), out_specs=SPEC
        )
    with pytest.raises(ValueError, match="key: got dtype float32; expected bfloat16, the dtype of query"):
        operations.flash_attention(
            sixteen_bits(query), key, value, mesh=mesh(), in_specs=(SPEC,), out_specs=SPEC
        )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_eager_call_that_is_alike_compiles_nothing(kind: AxisType) -> None:
    where: Any = {"mesh": mesh(kind), "in_specs": (SPEC, None, None), "out_specs": SPEC}
    options: Any = {"causal": True, "dropout_prob": 0.4, "dropout_seed": 5}
    first = operations.flash_attention(*QKV, **options, **where)
    compiled: list[str] = []

    def note(event: str, _seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        again = operations.flash_attention(*QKV, **options, **where)
        assert not compiled
        operations.flash_attention(*QKV, **{**options, "dropout_seed": 6}, **where)
        other = operations.flash_attention(*QKV, **where)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert compiled
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_nothing_is_gathered() -> None:
    function, operands = FlashAttention().create_shard_map_wrapper(
        *QKV,
        mesh=mesh(),
        in_specs=(SPEC, None, None),
        out_specs=SPEC,
        cfg=FlashAttentionConfig(),
        causal=True,
    )
    text = jax.jit(function).lower(*operands).compile().as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)


def test_an_explicit_mesh_and_a_config_work_too() -> None:
    sizes = FlashAttentionConfig(config=xla.Config(xla.ChunkSizes(8, 8)))
    options: Any = {"causal": True, "cfg": sizes}
    want = operations.flash_attention(*QKV, **options)
    explicit = mesh(AxisType.Explicit)
    got = operations.flash_attention(
        *QKV, **options, mesh=explicit, in_specs=(SPEC, None, None), out_specs=SPEC
    )
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_the_easydel_operator_splits_what_its_mesh_can() -> None:
    of_mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "sp"), axis_types=(AxisType.Auto,) * 3)
    want = FlashAttn()(*QKV, causal=True).attention_outputs
    got = FlashAttn(OperationMetadata(mesh=of_mesh))(*QKV, causal=True).attention_outputs
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert got.sharding.spec == P("dp", None, "tp")
    odd = tuple(x[:3] for x in QKV)
    got = FlashAttn(OperationMetadata(mesh=of_mesh))(*odd, causal=True).attention_outputs
    np.testing.assert_allclose(got, want[:3], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("in_specs", "out_specs", "message"),
    [
        ((P("data", "model"),), SPEC, "in_specs of query: got axis 1 over model; expected axis 1 whole. A"),
        ((P("batch"),), SPEC, "in_specs of query: got the mesh axis 'batch'; expected axes of the mesh"),
        ((SPEC, SPEC, SPEC), SPEC, "in_specs of key: got axis 2 of length 2; expected a multiple of the 4"),
        ((SPEC, P("model")), SPEC, "in_specs of key: got axis 0 over model; expected data, as for query"),
        ((SPEC,), P("data"), "out_specs: got"),
        ((SPEC,) * 8, SPEC, "in_specs: got 8 of them; expected a tuple of 1 to 7"),
        (SPEC, SPEC, "in_specs"),
        (("data",), SPEC, "in_specs of query: got a str; expected a jax.sharding.PartitionSpec"),
        ((P("data", None, None, None, None),), SPEC, "expected at most 4 entries"),
        ((P("data", None, "data"),), SPEC, "in_specs of query: got 'data' for its batch and its heads; exp"),
        ((P(P.UNCONSTRAINED),), SPEC, "in_specs of query: got the mesh axis UNCONSTRAINED; expected axes of"),
    ],
)  # fmt: skip
def test_specs_that_do_not_fit_are_refused(in_specs: Any, out_specs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        operations.flash_attention(*QKV, mesh=mesh(), in_specs=in_specs, out_specs=out_specs)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("batch", "spec"), [((), P(None, "model")), ((2, 3), P("data", None, None, "model"))]
)
def test_arrays_have_any_number_of_batch_dimensions(batch: tuple[int, ...], spec: P, kind: AxisType) -> None:
    query, key, value = (
        normal(*batch, length, heads, 8, seed=heads + length) for length, heads in ((16, 8), (24, 2), (24, 2))
    )
    options = {"causal": True, "bias": normal(*batch, 1, 1, 24)}
    where = {"mesh": mesh(kind), "in_specs": (spec, None, None, P()), "out_specs": spec}
    got = operations.flash_attention(query, key, value, **options, **where)
    np.testing.assert_allclose(
        got, operations.flash_attention(query, key, value, **options), rtol=1e-6, atol=1e-6
    )


def test_a_call_over_a_mesh_runs_with_what_was_tuned_for_the_part_of_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tunable, "MOST_CANDIDATES", 1)
    executor, judged = first_refused()
    executor.chooser.policy = AutotunePolicy(cache_miss_fallback="heuristics")
    where: Any = {"mesh": mesh(), "in_specs": (SPEC, P("data"), P("data")), "out_specs": SPEC}
    query, key, value = (sixteen_bits(x) for x in qkv(4, 300, 300, 8, 2, 8, 8))
    mask = np.arange(4 * 300).reshape(4, 1, 1, 300) % 5 > 0
    slopes = jnp.arange(8, dtype=jnp.float32)
    options: Any = {"dropout_prob": 0.4, "dropout_seed": 5, "causal": True}
    whole = {"attention_mask": mask, "alibi_slopes": slopes, **options}
    winner = executor.tune(FlashAttention(), query, key, value, **whole, **where).winner()

    part = {"query": query[:2, :, :2], "key": key[:2, :, :1], "value": value[:2, :, :1]}
    part |= {"attention_mask": mask[:2], "alibi_slopes": slopes[:2]}
    for name, x in part.items():
        given = judged[0].arguments[name]
        assert (given.shape, given.dtype) == (x.shape, x.dtype)
    np.testing.assert_array_equal(judged[0].arguments["attention_mask"], mask[:2])
    np.testing.assert_array_equal(judged[0].arguments["alibi_slopes"], slopes[:2])

    explained = executor.explain(FlashAttention(), query, key, value, **whole, **where)
    assert explained.config == winner
    assert explained.steps[-1].why.endswith("as the part of one device")
    assert executor.choose_config(FlashAttention(), **part, **options) == winner
    assert executor.choose_config(FlashAttention(), query, key, value, **whole) != winner


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": None}, "query: got a NoneType; expected a JAX or NumPy array"),
        ({"bias": [1.0]}, "bias: got a list; expected a JAX or NumPy array"),
        ({"key": QKV[1][:1]}, "key: got batch 1 in shape"),
        # A value, which the devices see only traced.
        (
            {"cum_seqlens_q": np.array([0, 9, 8, 9, 9]), "cum_seqlens_k": np.array([0, 9, 9, 9, 9])},
            "cum_seqlens_q: got 8 after 9",
        ),
    ],
)
def test_a_malformed_call_over_a_mesh_is_refused(changes: dict[str, Any], message: str) -> None:
    call = {**dict(zip(("query", "key", "value"), QKV, strict=True)), **changes}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        operations.flash_attention(**call, mesh=mesh(), in_specs=(SPEC,), out_specs=SPEC)


def test_of_several_batch_dimensions_the_first_is_split() -> None:
    spec = P(None, "data")
    with pytest.raises(ValueError, match=r"in_specs of query: got .*; expected the first batch dimension"):
        operations.flash_attention(*(x[None] for x in QKV), mesh=mesh(), in_specs=(spec,), out_specs=spec)


@pytest.mark.parametrize(("rows", "keys"), [(16, 0), (0, 24)])
def test_without_rows_or_keys_out_and_gradients_are_0(rows: int, keys: int) -> None:
    query, key, value = QKV[0][:, :rows], QKV[1][:, :keys], QKV[2][:, :keys]
    of_mesh = {"mesh": mesh(), "in_specs": (SPEC, P("data"), P("data")), "out_specs": SPEC}

    def call(query: Any, key: Any, value: Any, softmax_aux: Any) -> Any:
        return operations.flash_attention(query, key, value, softmax_aux=softmax_aux, **of_mesh)

    out, vjp = jax.vjp(call, query, key, value, normal(8, 2))
    assert out.shape == (4, rows, 8, 4)
    for x in (out, *vjp(out)):
        np.testing.assert_array_equal(x, np.zeros(x.shape))
