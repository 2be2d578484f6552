"""Malformed meshes, specs and names of axes: accepted or refused by name, in a process of eight devices."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attest.kernels import operations, xla
from attest.kernels.operations import (
    FlashAttention,
    FlashAttentionConfig,
    Kernel,
    RingAttention,
    create_default_executor,
)
from attest.kernels.ring import ring_attention
from tests.kernels.kernel_cases import qkv
from tests.kernels.meshes import mesh

DEVICES = 8
pytestmark = pytest.mark.process(devices=DEVICES)
found = pytest.mark.found_outside


QKV = qkv(4, 16, 16, 4, 4, 8, 8)
SPECS = {"flash": P("data", None, "model"), "ring": P("data", "model")}
OPERATIONS: dict[str, Kernel[Any, Any]] = {"flash": FlashAttention(), "ring": RingAttention()}


def where(kind: str, **changes: Any) -> dict[str, Any]:
    return {"mesh": mesh(), "in_specs": (SPECS[kind],) * 3, "out_specs": SPECS[kind], **changes}


def wrapped(operation: Any, **options: Any) -> Any:
    function, operands = operation.create_shard_map_wrapper(*QKV, causal=True, **options)
    return function(*operands)


def executed(operation: Any, **options: Any) -> Any:
    return create_default_executor()(operation, *QKV, causal=True, **options)


ways = pytest.mark.parametrize("way", [executed, wrapped])
kinds = pytest.mark.parametrize("kind", SPECS)


@found
@kinds
@ways
def test_a_list_of_specs_is_a_tuple(kind: str, way: Callable[..., Any]) -> None:
    out = way(OPERATIONS[kind], **where(kind, in_specs=[SPECS[kind]] * 3))
    np.testing.assert_allclose(out, xla.flash_attention(*QKV, causal=True), rtol=1e-5, atol=1e-5)


def malformed(spec: Any) -> list[tuple[dict[str, Any], str]]:
    return [
        ({"in_specs": (spec, [spec])}, r"in_specs\[1\]: got a list"),
        ({"in_specs": [[spec]]}, r"in_specs\[0\]: got a list"),
        ({"in_specs": ({},)}, r"in_specs\[0\]: got a dict"),
        ({"in_specs": (spec, np.ones(2))}, r"in_specs\[1\]: got a ndarray"),
        ({"in_specs": ()}, "in_specs: got"),
        ({"in_specs": []}, "in_specs: got"),
        ({"in_specs": (spec,) * 8}, "in_specs: got"),
        ({"in_specs": [spec] * 8}, "in_specs: got"),
        ({"in_specs": "data"}, "in_specs: got a str"),
        ({"in_specs": {"query": spec}}, "in_specs: got a dict"),
        ({"in_specs": iter([spec])}, "in_specs: got a list_iterator"),
        ({"in_specs": ("data",)}, "in_specs"),
        ({"in_specs": (3,)}, "in_specs"),
        ({"in_specs": (spec, 3)}, "in_specs of key: got"),
        ({"in_specs": (NamedSharding(mesh(), spec),)}, "in_specs"),
        ({"in_specs": None}, "in_specs: got none beside mesh, out_specs"),
        ({"out_specs": [spec]}, "out_specs: got a list"),
        ({"out_specs": (spec,)}, "out_specs: got"),
        ({"out_specs": {}}, "out_specs: got a dict"),
        ({"out_specs": np.ones(2)}, "out_specs: got a ndarray"),
        ({"out_specs": "data"}, "out_specs: got"),
        ({"out_specs": None}, "out_specs: got none beside mesh, in_specs"),
        ({"mesh": None}, "mesh: got none beside in_specs, out_specs"),
        ({"mesh": 3}, "mesh: got a int"),
        ({"mesh": "data"}, "mesh: got a str"),
        ({"mesh": [1]}, "mesh: got a list"),
        ({"mesh": np.ones(2)}, "mesh: got a ndarray"),
        ({"mesh": mesh().abstract_mesh}, "mesh: got an AbstractMesh; expected a jax.sharding.Mesh, or"),
    ]  # fmt: skip


@found
@kinds
@ways
def test_what_is_malformed_is_refused_by_name(kind: str, way: Callable[..., Any]) -> None:
    for changes, message in malformed(SPECS[kind]):
        with pytest.raises(ValueError, match=f"^{message}"):
            way(OPERATIONS[kind], **where(kind, **changes))


@kinds
def test_an_abstract_mesh_is_taken_where_devices_are_known(kind: str) -> None:
    with jax.set_mesh(mesh()):
        out = executed(OPERATIONS[kind], **where(kind, mesh=mesh().abstract_mesh))
    np.testing.assert_allclose(out, xla.flash_attention(*QKV, causal=True), rtol=1e-5, atol=1e-5)


@found
@kinds
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cfg": None, "check_vma": False},
        {"check_vma": True},
        {"cfg": xla.Config(xla.ChunkSizes(8, 8))},
        {"cfg": FlashAttentionConfig(platform="xla"), "check_vma": True},
    ],
)
def test_a_wrapper_has_the_defaults_of_ejkernel(kind: str, options: dict[str, Any]) -> None:
    out = wrapped(OPERATIONS[kind], **where(kind), **options)
    np.testing.assert_allclose(out, xla.flash_attention(*QKV, causal=True), rtol=1e-5, atol=1e-5)


@found
@kinds
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mesh": None, "in_specs": None, "out_specs": None},
            "mesh: got none; expected mesh, in_specs and out",
        ),
        ({"cfg": 3}, "cfg: got a int; expected a FlashAttentionConfig, or the Config of an implementation"),
        ({"check_vma": 3}, "check_vma: got 3; expected True or False"),
    ],
)
def test_a_wrapper_refuses_by_name(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        wrapped(OPERATIONS[kind], **{**where(kind), **options})


def test_a_wrapper_checked_for_what_varies_has_the_same_gradients() -> None:
    options = {"dropout_prob": 0.3, "dropout_seed": 5, "sliding_window": (5, 5)}

    def gradients(**more: Any) -> Any:
        function, operands = FlashAttention().create_shard_map_wrapper(
            *QKV, **options, **where("flash"), **more
        )
        return jax.grad(lambda *x: (function(*x) ** 2).sum(), argnums=(0, 1, 2))(*operands)

    for got, want in zip(gradients(check_vma=True), gradients(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis_name": 3}, "axis_name: got 3; expected the name of a mesh axis"),
        ({"axis_name": ["model"]}, "axis_name: got ['model']; expected the name of a mesh axis"),
        ({"axis_name": "x"}, "axis_name: got 'x'; expected axes of the mesh"),
        ({"axis_name": None}, "axis_name: got None; expected the axis of mesh"),
        ({"batch_axes": 3}, "batch_axes: got 3; expected the name of a mesh axis, or a tuple of them"),
        ({"batch_axes": [["data"]]}, "batch_axes: got ['data']; expected axes of the mesh"),
        ({"batch_axes": {"data"}}, "batch_axes: got {'data'}; expected the name of a mesh axis"),
        pytest.param(
            {"head_axes": [np.ones(2)]},
            "head_axes: got array([1., 1.]); expected axes of the mesh",
            marks=found,
        ),
        ({"head_axes": [None]}, "head_axes: got None; expected axes of the mesh"),
        pytest.param(
            {"strategy": np.ones(2)}, "strategy: got array([1., 1.]); expected one of 'ring'", marks=found
        ),
        ({"strategy": ["ring"]}, "strategy: got ['ring']; expected one of 'ring'"),
        pytest.param(
            {"mesh": mesh().abstract_mesh if jax.device_count() >= DEVICES else 3},
            "mesh: got an Abs",
            marks=found,
        ),
        pytest.param(
            {"mesh": None, "axis_name": None, "batch_axes": "data"},
            "batch_axes and head_axes: got 'data'",
            marks=found,
        ),
        pytest.param(
            {"mesh": None, "axis_name": None, "head_axes": 3},
            "batch_axes and head_axes: got None a",
            marks=found,
        ),
    ],
)
def test_axes_of_a_ring_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        ring_attention(*QKV, **{"mesh": mesh(), "axis_name": "model", **options})


@found
def test_a_mesh_for_the_function_takes_lists() -> None:
    spec = SPECS["flash"]
    out = operations.flash_attention(*QKV, mesh=mesh(), in_specs=[spec, None], out_specs=spec)
    np.testing.assert_allclose(out, xla.flash_attention(*QKV), rtol=1e-5, atol=1e-5)
