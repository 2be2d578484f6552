"""A choice holds where a program is compiled for the device that it was made for; elsewhere it is refused."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from attest import flash_attention
from attest.kernels.choice import choose, lowering
from attest.kernels.choice.choose import Choice, Device, Traits
from attest.kernels.differentiate import attend
from attest.kernels.implementations import PALLAS_TPU, TRITON, XLA
from tests.kernels.interpreted import needs_compiler
from tests.kernels.kernel_cases import qkv

pytestmark = needs_compiler

ARRAYS = tuple(jnp.asarray(x) for x in qkv(batch=2))


def _under_grad(call: Any) -> Any:
    return jax.grad(lambda *arrays: call(*arrays).sum(), argnums=(0, 1, 2))


def _under_vmap(call: Any) -> Any:
    return lambda *arrays: jax.vmap(call)(*(x[:, None] for x in arrays))


def _under_scan(call: Any) -> Any:
    def step(total: jax.Array, arrays: Any) -> tuple[jax.Array, jax.Array]:
        out = call(*arrays)
        return total + out.sum(), out

    return lambda *arrays: lax.scan(step, jnp.float32(0), tuple(x[:, None] for x in arrays))


def _under_remat(call: Any) -> Any:
    return _under_grad(jax.checkpoint(call))


def _under_shard_map(call: Any) -> Any:
    spec = PartitionSpec("batch")
    mesh = Mesh(np.array(jax.devices()[:1]), ("batch",))
    return jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)


TRANSFORMS = {
    "plain": lambda call: call,
    "grad": _under_grad,
    "vmap": _under_vmap,
    "scan": _under_scan,
    "remat": _under_remat,
    "shard_map": _under_shard_map,
}
every_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


def call(*arrays: Any, **options: Any) -> jax.Array:
    return flash_attention(*arrays, causal=True, **options)


def program(transform: Any, *platforms: str, **options: Any) -> str:
    """The program of a call that is lowered for platforms, or for the device that is here."""
    # A function of its own for each program: JAX would reuse the trace of an equal one.
    jitted = jax.jit(transform(lambda *arrays: call(*arrays, **options)))
    if platforms:
        return jax.export.export(jitted, platforms=platforms)(*ARRAYS).mlir_module()
    return jitted.lower(*ARRAYS).as_text()


@every_transform
def test_the_choice_leaves_nothing_in_the_program_of_one_platform(transform):
    """It is, letter for letter, the program of the call that names the implementation."""
    chosen = program(transform)
    assert chosen == program(transform, platform="xla")
    assert "platform_index" not in chosen


@every_transform
def test_the_results_are_those_of_the_named_implementation(transform):
    got, want = (transform(partial(call, **options))(*ARRAYS) for options in ({}, {"platform": "xla"}))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)


@every_transform
@pytest.mark.parametrize("platforms", [("tpu",), ("cpu", "tpu"), ("cuda", "tpu", "cpu")], ids=str)
def test_a_program_for_another_device_is_refused_by_name(transform, platforms):
    words = (
        r"^platform: got None when the call was traced for cpu, where 'xla' runs it, and the program is "
        r"compiled for (tpu, where 'pallas_tpu'|cuda, where 'triton') does\. Pass platform='xla'"
    )
    with pytest.raises(NotImplementedError, match=words):
        program(transform, *platforms)


def test_what_is_refused_elsewhere_is_compiled_here():
    """A refusal leaves nothing behind in the caches of JAX."""
    jitted = jax.jit(call)
    with pytest.raises(NotImplementedError, match="compiled for tpu"):
        jax.export.export(jitted, platforms=["tpu"])(*ARRAYS)
    np.testing.assert_array_equal(jitted(*ARRAYS), call(*ARRAYS, platform="xla"))


@pytest.mark.parametrize("name", ["named", "chosen everywhere"])
def test_one_program_for_several_platforms_is_that_of_xla(name):
    positions = jnp.arange(ARRAYS[1].shape[1], dtype=jnp.int32)[None]
    options = {"platform": "xla"} if name == "named" else {"kv_positions": positions}
    jitted = jax.jit(lambda *arrays: call(*arrays, **options))
    exported = jax.export.export(jitted, platforms=["cuda", "tpu", "cpu"])(*ARRAYS)
    np.testing.assert_array_equal(exported.call(*ARRAYS), call(*ARRAYS, **options))


def test_each_platform_can_have_a_program_of_its_own():
    """As docs/how-to/several-platforms.md says."""

    def each(*arrays: jax.Array) -> jax.Array:
        return lax.platform_dependent(
            *arrays,
            tpu=partial(call, platform="pallas_tpu"),
            default=partial(call, platform="xla"),
        )

    for_tpu, for_cpu = (jax.export.export(jax.jit(each), platforms=[x])(*ARRAYS) for x in ("tpu", "cpu"))
    assert "tpu_custom_call" in for_tpu.mlir_module()
    assert "tpu_custom_call" not in for_cpu.mlir_module()
    np.testing.assert_array_equal(for_cpu.call(*ARRAYS), call(*ARRAYS, platform="xla"))


GPU, TPU = Device("gpu", "9.0"), Device("tpu")
F32 = Traits(frozenset({"float32"}))


@pytest.mark.parametrize(
    ("implementation", "device", "platform", "refused"),
    [
        (TRITON, GPU, "cuda", None),
        (TRITON, GPU, "rocm", None),
        (TRITON, GPU, "cpu", "'xla'"),
        (TRITON, GPU, "tpu", "'pallas_tpu'"),
        (PALLAS_TPU, TPU, "tpu", None),
        (PALLAS_TPU, TPU, "cuda", "'triton'"),
        (XLA, TPU, "cpu", None),
    ],
)
def test_a_choice_holds_on_the_platforms_of_its_device(
    implementation, device, platform, refused, monkeypatch
):
    monkeypatch.setattr(lowering, "implementation_for", partial(choose.implementation_for, installed=bool))
    choice = Choice(implementation, F32, device)
    if refused is None:
        lowering._check(choice, platform)
    else:
        with pytest.raises(NotImplementedError, match=f"compiled for {platform}, where {refused} does"):
            lowering._check(choice, platform)


def test_equal_calls_are_compiled_once():
    query, key, value = (x[:, :7] for x in ARRAYS)
    before = attend._cache_size()
    for _ in range(3):
        flash_attention(query, key, value)
    assert attend._cache_size() == before + 1


def test_a_choice_is_printed_in_few_words():
    """Jaxprs show it: the same in every process."""
    on_cpu = "on Device(backend='cpu', compute_capability=None, kind=None)"
    assert repr(Choice(XLA, F32, Device("cpu"))) == f"xla {on_cpu}"
    assert repr(Choice(XLA, F32, Device("cpu"), TRITON)) == f"xla, triton without gradients, {on_cpu}"
    assert repr(Choice(XLA, F32)) == "xla"
