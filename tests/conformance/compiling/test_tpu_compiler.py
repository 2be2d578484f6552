"""What libtpu says of toy kernels, each with one fault, and of the real ones."""

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attest.conformance.cases.case import Case
from attest.conformance.compiling.compiler import Compiler
from attest.conformance.compiling.compilers.programs import passes
from attest.conformance.compiling.compilers.tpu import TPU, compile_source
from attest.conformance.compiling.devices import all_devices
from attest.conformance.compiling.matrix import Narrowing, compile_matrix
from tests.meta.processes import besides_progress
from tests.toys import refusing, without_kernels

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")

MIB = 2**20
SMALL = Case("bfloat16", batch=1, q_len=256, kv_len=256, q_heads=2, kv_heads=2, head_dim=64)


def reversing(query: jax.Array, scratch_bytes: int, limit: int | None = None) -> Any:
    """Blocks of the query in reverse order, through a scratch of so many bytes."""
    rows = query.reshape(-1, 128)[:128]

    def body(block, reversed_block, scratch):
        step = pl.program_id(0)
        scratch[pl.ds(pl.multiple_of(step * 8, 8), 8), :] = block[...].astype(jnp.float32)
        at = pl.ds(pl.multiple_of((15 - step) * 8, 8), 8)
        reversed_block[...] = scratch[at, :].astype(reversed_block.dtype)

    out = pl.pallas_call(
        body,
        jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        grid=(16,),
        in_specs=[pl.BlockSpec((8, 128), lambda step: (step, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda step: (step, 0)),
        scratch_shapes=[pltpu.VMEM((scratch_bytes // 512, 128), jnp.float32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit),
        name="reversing",
    )(rows)
    return out, jnp.zeros(query.shape[:3], jnp.float32)


def small(query, key, value, **_options):
    return reversing(query, 2 * MIB)


def nearly_16_mib(query, key, value, **_options):
    return reversing(query, 15 * MIB)


def over_16_mib(query, key, value, **_options):
    return reversing(query, 17 * MIB)


def nearly_32_mib(query, key, value, **_options):
    return reversing(query, 31 * MIB)


def over_32_mib(query, key, value, **_options):
    return reversing(query, 33 * MIB)


def asking_for_more(query, key, value, **_options):
    return reversing(query, 40 * MIB, limit=64 * MIB)


def forward_of(function: Any, target: str, case: Case = SMALL) -> Any:
    return passes(__name__, function.__name__, case, all_devices()[target])[0].source


def matrix_of(function: Any):
    jobs = partial(passes, __name__, function.__name__)
    toy = Compiler("toy", TPU.devices, lambda: None, jobs, compile_source)
    only = Narrowing(targets=("v5e",), kernels=("forward",), head_dims=(96,), features=("bias",))
    return compile_matrix("quick", only, workers=0, compilers=(toy,))


def test_what_fits_passes_and_its_memory_is_known():
    matrix = matrix_of(small)
    (result,) = matrix.results
    assert (matrix.status, result.faults) == ("pass", ())
    taken = result.outcome.binary.taken
    assert 2 * MIB < taken["scoped_vmem_bytes"] < 2 * MIB + 64 * 1024
    assert taken["hbm_bytes"] > taken["code_bytes"] > 0
    (note,) = result.outcome.binary.notes
    assert note == f"reversing: {taken['scoped_vmem_bytes']} bytes of scoped VMEM"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (over_16_mib, "does not compile: reversing: Scoped allocation with size 17.00M and limit 16.00M"),
        (asking_for_more, f"bytes of scoped VMEM, v5e has {16 * MIB}"),
        (without_kernels, "does not compile: launches no kernel of Mosaic"),
        (refusing, "does not compile: its launch raised NotImplementedError: query: got a toy"),
    ],
)
def test_what_does_not_fit_fails_with_numbers(function, words):
    matrix = matrix_of(function)
    (result,) = matrix.results
    assert matrix.status == "fail"
    assert words in "; ".join(result.faults)


def test_what_mosaic_refuses_is_told_in_its_words():
    half = Case("float16", batch=1, q_len=256, kv_len=256, q_heads=2, kv_heads=2, head_dim=64)
    with pytest.raises(RuntimeError, match=r"Mosaic failed to compile TPU kernel.*Invalid vector type"):
        compile_source(forward_of(small, "v5e", half))


@pytest.mark.parametrize("target", sorted(TPU.devices))
def test_a_kernel_is_given_the_memory_that_devices_toml_says(target):
    limit = all_devices()[target].limits["scoped_vmem_bytes"]
    fits, overflows = {
        16 * MIB: (nearly_16_mib, over_16_mib),
        32 * MIB: (nearly_32_mib, over_32_mib),
    }[limit]
    assert limit - 2 * MIB < compile_source(forward_of(fits, target)).taken["scoped_vmem_bytes"] <= limit
    with pytest.raises(RuntimeError, match=rf"and limit {limit // MIB}\.00M exceeded scoped vmem limit"):
        compile_source(forward_of(overflows, target))


def test_the_passes_of_the_real_kernels_are_programs_of_their_own():
    forward, backward = (compile_source(job.source) for job in TPU.jobs(SMALL, all_devices()["v5e"]))
    assert all("forward" in note for note in forward.notes)
    assert len(backward.notes) >= 2
    assert all("backward" in note for note in backward.notes)


def test_what_a_kernel_takes_does_not_depend_on_the_length():
    short, long = (
        TPU.jobs(
            Case("bfloat16", batch=2, q_len=n, kv_len=n, q_heads=8, kv_heads=8, head_dim=128),
            all_devices()["v5e"],
        )[0].source
        for n in (4096, 16384)
    )
    taken = [compile_source(source).taken["scoped_vmem_bytes"] for source in (short, long)]
    assert taken[0] == taken[1]


def test_jax_still_computes_here():
    compile_source(forward_of(small, "v5e"))
    assert float(jnp.arange(4.0).sum()) == 6.0


def test_many_processes_compile_at_once_and_say_nothing_else(tmp_path: Path):
    command = (
        "-m",
        "attest",
        "compile",
        "--target",
        "v5e",
        "--head-dim",
        "96",
        "--feature",
        "bias",
        "-n",
        "2",
    )
    path = tmp_path / "matrix.json"
    environment = {name: x for name, x in os.environ.items() if name != "ALLOW_MULTIPLE_LIBTPU_LOAD"}
    done = subprocess.run(
        [sys.executable, *command, "--json", path],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, besides_progress(done.stderr)) == (0, [])
    results = json.loads(path.read_text())["results"]
    assert [(result["kernel"], result["error"]) for result in results] == [("forward", ""), ("backward", "")]


def test_a_process_that_compiles_looks_for_no_tpu():
    command = (
        "-m",
        "attest",
        "compile",
        "--target",
        "sm_90",
        "--feature",
        "bias",
        "--kernel",
        "sideways",
    )
    environment = {name: x for name, x in os.environ.items() if name != "JAX_PLATFORMS"}
    environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    done = subprocess.run(
        [sys.executable, *command, "-n", "0"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("attest: --kernel: got 'sideways', expected one of ")
    assert done.stderr.count("\n") == 1
