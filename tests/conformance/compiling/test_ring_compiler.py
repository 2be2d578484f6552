"""What the compilers of rings find in toy rings, each with one fault, and in the real one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec

from attest.conformance.cases.case import Case
from attest.conformance.compiling.compiler import Binary, Compiler
from attest.conformance.compiling.compilers.ring import RING_GPU, RING_TPU, ring_jobs
from attest.conformance.compiling.devices import all_devices
from tests.toys import refusing

TPUS = pytest.param(
    RING_TPU,
    "v5e_x4",
    marks=pytest.mark.skipif(RING_TPU.why_not() is not None, reason="libtpu is not installed"),
    id="v5e_x4",
)
GPUS = pytest.param(
    RING_GPU,
    "h200_x4",
    marks=pytest.mark.skipif(RING_GPU.why_not() is not None, reason="the plugin for CUDA is not installed"),
    id="h200_x4",
)
everywhere = pytest.mark.parametrize(("compiler", "target"), [TPUS, GPUS])

SMALL = Case("bfloat16", batch=1, q_len=4096, kv_len=4096, q_heads=4, kv_heads=4, head_dim=128)


def doubled(key: jax.Array, platform: str) -> jax.Array:
    """Twice a part of the keys, by a kernel."""
    rows = key.reshape(-1, 128)[:64]

    def body(block: Any, out: Any) -> None:
        out[...] = block[...] * 2

    if platform == "mosaic_gpu":
        return plgpu.kernel(
            body, out_type=jax.ShapeDtypeStruct(rows.shape, rows.dtype), kernel_name="doubled"
        )(rows)
    return pl.pallas_call(body, jax.ShapeDtypeStruct(rows.shape, rows.dtype), name="doubled")(rows)


def ring(
    sent: Callable[..., tuple[Any, Any, Any]], query: jax.Array, key: jax.Array, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """The keys of all devices, one after the other; `sent` gives those to compute on, and the next ones."""
    axis, platform = options["axis_name"], options["platform"]
    devices = options["mesh"].shape[axis]
    perm = [(device, (device + 1) % devices) for device in range(devices)]

    def local(key: jax.Array) -> jax.Array:
        total = jnp.zeros((64, 128), key.dtype)
        for _ in range(devices - 1):
            here, following, total = sent(key, total, partial(lax.ppermute, axis_name=axis, perm=perm))
            total = total + doubled(here, platform)
            # The next step waits for this one.
            key, total = lax.optimization_barrier((following, total))
        return total + doubled(key, platform)

    spec = PartitionSpec(None, axis)
    run = jax.shard_map(
        local, mesh=options["mesh"], in_specs=spec, out_specs=PartitionSpec(axis), check_vma=False
    )
    return run(key), jnp.zeros((query.shape[0], query.shape[2], query.shape[1]))


def overlapping(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> Any:
    return ring(lambda key, total, send: (key, send(key), total), query, key, **options)


def waiting(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> Any:
    """Computes on keys only when the next ones are there."""
    return ring(
        lambda key, total, send: lax.optimization_barrier((key, send(key), total)), query, key, **options
    )


def silent(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> Any:
    return ring(lambda key, total, _send: (key, key, total), query, key, **options)


def compiled(compiler: Compiler, target: str, function: Any, kernel: str = "ring_forward") -> Binary:
    jobs = ring_jobs(__name__, function.__name__, SMALL, all_devices()[target])
    (job,) = (job for job in jobs if job.kernel == kernel)
    return compiler.compile(job.source)


@everywhere
def test_exchanges_that_overlap_a_kernel_pass(compiler, target):
    binary = compiled(compiler, target, overlapping)
    assert binary.faults == ()
    assert (binary.taken["exchanges"], binary.taken["exposed"]) == (3, 0)
    assert binary.notes[-1] == "collectives: 3 collective-permute"


@everywhere
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (waiting, "3 of 3 exchanges overlap no kernel: "),
        (silent, "exchanges no keys"),
    ],
)
def test_exchanges_that_overlap_nothing_fail(compiler, target, function, words):
    (fault,) = compiled(compiler, target, function).faults
    assert fault.startswith(words)


@everywhere
@pytest.mark.parametrize("kernel", ["ulysses_forward", "zigzag_forward"])
def test_exchanges_are_asked_only_of_the_strategy_that_is_taken(compiler, target, kernel):
    binary = compiled(compiler, target, silent, kernel)
    assert (binary.taken["exchanges"], binary.faults) == (0, ())


@everywhere
def test_what_cannot_be_traced_is_told_in_its_words(compiler, target):
    with pytest.raises(RuntimeError, match="its launch raised NotImplementedError: query: got a toy"):
        compiled(compiler, target, refusing)


@everywhere
@pytest.mark.parametrize(
    "kernel", ["ring_forward", "zigzag_backward", "all_gather_forward", "ulysses_backward"]
)
def test_each_strategy_has_its_collectives(compiler, target, kernel):
    plain = Case("bfloat16", batch=1, q_len=4096, kv_len=4096, q_heads=4, kv_heads=4, head_dim=128)
    jobs = {job.kernel: job for job in compiler.jobs(plain, all_devices()[target])}
    assert len(jobs) == 8
    binary = compiler.compile(jobs[kernel].source)
    kind = {"ring": "permute", "zigzag": "permute", "all_gather": "all-gather", "ulysses": "all-to-all"}
    assert kind[kernel.rpartition("_")[0]] in binary.notes[-1]
    assert (binary.taken["exchanges"] > 0) == ("permute" in kind[kernel.rpartition("_")[0]])
    assert 0 <= binary.taken["exposed"] <= binary.taken["exchanges"]
    assert binary.taken["hbm_bytes"] > 0
