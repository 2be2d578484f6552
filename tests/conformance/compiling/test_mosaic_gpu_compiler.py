"""What Mosaic GPU and ptxas say of toy kernels, each with one fault, and of the real ones."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import SingleDeviceSharding

from attest.conformance.cases.case import Case
from attest.conformance.compiling.compiler import Binary, Compiler
from attest.conformance.compiling.compilers.mosaic_gpu import (
    MOSAIC_GPU,
    Frame,
    _topology,
    compile_source,
    devices_of,
    frames_of,
)
from attest.conformance.compiling.compilers.programs import passes
from attest.conformance.compiling.devices import all_devices
from attest.conformance.compiling.matrix import Narrowing, compile_matrix
from attest.conformance.running.runner import RequestError
from attest.kernels.pallas.mosaic_gpu import BackwardBlocks, BackwardSizes, flash_attention
from tests.meta.processes import besides_progress
from tests.toys import refusing, without_kernels

compiles = pytest.mark.skipif(
    MOSAIC_GPU.why_not() is not None, reason="JAX's plugin for CUDA is not installed"
)

KIB = 2**10
H200 = all_devices()["h200"]
SMALL = Case("bfloat16", batch=1, q_len=256, kv_len=256, q_heads=2, kv_heads=2, head_dim=64)

# As ptxas speaks of two kernels, the second with a function that it calls.
SAID = """
ptxas info    : (C7519) warpgroup.arrive is injected in around line 738 by compiler in function 'two'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for one_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 16 barriers, 1 bytes smem
ptxas info    : Compiling entry function 'two_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for two_mosaic_gpu_kernel
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
ptxas info    : Function properties for called
    32 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
