"""Block sizes that a GPU has no room for are refused by name, and others are not, with no GPU here."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from triton.backends.compiler import GPUTarget

from attest.kernels.triton import BackwardSizes, BlockSizes, compiled, flash_attention
from attest.kernels.triton import launch as module
from attest.kernels.triton.target import recorded
from tests.kernels.interpreted import needs_compiler

LIMIT = 232448  # of an H100
SHAPE = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16)
FITS = BlockSizes(32, 32)
TOO_LARGE = BlockSizes(128, 128, 8, 4)

pytestmark = needs_compiler


def trace(**sizes):
    def both(*arrays):
        out, pull = jax.vjp(lambda *arrays: flash_attention(*arrays, causal=True, **sizes), *arrays)
        return pull(out)

    jax.clear_caches()
    return jax.eval_shape(both, SHAPE, SHAPE, SHAPE)


@pytest.fixture
def on_a_gpu(monkeypatch):
    device = SimpleNamespace(compute_capability="9.0", shared_memory_per_block_optin=LIMIT)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(module, "_launch_on_gpu", lambda call, _: tuple(map(_zeros, call.outputs)))
    module._runner.cache_clear()
    yield
    module._runner.cache_clear()


def _zeros(x):
    return jnp.zeros(x.shape, x.dtype)


@pytest.mark.usefixtures("on_a_gpu")
def test_blocks_that_do_not_fit_are_named():
    with pytest.raises(
        ValueError, match=rf"forward bfloat16\[1,512,2,128\].* BLOCK_Q=128 .* {LIMIT} on this GPU"
    ):
        trace(fwd_params=TOO_LARGE)
    with pytest.raises(
        ValueError, match=r"backward_query .* BLOCK_Q=128 .* warps=8 stages=4 needs \d+ bytes"
    ):
        trace(bwd_params=BackwardSizes(query=TOO_LARGE))


@pytest.mark.parametrize("folder", ["", "/proc/none"])
def test_compiling_needs_no_cache(folder, monkeypatch):
    """jax-triton, once imported, leaves this variable empty; a home folder may not be writable."""
    monkeypatch.setattr(compiled._triton.knobs.cache, "dir", folder)
    compiled.compiled_on.cache_clear()
    with recorded("sm_90") as launches:
        trace(fwd_params=FITS)
    assert compiled._shared_bytes("sm_90", compiled.Source.of(launches[0])) > 0


def test_threads_may_compile_at_the_same_time(monkeypatch):
    """JAX lowers in the threads of its callers, and Triton reads its cache's folder from the environment."""
    monkeypatch.setattr(compiled._triton.knobs.cache, "dir", "")
    with recorded("sm_90") as launches:
        for q in (16, 32, 64, 128):
            trace(fwd_params=BlockSizes(q, 16))
    sources = {compiled.Source.of(launch) for launch in launches if launch.kernel.__name__ == "forward"}
    target = GPUTarget("cuda", 90, 32)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(partial(compiled.compile_for, target), sources))
    assert [".entry forward" in x.asm["ptx"] for x in found] == [True] * len(sources)
    assert len(sources) == 4


def test_a_kernel_is_compiled_once_for_all_processes(monkeypatch, tmp_path):
    """The second process finds it in Triton's cache; where messages are wanted, it is compiled anew."""
    monkeypatch.setattr(compiled._triton.knobs.cache, "dir", str(tmp_path))
    with recorded("sm_90") as launches:
        trace(fwd_params=FITS)
    source, target = compiled.Source.of(launches[0]), GPUTarget("cuda", 90, 32)
    made = compiled.compile_for(target, source)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert kept
    assert compiled.compile_for(target, source).asm["ptx"] == made.asm["ptx"]
    compiled.compile_afresh(target, source)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == kept


@pytest.mark.usefixtures("on_a_gpu")
def test_blocks_that_fit_are_launched():
    # Tiles of 128 x 128 are close enough to the limit that only the compiler knows.
    grads = trace(fwd_params=BlockSizes(128, 128, 8, 2), bwd_params=FITS)
    assert [x.shape for x in grads] == [SHAPE.shape] * 3
    assert compiled.compiled_on.cache_info().currsize


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(FITS, jnp.float32), (FITS, jnp.bfloat16), (BlockSizes(128, 64, 8, 3), jnp.bfloat16)],
)
def test_the_bound_is_one(sizes, dtype):
    arrays = [jax.ShapeDtypeStruct((1, 512, 2, 64), dtype)] * 3
    with recorded("sm_90") as launches:
        jax.eval_shape(lambda *arrays: flash_attention(*arrays, fwd_params=sizes), *arrays)
    (launch,) = launches
    needed = compiled._shared_bytes("sm_90", compiled.Source.of(launch))
    assert needed <= compiled._most_shared_bytes(launch)


def test_nothing_is_compiled_where_nothing_is_launched():
    with recorded("sm_90") as launches:
        trace(fwd_params=TOO_LARGE, bwd_params=TOO_LARGE)
    assert {x.kernel.__name__ for x in launches} == {"forward", "backward_query", "backward_key"}
