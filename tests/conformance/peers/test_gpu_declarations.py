"""The declarations of peers for GPUs, compared with the rules of their libraries, without a GPU.

Libraries refuse calls while JAX traces or lowers them, which any machine does for a GPU that it lacks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from attest.conformance.cases.axes import own_axes
from attest.conformance.cases.case import Case
from attest.conformance.peers import equinox, flax_linen, flax_nnx, jax_gpu_mha, jax_nn, keras, tokamax
from attest.conformance.running.choice import first_try
from attest.conformance.running.plan import load_profile, tasks
from attest.conformance.subject import Subject
from attest.reference.numerics import Numerics

TF32, TRUNCATING = 2.0**-11, 2.0**-23
CUDNN_VERSION = 91000

SHORT = Case(q_len=4, kv_len=6, head_dim=32, dtype="float16")


def planned(subject: Subject) -> tuple[Case, ...]:
    """Return the cases of the quick profile, without those from which malformed calls are made."""
    draws = (
        draw
        for task in tasks(subject, load_profile("quick"), 0)
        for draw, checks in task.draws
        if not all(check.startswith("refusal.") for check in checks)
    )
    return tuple({case.id: case for draw in draws if (case := first_try(draw)) is not None}.values())


def shapes(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays of a case by name, which have no values."""
    sizes: dict[str, tuple[int, ...]] = {
        "query": (case.batch, case.q_len, case.q_heads, case.head_dim),
        "key": (case.batch, case.kv_len, case.kv_heads, case.head_dim),
        "value": (case.batch, case.kv_len, case.kv_heads, case.value_width),
    }
    if case.bias is not None:
        full = (case.batch, case.q_heads, case.q_len, case.kv_len)
        sizes["bias"] = tuple(n if own else 1 for n, own in zip(full, own_axes(case.bias), strict=True))
    return {name: jax.ShapeDtypeStruct(shape, case.dtype) for name, shape in sizes.items()}


def with_gradients(subject: Subject, case: Case) -> Callable[[dict[str, Any]], Any]:
    """Return a function that computes out and the gradients of a case from its arrays."""
    options = {"causal": case.causal, "softmax_scale": case.scale, "sliding_window": case.window}
    given = {name: value for name, value in options.items() if value not in (None, False)}

    def run(arrays: dict[str, Any]) -> Any:
        call = partial(subject.call, **subject.tilings[case.tiling].options, **given)
        out, backward = jax.vjp(lambda varied: call(**varied), arrays)
        return out, *backward(out)

    return run


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make JAX check calls of cuDNN as on a Hopper GPU."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: CUDNN_VERSION)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(fused_attention_stablehlo, "is_cuda_compute_capability_equal", lambda _: False)


def test_the_plan_for_cudnn_keeps_the_rules_of_its_head_dims_and_lengths() -> None:
    cases = planned(jax_nn.CUDNN)
    assert len(cases) > 70
    assert {case.head_dim for case in cases} == {8, 16, 32, 40, 64, 72, 96, 128}
    assert not any(case.q_len % 2 or case.kv_len % 2 for case in cases)


@pytest.mark.usefixtures("hopper")
def test_jax_takes_calls_of_cudnn_of_every_planned_shape_of_a_bias() -> None:
    by_axes = {(case.bias, case.causal, case.window is None): case for case in planned(jax_nn.CUDNN)}
    assert {axes for axes, *_ in by_axes} > {None, "111", "11q", "bhq"}
    for case in by_axes.values():
        _out, gradients = jax.eval_shape(with_gradients(jax_nn.CUDNN, case), shapes(case))
        assert gradients == shapes(case)


BEYOND = {
    "head dim": (replace(SHORT, head_dim=36), "multiple of 8"),
    "queries": (replace(SHORT, q_len=5), "multiples of 2"),
    "keys": (replace(SHORT, kv_len=5), "multiples of 2"),
    "window": (replace(SHORT, window=(1, 1)), "right window"),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", BEYOND)
def test_jax_refuses_the_calls_of_cudnn_that_are_not_planned(name: str) -> None:
    case, message = BEYOND[name]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        jax.eval_shape(with_gradients(jax_nn.CUDNN, case), shapes(case))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["queries", "keys"])