"""


def launched(body: Any, name: str, query: jax.Array, shape: tuple[int, int], **scratch: Any) -> Any:
    """What `body` makes of a part of the query of this shape, in one block of one warpgroup."""
    part = query.reshape(-1, shape[1])[: shape[0]]
    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=scratch,
        kernel_name=name,
    )
    return query + run(part).sum().astype(query.dtype), jnp.zeros(query.shape[:3], jnp.float32)


def copying(query: jax.Array, scratch_bytes: int) -> Any:
    """A copy of a row through shared memory of so many bytes."""

    def body(part, out, buffer):
        buffer[0] = part[0]
        out[0] = buffer[0].astype(jnp.float32)

    return launched(
        body, "copying", query, (64, 256), buffer=plgpu.SMEM((scratch_bytes // 512, 256), query.dtype)
    )


def small(query, key, value, **_options):
    return copying(query, 64 * KIB)


def nearly_227_kib(query, key, value, **_options):
    return copying(query, 226 * KIB)


def over_227_kib(query, key, value, **_options):
    return copying(query, 228 * KIB)


def spilling(query, key, value, **_options):
    """512 rows of 64 are 256 registers of a thread, all of which wait for the sum."""

    def body(part, out):
        tile = plgpu.load(part, layout=plgpu.Layout.WG_STRIDED((512, 64), vec_size=2))
        out[...] = tile * jnp.sum(jnp.exp(tile))

    return launched(body, "spilling", query.astype(jnp.float32), (512, 64))


def serialized(query, key, value, **_options):
    """Products into more registers than a thread has."""

    def body(_part, out, left, right):
        def multiply(first, second, third):
            for sums in (first, second, third):
                plgpu.wgmma(sums, left, right)
            plgpu.wgmma_wait(0)
            out[...] = first[...] + second[...] + third[...]

        sums = plgpu.ACC((64, 256), jnp.float32)
        pl.run_scoped(multiply, sums, sums, sums)

    def tiles(rows: int, columns: int) -> Any:
        layout = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM((rows, columns), query.dtype, transforms=layout)

    return launched(body, "serialized", query, (64, 256), left=tiles(64, 64), right=tiles(64, 256))


def forward_of(function: Any) -> Any:
    return passes(__name__, function.__name__, SMALL, H200)[0].source


def matrix_of(function: Any):
    jobs = partial(passes, __name__, function.__name__)
    toy = Compiler("toy", MOSAIC_GPU.devices, lambda: None, jobs, compile_source)
    only = Narrowing(targets=("h200",), kernels=("forward",), head_dims=(64,))
    return compile_matrix("quick", only, workers=0, compilers=(toy,))


@compiles
def test_what_fits_passes_and_what_it_takes_is_known():
    matrix = matrix_of(small)
    (result,) = matrix.results
    assert (matrix.status, result.faults) == ("pass", ())
    taken = result.outcome.binary.taken
    assert 64 * KIB <= taken["shared_bytes"] < 65 * KIB
    assert 0 < taken["registers"] <= H200.limits["registers"]
    assert taken["spill_bytes"] == taken["stack_bytes"] == 0
    assert taken["hbm_bytes"] > taken["temporary_bytes"]
    assert result.outcome.binary.notes == (
        f"copying: {taken['registers']} registers, spills 0 bytes, "
        f"{taken['shared_bytes']} bytes of shared memory",
    )


@compiles
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (over_227_kib, "Mosaic GPU kernel exceeds available shared memory: smem_bytes=23"),
        (spilling, " bytes of a thread (stack "),
        (serialized, ": wgmma.mma_async instructions are serialized due to insufficient register"),
        (without_kernels, "does not compile: launches no kernel of Mosaic GPU"),
        (refusing, "does not compile: its launch raised NotImplementedError: query: got a toy"),
    ],
)
def test_what_does_not_fit_fails_with_its_words(function, words):
    matrix = matrix_of(function)
    (result,) = matrix.results
    assert matrix.status == "fail"
    assert words in "; ".join(result.faults)


@compiles
def test_a_kernel_is_given_the_memory_that_devices_toml_says():
    limit = H200.limits["shared_bytes"]
    assert limit - 2 * KIB < compile_source(forward_of(nearly_227_kib)).taken["shared_bytes"] <= limit
    with pytest.raises(RuntimeError, match=rf"max_smem_bytes={limit}"):
        compile_source(forward_of(over_227_kib))


@compiles
def test_nothing_is_shown_and_the_environment_stays(capfd, monkeypatch, tmp_path: Path):
    monkeypatch.delenv("MOSAIC_GPU_DUMP_PTXAS", raising=False)
    before = compile_source(forward_of(small))
    assert "MOSAIC_GPU_DUMP_PTXAS" not in os.environ
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "0")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    assert compile_source(forward_of(small)) == before
    assert os.environ["MOSAIC_GPU_DUMP_PTXAS"] == "0"
    assert os.environ["MOSAIC_GPU_DUMP_TO"] == str(tmp_path)
    assert capfd.readouterr() == ("", "")


@compiles
def test_jax_still_computes_here():
    compile_source(forward_of(small))
    assert float(jnp.arange(4.0).sum()) == 6.0


def test_what_ptxas_says_is_told_apart_by_kernel():
    assert frames_of(SAID) == {"one": Frame(128, 0, 0), "two": Frame(168, 16 + 32, 8 + 12 + 4)}


def test_of_kernels_with_one_name_the_most_that_one_takes_counts():
    again = SAID.replace("one_mosaic", "two_mosaic")
    assert frames_of(again) == {"two": Frame(168, 16 + 32, 8 + 12 + 4)}
    first, second = SAID.split("ptxas info    : Compiling entry function 'two", 1)
    reversed_order = f"Compiling entry function 'two{second}{first}".replace("one_mosaic", "two_mosaic")
    assert frames_of(reversed_order) == frames_of(again)


def test_silence_of_ptxas_is_an_error():
    with pytest.raises(RuntimeError, match="ptxas said nothing of registers or spills of one_mosaic"):
        frames_of("Compiling entry function 'one_mosaic_gpu_kernel' for 'sm_90a'\n")


def test_a_process_in_which_jax_refused_the_plugin_says_what_to_do(monkeypatch):
    def unknown(*_arguments: Any, **_options: Any):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(
        "attest.conformance.compiling.compilers.mosaic_gpu.topologies.get_topology_desc", unknown
    )
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    _topology.cache_clear()
    with pytest.raises(RuntimeError, match="set JAX_PLATFORMS=cpu"):
        compile_source(forward_of(small))


def test_without_the_plugin_the_h200_is_left_out_and_the_matrix_says_so(monkeypatch):
    monkeypatch.setattr("attest.conformance.compiling.compilers.mosaic_gpu.find_spec", lambda _name: None)
    sentence = (
        "mosaic_gpu cannot compile: jax_cuda13_plugin is not installed: "
        "it is the dependency group hopper, for Linux"
    )

    def compiled(*targets: str):
        able = Compiler("able", frozenset({"v5e"}), lambda: None, MOSAIC_GPU.jobs, lambda _source: Binary({}))
        only = Narrowing(targets=targets, head_dims=(64,))
        return compile_matrix("quick", only, workers=0, compilers=(able, MOSAIC_GPU))

    matrix = compiled()
    assert {result.cell.target for result in matrix.results} == {"v5e"}
    assert matrix.left_out == (f"not compiled for h200: {sentence}",)
    with pytest.raises(RequestError, match=sentence):
        compiled("h200")


@compiles
def test_the_passes_of_the_real_kernels_are_programs_of_their_own():
    forward, backward = (compile_source(job.source) for job in MOSAIC_GPU.jobs(SMALL, H200))
    assert [note.split(":")[0] for note in forward.notes] == ["flash_forward"]
    assert [note.split(":")[0] for note in backward.notes] == ["flash_backward_joint"]


@compiles
def test_a_scan_stacks_no_result_before_it_is_changed_in_place():
    """XLA fuses a launch in a scan with the slices around it, but must not with that of its result."""
    sharding = SingleDeviceSharding(devices_of(H200.target)[0])
    stack = (jax.ShapeDtypeStruct((2, 1, 256, 2, 64), jnp.bfloat16, sharding=sharding),) * 3

    fused = BackwardBlocks(step=128, stages=2, consumers=2, registers=(232, 24), fused=True)
    sizes = BackwardSizes(backward_key=fused)  # whose results a launch behind it changes in place

    def attend(_, arrays):
        out, pull = jax.vjp(lambda *it: flash_attention(*it, causal=True, bwd_params=sizes), *arrays)
        return None, pull(out)

    program = jax.jit(lambda stack: jax.lax.scan(attend, None, stack)[1]).lower(stack).compile().as_text()
    fusions = re.findall(r"\n%dynamic-slice-fusion\S* .*?\{\n(.*?)\n\}", program, re.DOTALL)
    in_place = [fusion for fusion in fusions if "output_to_operand_aliasing" in fusion]
    assert in_place
    assert not any("dynamic-update-slice" in fusion for fusion in in_place)


@compiles
def test_many_processes_compile_at_once_and_say_nothing_else(tmp_path: Path):
    options = ("--target", "h200", "--head-dim", "64", "-n", "2")
    path = tmp_path / "matrix.json"
    environment = {name: x for name, x in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-m", "attest", "compile", *options, "--json", path],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, besides_progress(done.stderr)) == (0, [])
    assert "ptxas" not in done.stdout
    results = json.loads(path.read_text())["results"]
    assert [(result["kernel"], result["error"]) for result in results] == [("forward", ""), ("backward", "")]
