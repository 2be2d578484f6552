"""A call has one derivative, in reverse mode; another one is refused in our words, however it is taken."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attest import flash_attention
from attest.kernels.contract import Implementation
from attest.kernels.implementations import PALLAS_TPU, XLA
from attest.kernels.xla import attention
from tests.kernels.interpreted import needs_compiler
from tests.kernels.kernel_cases import normal

pytestmark = needs_compiler

QUERY, KEY, VALUE = (normal(1, 3, 1, 2, seed=seed) for seed in range(3))


def of(implementation: Implementation) -> Any:
    """A number, from a query of which the key and the value depend, too."""

    def call(query: jax.Array) -> jax.Array:
        return jnp.sin(flash_attention(query, KEY + query, VALUE * query, platform=implementation)).sum()

    return call


def in_scan(call: Any) -> Any:
    return lambda x: jax.lax.scan(lambda carry, _: (carry + call(x), None), jnp.float32(0), None, length=2)[0]


def in_shard_map(call: Any) -> Any:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        lambda x: jax.lax.psum(call(x), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )


def in_vmap(call: Any) -> Any:
    return lambda x: jax.vmap(call)(x[None]).sum()


AROUND = {
    "alone": lambda call: call,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": in_scan,
    "vmap": in_vmap,
    "shard_map": in_shard_map,
}
FORWARD = {
    "jvp": lambda call: jax.jvp(call, (QUERY,), (QUERY,)),
    "compiled jvp": lambda call: jax.jit(lambda x: jax.jvp(call, (x,), (x,)))(QUERY),
    "jacfwd": lambda call: jax.jacfwd(call)(QUERY),
    "jacfwd of jacfwd": lambda call: jax.jacfwd(jax.jacfwd(call))(QUERY),
    "linearize": lambda call: jax.linearize(call, QUERY)[1](QUERY),
}
TWICE = {
    "jvp of jvp": lambda call: jax.jvp(lambda x: jax.jvp(call, (x,), (x,))[1], (QUERY,), (QUERY,)),
    "hessian": lambda call: jax.hessian(call)(QUERY),
    "grad of grad": lambda call: jax.grad(lambda x: jax.grad(call)(x).sum())(QUERY),
    "jvp of grad": lambda call: jax.jvp(jax.grad(call), (QUERY,), (QUERY,)),
    "of the cotangent alone": lambda call: jax.grad(lambda c: jax.vjp(call, QUERY)[1](c)[0].sum())(1.0),
}

TWICE_WORDS = r"^flash_attention: got a second derivative, as of jax\.hessian; expected one derivative"


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("way", FORWARD.values(), ids=FORWARD)
def test_forward_mode_is_refused(way: Any, around: Any) -> None:
    words = (
        r"^flash_attention: got a derivative in forward mode, as of jax\.jvp or jax\.jacfwd; expected one "
        r"derivative, in reverse mode, such as jax\.grad or jax\.vjp take\. attest\.kernels\.xla\.attention "
        "has derivatives of every kind"
    )
    with pytest.raises(NotImplementedError, match=words):
        way(around(of(XLA)))


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("way", TWICE.values(), ids=TWICE)
def test_a_second_derivative_is_refused(way: Any, around: Any) -> None:
    with pytest.raises(NotImplementedError, match=TWICE_WORDS):
        way(around(of(XLA)))


def test_a_second_derivative_is_refused_before_a_launch_is_differentiated() -> None:
    with pytest.raises(NotImplementedError, match=TWICE_WORDS):
        TWICE["hessian"](of(PALLAS_TPU))


@pytest.mark.parametrize("way", [FORWARD["jvp"], TWICE["hessian"]], ids=["jvp", "hessian"])
def test_what_does_not_depend_on_the_call_is_differentiated(way: Any) -> None:
    """The call may stand beside what has such a derivative, and a constant of it has none."""

    def beside(x: jax.Array) -> jax.Array:
        return (flash_attention(QUERY, KEY, VALUE, platform="xla") * x * x).sum()

    out = flash_attention(QUERY, KEY, VALUE, platform="xla")
    got, want = way(beside), way(lambda x: (out * x * x).sum())
    jax.tree.map(np.testing.assert_allclose, got, want)


@pytest.mark.parametrize("way", [FORWARD["linearize"], *TWICE.values()], ids=["linearize", *TWICE])
def test_what_the_message_names_has_these_derivatives(way: Any) -> None:
    def call(query: jax.Array) -> jax.Array:
        return jnp.sin(attention(query, KEY + query, VALUE * query)[0]).sum()

    def again(query: jax.Array) -> jax.Array:
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, KEY + query) / 2**0.5
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), VALUE * query)
        return jnp.sin(out).sum()

    found, wanted = jax.jit(lambda: (way(call), way(again)))()
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