def test_jax_refuses_odd_lengths_where_a_call_is_differentiated(name: str) -> None:
    case, _message = BEYOND[name]
    query, key, value = (shapes(case)[name] for name in ("query", "key", "value"))

    def out(*arrays: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(*arrays, implementation="cudnn")

    jax.eval_shape(out, query, key, value)
    with pytest.raises(NotImplementedError, match="Unsupported sequence length"):
        jax.eval_shape(lambda *arrays: jax.vjp(out, *arrays), query, key, value)


def test_cudnn_gets_a_bias_with_a_row_for_each_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are added in float32: 256 and 41 times 1 is 297, rounded to 296; in bfloat16 it is 256."""

    def attend(*_: Any, bias: Any, **__: Any) -> Any:
        return bias

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    query, bias = jnp.zeros((1, 42, 1, 8)), jnp.ones((1, 1, 1, 3), jnp.bfloat16)
    rows, backward = jax.vjp(lambda given: jax_nn.CUDNN.call(query, query, query, bias=given), bias)
    assert (rows.shape, rows.dtype) == ((1, 1, 42, 3), jnp.bfloat16)
    (gradient,) = backward(jnp.ones_like(rows).at[0, 0, 0].set(256))
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), 296)


@pytest.mark.parametrize("bias", [np.zeros((1, 1, 42, 3)), np.zeros((1, 1, 1, 3), bool), np.zeros((3,))])
def test_cudnn_gets_any_other_bias_as_it_is(bias: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *_, bias, **__: bias)
    query = jnp.zeros((1, 42, 1, 8))
    assert jax_nn.CUDNN.call(query, query, query, bias=bias) is bias


def test_cudnn_leaves_the_rank_of_arrays_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda query, *_, **__: query)
    heads = jnp.zeros((4, 3, 8))
    assert jax_nn.CUDNN.call(heads, heads, heads) is heads


@pytest.mark.parametrize("option", ["attention_mask", "cum_seqlens_q"])
def test_cudnn_refuses_what_it_does_not_declare(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        jax_nn.CUDNN.call(None, None, None, **{option: None})


def test_the_plan_for_mha_has_lengths_of_which_one_is_twice_the_other() -> None:
    cases = planned(jax_gpu_mha.GPU)
    assert len(cases) > 60
    lengths = {(case.q_len, case.kv_len) for case in cases}
    assert lengths == {(128, 128), (128, 256), (256, 128), (256, 256)}


PALLAS_TRITON = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


def lowered(case: Case) -> str:
    """Return the program of a call of mha for a GPU. Raises ValueError for blocks that Pallas refuses."""
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(with_gradients(jax_gpu_mha.GPU, case)).trace(shapes(case))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


WIDEST = Case(q_len=128, kv_len=256, head_dim=256, tiling=1)


@PALLAS_TRITON
@pytest.mark.parametrize("case", [WIDEST, replace(WIDEST, q_len=256, kv_len=128, head_dim=7, causal=True)])
def test_pallas_takes_the_blocks_of_mha(case: Case) -> None:
    assert lowered(case).count("xla.gpu.triton") == 3


@PALLAS_TRITON
def test_pallas_refuses_three_times_as_many_keys_as_queries() -> None:
    with pytest.raises(ValueError, match=r"power of 2"):
        lowered(replace(WIDEST, kv_len=384))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("head_dim", [64, 100, 128, 256])
@pytest.mark.parametrize("lengths", [(128, 256), (256, 128), (256, 256)])
def test_the_blocks_of_mha_have_room_in_shared_memory(
    dtype: str, head_dim: int, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward: queries, and two stages of keys and values. Backward: keys, values, two stages of the rest."""
    noted: dict[str, Any] = {}

    def sizes(block_q: int, block_k: int, **others: int) -> Any:
        return SimpleNamespace(block_q=block_q, block_k=block_k, **others)

    library = SimpleNamespace(mha=lambda *_, **options: noted.update(options), BlockSizes=sizes)
    monkeypatch.setattr(jax_gpu_mha, "_library", lambda: library)
    query, key = (np.zeros((1, length, 1, head_dim), dtype) for length in lengths)
    jax_gpu_mha.GPU.call(query, key, key, blocks=(128, 128))
    blocks = noted["block_sizes"]
    row = np.dtype(dtype).itemsize * 2 ** int(np.ceil(np.log2(head_dim)))
    steps = [
        blocks.block_q + 4 * blocks.block_k,
        2 * blocks.block_kv_dkv + 4 * blocks.block_q_dkv,
        2 * blocks.block_q_dq + 4 * blocks.block_kv_dq,
    ]
    assert max(steps) * row <= 227 << 10
    assert blocks.block_q * row <= 32 << 10
    assert lengths[0] // blocks.block_q_dq == lengths[1] // blocks.block_kv_dkv


def test_tokamax_refuses_a_soft_cap_in_the_backward_pass_of_triton_alone() -> None:
    capped = Case(soft_cap=5.0, dtype="float16")
    assert tokamax.TRITON.why_not(capped) == "does not declare soft_cap"
    assert tokamax.MOSAIC.why_not(capped) is None


@pytest.mark.parametrize("subject", [tokamax.TRITON, tokamax.MOSAIC], ids=lambda subject: subject.name)
def test_tokamax_promises_on_gpus_what_it_promises_in_xla(subject: Subject) -> None:
    expected = replace(tokamax.XLA.semantics, window=subject.semantics.window)
    assert subject.semantics == expected
    assert not subject.limits.validates


def arithmetic(subject: Subject, dtype: str) -> Numerics:
    return subject.numerics(dtype, subject.tilings[-1])


@pytest.mark.parametrize(
    "subject",
    [jax_nn.CUDNN, jax_gpu_mha.GPU, tokamax.TRITON, tokamax.MOSAIC],
    ids=lambda subject: subject.name,
)
def test_a_gpu_truncates_sums_of_16_bit_products(subject: Subject) -> None:
    declared = arithmetic(subject, "float16")
    assert (declared.accumulator, declared.truncated) == (TRUNCATING, 16)
    assert declared.weights == TF32  # float16 and TF32 have equally many digits


def test_triton_of_tokamax_rounds_scaled_queries_to_their_dtype() -> None:
    assert arithmetic(tokamax.TRITON, "bfloat16").input_rounding == 2.0**-8
    assert arithmetic(tokamax.MOSAIC, "bfloat16").input_rounding == 0


def test_mha_multiplies_float32_in_tf32_on_a_gpu() -> None:
    on_gpu, on_cpu = (arithmetic(each, "float32") for each in (jax_gpu_mha.GPU, jax_gpu_mha.INTERPRETED))
    assert (on_gpu.input_rounding, on_gpu.weights, on_gpu.truncated) == (TF32, TF32, 8)
    assert (on_cpu.input_rounding, on_cpu.weights, on_cpu.truncated) == (0, 2.0**-24, None)
    assert (on_gpu.key_block, on_cpu.key_block) == (32, 128)


@pytest.mark.parametrize(
    "subject",
    [jax_nn.XLA, tokamax.XLA, flax_linen.FLOAT32, flax_nnx.NNX, flax_nnx.DROPOUT, equinox.INNER, keras.JAX],
    ids=lambda subject: subject.name,
)
@pytest.mark.parametrize(("backend", "rounding"), [("gpu", TF32), ("cpu", 0.0), ("tpu", 0.0)])
def test_xla_multiplies_float32_in_tf32_on_a_gpu_alone(
    backend: str, rounding: float, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    declared = arithmetic(subject, "float32")
    assert (declared.input_rounding, declared.weights) == (rounding, rounding or 2.0**-24)
    assert declared.materialised


@pytest.mark.parametrize("subject", [jax_nn.XLA, tokamax.XLA], ids=lambda subject: subject.name)
@pytest.mark.parametrize("backend", ["gpu", "cpu", "tpu"])
def test_xla_stores_lse_and_the_cotangent_of_the_weights_in_float32(
    backend: str, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    declared = arithmetic(subject, "float32")
    assert (declared.lse, declared.d_weights) == (2.0**-24, 2.0**-24)
