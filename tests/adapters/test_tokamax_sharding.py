"""`q_sharding` and `k_sharding` of tokamax: the numbers of one device, where the caller wants them."""

from contextlib import nullcontext

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attest.kernels.adapters.tokamax import attention_op, dot_product_attention
from tests.adapters.exact import normal

DEVICES = 2
pytestmark = pytest.mark.process(devices=DEVICES)

ARRAYS = [normal(2, 6, heads, 8, seed=heads) for heads in (4, 2, 2)]
SPECS = {
    "batch": PartitionSpec("x"),
    "rows": PartitionSpec(None, "x"),
    "heads": PartitionSpec(None, None, "x"),
    "batch of one axis": PartitionSpec("x", None, None, None),
}


def mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), ("x",), axis_types=(kind,))


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, AxisType.Auto) for name in SPECS), ("batch", AxisType.Explicit), ("heads", AxisType.Explicit)],
)
def test_out_is_sharded_as_query_is(name: str, kind: AxisType, jitted: bool) -> None:
    sharding = NamedSharding(mesh(kind), SPECS[name])

    def call(*arrays: jax.Array) -> jax.Array:
        return dot_product_attention(*arrays, is_causal=True, q_sharding=sharding)

    with jax.set_mesh(sharding.mesh) if kind == AxisType.Explicit else nullcontext():
        out = (jax.jit(call) if jitted else call)(*ARRAYS)
    assert out.sharding.is_equivalent_to(sharding, 4)
    np.testing.assert_allclose(out, dot_product_attention(*ARRAYS, is_causal=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2])
def test_key_heads_that_the_devices_do_not_divide_are_whole(heads: int) -> None:
    arrays = [ARRAYS[0], *(x[:, :, :heads] for x in ARRAYS[1:])]
    sharding = NamedSharding(mesh(), SPECS["heads"])
    out = jax.jit(lambda *xs: dot_product_attention(*xs, q_sharding=sharding))(*arrays)
    np.testing.assert_allclose(out, dot_product_attention(*arrays), rtol=1e-5, atol=1e-5)


def test_gradients_on_a_mesh() -> None:
    sharding = NamedSharding(mesh(), SPECS["heads"])

    def loss(q_sharding: NamedSharding | None, arrays: list[jax.Array]) -> jax.Array:
        return (dot_product_attention(*arrays, is_causal=True, q_sharding=q_sharding) ** 2).sum()

    found = jax.jit(jax.grad(lambda xs: loss(sharding, xs)))(ARRAYS)
    wanted = jax.grad(lambda xs: loss(None, xs))(ARRAYS)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


REFUSED = {
    "channels": (
        NotImplementedError,
        r"^q_sharding: got head_dim over x; expected it whole",
        {"q_sharding": PartitionSpec(None, None, None, "x")},
    ),
    "keys": (
        NotImplementedError,
        r"^k_sharding: got the keys over x; expected it whole",
        {"q_sharding": PartitionSpec(), "k_sharding": PartitionSpec(None, "x")},
    ),
    "five axes": (
        ValueError,
        "^q_sharding: got 5 axes; expected at most 4",
        {"q_sharding": PartitionSpec("x", None, None, None, None)},
    ),
    "no query": (
        ValueError,
        "^k_sharding: got a sharding without q_sharding",
        {"k_sharding": PartitionSpec("x")},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    kind, message, specs = REFUSED[name]
    with pytest.raises(kind, match=message):
        attention_op(*ARRAYS, **{key: NamedSharding(mesh(), spec) for key, spec in specs.items()})
