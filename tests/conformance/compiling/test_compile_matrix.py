"""What the compile matrix finds in toy kernels, each with one fault, and what it asks of the real ones."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import triton
import triton.language as tl

from attest.conformance.cases.build import build
from attest.conformance.cases.case import Case
from attest.conformance.cases.shapes import shapes_of
from attest.conformance.compiling.compiler import Compiler
from attest.conformance.compiling.compilers import all_compilers
from attest.conformance.compiling.compilers.mosaic_gpu import MOSAIC_GPU
from attest.conformance.compiling.compilers.ring import RING_GPU, RING_TPU
from attest.conformance.compiling.compilers.tpu import TPU
from attest.conformance.compiling.compilers.triton import TRITON, compile_kernel, launches
from attest.conformance.compiling.devices import all_devices
from attest.conformance.compiling.matrix import Narrowing, cases_of, compile_matrix
from attest.conformance.judging.execute import call_of
from attest.kernels.triton.launch import launch
from attest.kernels.triton.target import Launch

pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret, reason="nothing can be compiled under TRITON_INTERPRET"
)


@triton.jit
def scale(source, mask, length, step, result, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK) * step
    seen = tl.load(mask + at, mask=at < length, other=False)
    values = tl.load(source + at, mask=seen & (at < length), other=0.0)
    tl.store(result + at, (values * 2.0).to(result.dtype.element_ty), mask=at < length)


@triton.jit
def unshapely(source, mask, length, step, result, BLOCK: tl.constexpr):
    tl.store(result + tl.arange(0, BLOCK + 1), 0.0)


@triton.jit
def multiply(source, mask, length, step, result, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for i in range(length):
        left = tl.load(source + i * BLOCK * BLOCK + rows * BLOCK + columns)
        right = tl.load(source + i * BLOCK * BLOCK + rows + columns * BLOCK)
        total = tl.dot(left, right, total)
    tl.store(result + rows * BLOCK + columns, total.to(result.dtype.element_ty))


def toy(kernel: Any, block: int, warps: int, stages: int) -> Compiler:
    """A compiler whose only kernel is launched, forward, with these sizes."""

    def call(query: jax.Array, key: jax.Array, value: jax.Array, **_options: Any) -> Any:
        mask = jnp.ones(query.shape, jnp.bool_)
        (out,) = launch(
            Launch(
                kernel=kernel,
                arguments=(query, mask, query.shape[1], 1),
                outputs=(jax.ShapeDtypeStruct(query.shape, query.dtype),),
                constants={"BLOCK": block},
                grid=(1,),
                num_warps=warps,
                num_stages=stages,
            )
        )
        return out, jnp.zeros(query.shape[:3], jnp.float32)

    return Compiler("toy", TRITON.devices, lambda: None, partial(launches, call), compile_kernel)


def compiled(compiler: Compiler, target: str):
    only = Narrowing(targets=(target,), features=("gqa",), head_dims=(64,))
    return compile_matrix("quick", only, workers=0, compilers=(compiler,))


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_what_fits_passes(target):
    matrix = compiled(toy(scale, 256, 4, 1), target)
    (result,) = matrix.results
    assert (matrix.status, result.faults, result.cell.kernel) == ("pass", (), "scale")
    assert result.configuration == {"BLOCK": 256, "num_warps": 4, "num_stages": 1}
    binary = result.outcome.binary
    assert binary is not None
    assert 0 < binary.taken["registers"] <= result.limits["registers"]
    assert binary.taken["spill_bytes"] == binary.taken["stack_bytes"] == 0


@pytest.mark.parametrize(
    ("compiler", "target", "words"),
    [
        (toy(unshapely, 256, 4, 1), "sm_90", ("does not compile", "power of 2")),
        (toy(multiply, 128, 8, 4), "sm_80", ("takes 196608 bytes of shared memory, sm_80 has 166912",)),
        (toy(multiply, 128, 1, 1), "sm_80", ("spills", "bytes of a thread", " registers")),
        (toy(multiply, 128, 1, 1), "gfx942", ("spills", "bytes of a thread", " registers")),
    ],
    ids=["does not compile", "shared memory", "spills", "spills on AMD"],
)
def test_what_does_not_fit_fails_with_numbers(compiler, target, words):
    matrix = compiled(compiler, target)
    (result,) = matrix.results
    assert matrix.status == "fail"
    assert all(word in "; ".join(result.faults) for word in words), result.faults


def test_a_scalar_of_1_is_a_constant_and_arrays_are_aligned():
    case = Case("bfloat16", q_len=64, kv_len=64, head_dim=64)
    (job,) = toy(scale, 256, 4, 1).jobs(case, all_devices()["sm_90"])
    assert job.source.kernel.types == ("*bf16", "*i1", "i32", "constexpr", "*bf16", "constexpr")
    assert dict(job.source.kernel.constants) == {"BLOCK": 256, "step": 1}


@pytest.mark.parametrize("target", sorted(TRITON.devices))
def test_real_kernels_launch_every_set_of_features(target):
    for device, name, case in cases_of("full"):
        if (device, case.head_dim, case.dtype) != (target, 128, "bfloat16"):
            continue
        kernels = {job.kernel for job in TRITON.jobs(case, all_devices()[target])}
        assert kernels >= {"forward", "backward_query", "backward_key"}, name
        assert ("backward_bias" in kernels) == ("bias" in case.features), name


@pytest.mark.parametrize(
    ("compiler", "limits"),
    [
        (TRITON, {"registers", "shared_bytes"}),
        (MOSAIC_GPU, {"registers", "shared_bytes", "hbm_bytes"}),
        (TPU, {"scoped_vmem_bytes", "vmem_bytes", "hbm_bytes"}),
        (RING_GPU, {"registers", "shared_bytes", "hbm_bytes"}),
        (RING_TPU, {"scoped_vmem_bytes", "vmem_bytes", "hbm_bytes"}),
    ],
    ids=["triton", "mosaic_gpu", "tpu", "ring_gpu", "ring_tpu"],
)
def test_every_compiler_knows_its_devices_and_every_number_has_a_source(compiler, limits):
    for name in compiler.devices:
        device = all_devices()[name]
        assert limits <= set(device.limits) == set(device.sources)
        assert all(
            source.startswith("https://") for source in (*device.sources.values(), device.peaks.source)
        )
        assert device.peaks.flops_per_second["bfloat16"] > device.peaks.bytes_per_second > 0


def test_every_device_has_one_compiler():
    found = [name for compiler in all_compilers() for name in compiler.devices]
    assert sorted(found) == sorted(all_devices())


def test_several_devices_have_the_limits_of_each_and_the_peaks_of_all():
    four, one = all_devices()["v5e_x4"], all_devices()["v5e"]
    assert (four.limits, four.sources, four.target["topology"]) == (
        one.limits,
        one.sources,
        one.target["topology"],
    )
    assert four.peaks.of == "4 times a chip"
    assert four.peaks.flops_per_second["bfloat16"] == 4 * one.peaks.flops_per_second["bfloat16"]
    assert four.peaks.bytes_per_second == 4 * one.peaks.bytes_per_second


def test_a_grid_may_have_a_problem_of_its_own():
    shapes = {
        target: (case.batch, case.q_len, case.kv_len, case.q_heads)
        for target, name, case in cases_of("full")
        if name == "plain"
    }
    assert shapes["v5e_x4"] == (1, 32768, 32768, 8)
    assert shapes["v5e"] == (2, 4096, 4096, 8)


@pytest.mark.parametrize("profile", ["quick", "full"])
def test_tpus_are_asked_for_head_dims_64_to_256_and_never_for_float16(profile):
    asked = [
        (case.head_dim, case.dtype, name) for target, name, case in cases_of(profile) if target in TPU.devices
    ]
    assert {head_dim for head_dim, _, _ in asked} == {64, 96, 128, 256}
    assert {dtype for _, dtype, _ in asked} == {"bfloat16", "float32"}
    assert {name for _, _, name in asked} >= {"typical", "everything"}


@pytest.mark.parametrize(
    ("profile", "head_dims", "dtypes"),
    [
        ("quick", {64, 128, 256}, {"bfloat16"}),
        ("full", {32, 40, 64, 72, 80, 96, 112, 128, 136, 160, 192, 256}, {"bfloat16", "float16"}),
    ],
)
def test_hopper_kernels_are_never_asked_for_what_they_refuse(profile, head_dims, dtypes):
    asked = [(name, case) for target, name, case in cases_of(profile) if target in MOSAIC_GPU.devices]
    assert {case.head_dim for _, case in asked} == head_dims
    assert {case.dtype for _, case in asked} == dtypes
    assert {name for name, _ in asked} >= {"typical", "all_but_dropout"}


def test_all_but_dropout_is_everything_else():
    features = {name: case.features for _, name, case in cases_of("full")}
    assert features["all_but_dropout"] == features["everything"] - {"dropout"}


def test_every_set_of_features_is_asked_of_every_device_at_night():
    asked: dict[str, set[str]] = {}
    dropping: set[str] = set()
    for target, name, case in cases_of("full"):
        asked.setdefault(target, set()).add(name)
        if "dropout" in case.features:
            dropping.add(name)
    assert set(asked) == set(all_devices())
    every = set().union(*asked.values())
    for target in RING_GPU.devices | RING_TPU.devices:
        assert asked.pop(target) == {"plain", "causal"}
    for target, names in asked.items():
        assert names == (every - dropping if target in MOSAIC_GPU.devices else every), target


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask": "b1", "bias": "1hq", "segments": 2, "sinks": 2, "sinks_per_head": True, "value_dim": 8},
        {"mask": "1h", "integer_mask": True, "bias": "b11", "sinks": 1, "causal": True, "window": (3, 0)},
        {"dropout": 0.5, "soft_cap": 5.0, "scale": -0.5, "normalized": False, "lengths": ((6, 9), (2, 3))},
    ],
)
def test_shapes_are_those_of_the_built_case(fields):
    case = Case("bfloat16", batch=2, q_len=6, kv_len=9, q_heads=4, kv_heads=2, head_dim=16, **fields)
    arrays, options = shapes_of(case)
    call = call_of(build(case))
    assert {name: (x.shape, x.dtype) for name, x in arrays.items()} == {
        name: (x.shape, x.dtype) for name, x in call.arrays.items()
    }
    assert options | {"dropout_seed": None} == dict(call.options) | {"dropout_seed": None}
