"""What ring attention refuses: one sentence that names the argument, when the call is traced."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attest.kernels.ring import ring_attention
from tests.kernels.kernel_cases import normal

DEVICES = 4
here = pytest.mark.process(devices=DEVICES)


def arrays(length: int = 32, heads: int = 4, key_heads: int = 2, dtype: str = "float32") -> dict[str, Any]:
    return {
        "query": normal(2, length, heads, 8, dtype=dtype),
        "key": normal(2, length, key_heads, 8, dtype=dtype),
        "value": normal(2, length, key_heads, 8, dtype=dtype),
    }


def mesh() -> Any:
    return jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])


def inside(given: dict[str, Any], **options: Any) -> Any:
    """The call within jax.shard_map, where arrays are split along the sequence."""
    return jax.shard_map(
        lambda given: ring_attention(**given, **({"axis_name": "x"} | options)),
        mesh=mesh(),
        in_specs=(P(None, "x"),),
        out_specs=P(None, "x"),
    )(given)


@here
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"axis_name": "y"}, "axis_name: got 'y'; expected axes of the mesh, 'x'"),
        ({"axis_name": None}, "axis_name: got None; expected the axis of mesh that splits the sequence"),
        ({"strategy": "star"}, "strategy: got 'star'; expected one of 'ring', 'zigzag', 'all_gather', 'uly"),
        ({"batch_axes": "x"}, "axis_name: got 'x', .* expected other axes for the sequence, the batch and"),
        ({"mesh": "x"}, "mesh: got a str; expected a jax.sharding.Mesh"),
        ({"batch_axes": 3}, "batch_axes: got 3; expected the name of a mesh axis, or a tuple of them"),
        ({"head_axes": "z"}, "head_axes: got 'z'; expected axes of the mesh, 'x'"),
        ({"strategy": "ulysses", "heads": 6, "key_heads": 6}, "query: got 6 heads over 4 devices; expected"),
        ({"strategy": "ulysses", "heads": 12, "key_heads": 3}, "key: got 3 heads over 4 devices; expected a"),
        ({"attention_mask": np.ones((2, 1, 32, 20), bool)}, "attention_mask: got shape"),
        ({"bias": np.ones((1, 1, 8, 9), np.float32)}, "bias: got shape"),
        # Values, which the devices see only traced.
        ({"alibi_slopes": np.array([1, 1, np.nan, 1], np.float32)}, "alibi_slopes: got"),
        (
            {"cum_seqlens_q": np.array([0, 9, 4], np.int32), "cum_seqlens_k": np.array([0, 4, 9], np.int32)},
            "cum_seqlens_q: got",
        ),
        ({"dropout_prob": 0.1, "dropout_seed": 1, "origin": (0, 0, -1, 0)}, "origin"),
        ({"softmax_scale": "a"}, "softmax_scale: got"),
        ({"fwd_params": 3}, "fwd_params: got a int; expected None where no platform is named"),
        (
            {"platform": "mosaic_gpu"},
            "platform: 'mosaic_gpu' takes bfloat16 and float16, and the call has float32",
        ),
        ({"kv_positions": np.zeros((1, 5), np.int32)}, "kv_positions: got shape"),
    ],
)
def test_from_outside(options: dict[str, Any], words: str) -> None:
    sizes = {name: options.pop(name) for name in ("heads", "key_heads") if name in options}
    given = {"mesh": mesh(), "axis_name": "x"} | options
    with pytest.raises((ValueError, NotImplementedError), match=words):
        jax.eval_shape(partial(ring_attention, **given), **arrays(**sizes))


@here
@pytest.mark.parametrize(
    ("length", "options", "words"),
    [
        (
            20,
            {"strategy": "zigzag"},
            "query: got 5 rows a device with strategy='zigzag'; expected an even num",
        ),
        (32, {"axis_name": "y"}, "axis_name: got 'y'; expected an axis of a jax.shard_map around the call"),
        (32, {"axis_name": 3}, "axis_name: got 3; expected the name of a mesh axis"),
        (32, {"batch_axes": "x"}, "batch_axes and head_axes: got 'x' and None; expected None without mesh"),
        (32, {"bias": np.ones((1, 1, 3, 8), np.float32)}, "bias: got shape .* expected 1, 8 or 32 rows"),
        (32, {"q_segment_ids": np.zeros((2, 8), np.int32)}, "kv_segment_ids"),
    ],
)
def test_within_shard_map(length: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(partial(inside, **options), arrays(length))


@here
def test_a_mesh_within_shard_map() -> None:
    with pytest.raises(ValueError, match=r"mesh: got a mesh inside jax.shard_map over its axis 'x'"):
        jax.eval_shape(partial(inside, mesh=mesh()), arrays())


@here
def test_one_entry_of_a_shard_of_one_key_is_not_taken_for_one_of_all() -> None:
    def call(given: dict[str, Any], bias: Any) -> Any:
        return ring_attention(**given, bias=bias, axis_name="x")

    run = jax.shard_map(
        call,
        mesh=mesh(),
        in_specs=(P(None, "x"), P(None, None, None, "x")),
        out_specs=P(None, "x"),
    )
    with pytest.raises(ValueError, match=r"bias: got shape .* other entries on each device; expected all 4"):
        jax.eval_shape(run, arrays(4), jnp.ones((1, 1, 1, 4)))


TWICE = r"^ring_attention: got a second derivative, as of jax\.hessian; expected one derivative"
FORWARD = r"^ring_attention: got a derivative in forward mode, as of jax\.jvp or jax\.jacfwd; expected one"


@here
@pytest.mark.parametrize(("derivative", "words"), [(jax.hessian, TWICE), (jax.jacfwd, FORWARD)])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"axis_name": None}, id="no axis"),
        *(
            pytest.param(
                {"axis_name": "x", "strategy": strategy, "devices": devices}, id=f"{strategy} {devices}"
            )
            for strategy, devices in (("ring", 1), ("zigzag", 4), ("all_gather", 4), ("ulysses", 4))
        ),
    ],
)
def test_other_derivatives_are_refused_in_its_name(
    options: dict[str, Any], derivative: Any, words: str
) -> None:
    options = dict(options)
    devices = options.pop("devices", None)
    if devices is not None:
        options["mesh"] = jax.make_mesh(
            (devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
        )
    given = arrays(8)

    def call(query: jax.Array) -> jax.Array:
        return jnp.sin(ring_attention(query, given["key"], given["value"], **options)).sum()

    with pytest.raises(NotImplementedError, match=words):
        derivative(call)(given["query"])


def test_without_an_axis_it_is_the_local_kernel() -> None:
    given = arrays()
    np.testing.assert_array_equal(
        ring_attention(**given, causal=True), ring_attention(**given, causal=True, strategy="zigzag")
    )
