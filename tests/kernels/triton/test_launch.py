"""Launches: the same under every transformation, interpreted, by XLA or through jax-triton, and recorded."""

import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

from attest.kernels.triton import launch as module
from attest.kernels.triton.launch import launch
from attest.kernels.triton.target import Launch, recorded, recording_id, target_device
from attest.kernels.varying import vary_together
from tests.kernels.interpreted import needs_interpreter


@triton.jit
def product(x, w, n, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n, other=0.0) * tl.load(w), mask=at < n)


def scaled_once(x: jax.Array, w: jax.Array, block: int = 1024) -> jax.Array:
    what = Launch(
        kernel=product,
        arguments=(x, w, x.size),
        outputs=(jax.ShapeDtypeStruct(x.shape, x.dtype),),
        constants={"BLOCK": block},
        grid=(-(-x.size // block),),
        num_warps=4,
        num_stages=2,
    )
    return launch(what)[0]


@jax.custom_vjp
def _scaled(x: jax.Array, w: jax.Array) -> jax.Array:
    return scaled_once(x, w)


_scaled.defvjp(
    lambda x, w: (scaled_once(x, w), (x, w)),
    lambda kept, d: (scaled_once(d, kept[1]), (d * kept[0]).sum().reshape(1)),
)


def scaled(x: jax.Array, w: jax.Array) -> jax.Array:
    """x * w, w of shape [1], with gradients."""
    return _scaled(*vary_together((x, w)))


def scan(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, row: (carry, scaled(row, w)), None, x)[1]


X, W = np.arange(12, dtype=np.float32).reshape(4, 3), np.full(1, 3, np.float32)
BATCHED = {
    "vmap": jax.vmap(scaled, in_axes=(0, None)),
    "map": lambda x, w: jax.lax.map(lambda row: scaled(row, w), x),
    "scan": scan,
    "remat": jax.checkpoint(scaled),
    "plain": scaled,
}


def gradients(function: Any) -> Any:
    return jax.grad(lambda x, w: (function(x, w) * X).sum(), argnums=(0, 1))


@needs_interpreter
@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_launch_under_every_transformation(name: str, compiled: bool) -> None:
    wrap = jax.jit if compiled else lambda function: function
    x, w = jnp.asarray(X), jnp.asarray(W)
    np.testing.assert_array_equal(wrap(BATCHED[name])(x, w), 3 * X)
    d_x, d_w = wrap(gradients(BATCHED[name]))(x, w)
    np.testing.assert_array_equal(d_x, 3 * X)
    np.testing.assert_array_equal(d_w, [(X * X).sum()])


@needs_interpreter
@pytest.mark.parametrize("name", BATCHED)
def test_a_launch_on_two_devices(name: str) -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (jax.P("d"), jax.P())
    sharded = jax.shard_map(BATCHED[name], mesh=mesh, in_specs=specs, out_specs=jax.P("d"))
    np.testing.assert_array_equal(jax.jit(sharded)(X, W), 3 * X)
    d_x, d_w = jax.jit(gradients(sharded))(X, W)
    np.testing.assert_array_equal(d_x, 3 * X)
    np.testing.assert_array_equal(d_w, [(X * X).sum()])


@needs_interpreter
def test_large_arrays_and_many_launches_do_not_hang() -> None:
    x, w = jnp.arange(2**24, dtype=jnp.float32), jnp.asarray(W)  # 64 MiB

    def several(x: jax.Array) -> jax.Array:
        ways = (scaled_once(x + shift, w, 2**18) for shift in range(3))
        return sum(ways, start=jnp.zeros((), x.dtype))

    first, last = jax.jit(lambda x: several(x)[jnp.array([0, -1])])(x)
    assert (first, last) == (9, pytest.approx(3 * (3 * (2.0**24 - 1) + 3)))
    assert scaled_once(x, w, 2**18)[1] == 3


@needs_interpreter
def test_a_launch_that_was_seen_is_not_compiled_again() -> None:
    compiled: list[str] = []

    def note(event: str, *_: Any, **__: Any) -> None:
        compiled.append(event)

    x, w = jnp.asarray(X), jnp.asarray(W)
    jax.block_until_ready(scaled(x, w))
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        jax.block_until_ready(scaled(x + x, w))
        compiled.clear()
        jax.block_until_ready(scaled(x, w))
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not [event for event in compiled if "backend_compile" in event]


@triton.jit
def fails(x, y):
    tl.store(y, tl.load(x + tl.arange(0, 3)))


@needs_interpreter
def test_a_failing_kernel_is_named() -> None:
    from attest.conformance.text import describe

    what = Launch(fails, (jnp.asarray(W),), (jax.ShapeDtypeStruct((1,), jnp.float32),), {}, (1,), 4, 2)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(jax.jit(lambda: launch(what))())
    assert describe(error.value).startswith("KernelError: kernel fails, program 0: ValueError: ")


def test_without_a_gpu_a_launch_says_what_to_do() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(NotImplementedError, match="TRITON_INTERPRET=1"):
        scaled_once(jnp.asarray(X), jnp.asarray(W))


def test_an_argument_that_is_no_array_and_no_int_is_refused() -> None:
    with pytest.raises(TypeError, match=r"arguments\[1\] of product: got float"):
        Launch(product, (jnp.asarray(X), 3.0), (), {}, (1,), 4, 2)


def test_recorded_launches_are_listed_and_not_run() -> None:
    assert recording_id() is None
    with recorded("sm_90") as launches:
        assert target_device() == "sm_90"
        number = recording_id()
        out, _ = jax.eval_shape(gradients(scaled), X, W)
    assert out.shape == X.shape
    assert [one.grid for one in launches] == [(1,), (1,)]
    assert launches[0].name == "product float32[4,3] float32[1] BLOCK=1024 warps=4 stages=2"
    with recorded("gfx942") as launches:
        assert target_device() == "gfx942"
        assert recording_id() != number
    assert launches == []


@pytest.mark.parametrize(
    ("device", "primitive"), [("sm_90", "triton_ptx_call"), ("gfx942", "triton_kernel_call")]
)
@pytest.mark.parametrize("name", BATCHED)
def test_every_transformation_is_traced(name: str, device: str, primitive: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "target_device", lambda: device)
    jax.clear_caches()  # traces for the other device
    module._runner.cache_clear()
    traced = str(jax.make_jaxpr(gradients(BATCHED[name]))(X, W))
    assert primitive in traced
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (jax.P("d"), jax.P())
    sharded = jax.shard_map(BATCHED[name], mesh=mesh, in_specs=specs, out_specs=jax.P("d"))
    d_x, d_w = jax.eval_shape(gradients(sharded), X, W)
    assert (d_x.shape, d_w.shape) == (X.shape, W.shape)


def test_the_call_is_one_that_jax_triton_0_3_takes(monkeypatch: Any) -> None:
    def triton_call(
        *args: Any,
        kernel: Any,
        out_shape: Any,
        grid: Any,
        name: str = "",
        num_warps: int | None = None,
        num_stages: int | None = None,
        **metaparams: Any,
    ) -> Any:
        assert (kernel, grid, num_warps, num_stages) == (product, (1,), 4, 2)
        assert metaparams == {"BLOCK": 1024}
        assert args[2] == X.size
        assert name.startswith("product float32[4,3]")
        return tuple(jnp.full(shape.shape, 7, shape.dtype) for shape in out_shape)

    module._runner.cache_clear()
    monkeypatch.setattr(module, "target_device", lambda: "gfx942")
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=triton_call))
    np.testing.assert_array_equal(scaled_once(jnp.asarray(X), jnp.asarray(W)), np.full(X.shape, 7))
    module._runner.cache_clear()
