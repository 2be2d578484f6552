"""S25: slopes of ALiBi, beyond what the tests of all features hold kernels to."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest import attention, flash_attention
from attest.kernels.choice.choose import Device, Traits, implementation_for
from attest.kernels.contract import Implementation
from attest.kernels.implementations import IMPLEMENTATIONS, XLA
from attest.kernels.operations import MaskInfo
from attest.kernels.operations import flash_attention as operation
from attest.kernels.operations.inputs import draw
from attest.kernels.operations.programs import compiled
from attest.kernels.xla import ChunkSizes
from tests.examples import examples
from tests.kernels.interpreted import needs_compiler
from tests.kernels.kernel_cases import normal, qkv

pytestmark = needs_compiler

SLOPES = jnp.array([0.5, 0.25, -0.125, 1.0])
REFUSED = r"^alibi_slopes: got a derivative with respect to them; expected constants\. Pass jax"

SMALL_CHUNKS = {"platform": "xla", "fwd_params": ChunkSizes(8, 8), "bwd_params": ChunkSizes(8, 8)}


def weights_only(*arrays: jax.Array, **options: Any) -> jax.Array:
    return attention(*arrays, **options)[0]


AROUND = {
    "alone": lambda call: call,
    "jit": jax.jit,
    "scan": lambda call: lambda x: jax.lax.scan(lambda c, _: (c + call(x), None), 0.0, None, length=2)[0],
    "vmap": lambda call: lambda x: jax.vmap(call)(x[None]).sum(),
    "checkpoint": jax.checkpoint,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("function", [flash_attention, weights_only, operation])
def test_a_derivative_by_the_slopes_is_refused(function: Any, around: str) -> None:
    arrays = qkv(q_length=3, k_length=4)

    def call(slopes: jax.Array) -> jax.Array:
        return function(*arrays, alibi_slopes=slopes).sum()

    run = AROUND[around](call)
    with pytest.raises(NotImplementedError, match=REFUSED):
        jax.grad(run)(SLOPES)
    with pytest.raises(NotImplementedError, match=REFUSED):
        jax.jvp(run, (SLOPES,), (SLOPES,))
    # A constant is a constant, beside others that are differentiated.
    jax.grad(lambda slopes: slopes[0] * AROUND[around](lambda x: call(jax.lax.stop_gradient(x)))(slopes))(
        SLOPES
    )


def test_other_gradients_are_those_of_an_explicit_bias() -> None:
    """The slopes are traced, and nothing is differentiated with respect to them."""
    query, key, value = qkv(q_length=12, k_length=20)
    distance = jnp.abs(jnp.arange(12.0)[:, None] + 8 - jnp.arange(20.0)[None])[None]

    def call(query: jax.Array, slopes: jax.Array) -> jax.Array:
        return jnp.sin(flash_attention(query, key, value, alibi_slopes=slopes, **SMALL_CHUNKS)).sum()

    def plain(query: jax.Array) -> jax.Array:
        bias = -SLOPES[:, None, None] * distance
        return jnp.sin(flash_attention(query, key, value, bias=bias)).sum()

    wanted = jax.grad(plain)(query)
    for name, around in AROUND.items():
        # Only the derivative by the query is taken, with the slopes an argument of what is transformed.
        run = jax.jit(lambda query, slopes, around=around: jax.grad(around(lambda x: call(x, slopes)))(query))
        calls = 2 if name == "scan" else 1
        np.testing.assert_allclose(run(query, SLOPES), calls * wanted, rtol=1e-4, atol=1e-5, err_msg=name)


@examples(25)
@given(
    rows=st.lists(st.integers(-(2**30), 2**30 - 1), min_size=3, max_size=3),
    keys=st.lists(st.integers(-(2**30), 2**30 - 1), min_size=4, max_size=4),
    slope=st.sampled_from([2.0**-30, -(2.0**-28), 1e-9, 0.0]),
)
def test_any_positions(rows: list[int], keys: list[int], slope: float) -> None:
    """Against Python integers: float32 holds what is left of distances of up to 31 bits."""
    zeros = jnp.zeros((1, 4, 1, 4))
    places = {"q_positions": np.array([rows]), "kv_positions": np.array([keys])}
    slopes = np.array([slope], np.float32)
    _, got = attention(zeros[:, :3], zeros, zeros, alibi_slopes=slopes, **places)
    logits = np.array([[-float(slopes[0]) * abs(p - t) for t in keys] for p in rows])
    want = np.exp(logits - logits.max(axis=1, keepdims=True))
    np.testing.assert_allclose(got[0, 0], want / want.sum(axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("sizes", [{}, SMALL_CHUNKS])
def test_blocks_that_no_row_sees_are_not_read(sizes: dict[str, Any]) -> None:
    """S4: NaN in them changes nothing, since ALiBi hides no pair and shows none."""
    query, key, value = qkv()
    spoilt = [x.at[:, 30:].set(jnp.nan) for x in (key, value)]
    options = {"kv_end": np.full((1, 40), 30), "alibi_slopes": SLOPES, **sizes}
    want, got = (flash_attention(query, *arrays, **options) for arrays in ((key, value), spoilt))
    np.testing.assert_array_equal(got, want)


def test_slopes_of_all_entries_and_of_each() -> None:
    arrays = qkv()
    want = flash_attention(*arrays, alibi_slopes=SLOPES)
    for slopes in (SLOPES[None], jnp.stack([SLOPES, SLOPES])):
        np.testing.assert_array_equal(flash_attention(*arrays, alibi_slopes=slopes), want)
    other = flash_attention(*arrays, alibi_slopes=jnp.stack([SLOPES[::-1], SLOPES]))
    np.testing.assert_array_equal(other[1], want[1])
    assert (np.abs(other[0] - want[0]) > 1e-3).any()


def test_slopes_have_the_batch_dimensions_of_the_call() -> None:
    arrays = qkv(batch=6)
    folded = [x.reshape(2, 3, *x.shape[1:]) for x in arrays]
    for slopes, unfolded in (
        (normal(6, 4), normal(6, 4).reshape(2, 3, 4)),
        (SLOPES[None], SLOPES[None, None]),
        (SLOPES, SLOPES),
        (jnp.tile(normal(3, 4), (2, 1)), normal(3, 4)[None]),
    ):
        want = flash_attention(*arrays, alibi_slopes=slopes)
        got = flash_attention(*folded, alibi_slopes=unfolded)
        np.testing.assert_array_equal(got, want.reshape(2, 3, *want.shape[1:]))
    one = flash_attention(*(x[0] for x in arrays), alibi_slopes=SLOPES)
    np.testing.assert_array_equal(one, flash_attention(*(x[:1] for x in arrays), alibi_slopes=SLOPES)[0])


def test_vmap_over_slopes() -> None:
    arrays, slopes = qkv(), normal(3, 4)
    call = lambda slopes: flash_attention(*arrays, alibi_slopes=slopes)  # noqa: E731
    got = jax.vmap(call)(slopes)
    np.testing.assert_allclose(got, jnp.stack([call(x) for x in slopes]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "info",
    [
        MaskInfo().with_positions(q_offset=3),
        MaskInfo().with_positions(np.arange(40)[None] * 2, np.arange(50)[None] // 3),
        MaskInfo().apply_kv_lengths(np.array([50, 31])),
    ],
    ids=["offset", "positions", "lengths"],
)
def test_the_positions_of_a_mask_info_count(info: MaskInfo) -> None:
    """They do, where nothing else of the MaskInfo reads them."""
    arrays = qkv()
    rows, keys = info.get_or_compute_positions(40, 50)
    distance = jnp.abs(rows[:, :, None] - keys[:, None]).astype(jnp.float32)
    bias = -SLOPES[None, :, None, None] * distance[:, None]
    want = flash_attention(*arrays, mask_info=info, bias=bias)
    got = flash_attention(*arrays, mask_info=info, alibi_slopes=SLOPES)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda x: x.name)
def test_an_implementation_that_lacks_it_is_not_chosen(
    implementation: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = replace(implementation, capabilities=replace(implementation.capabilities, alibi=False))
    call = Traits(alibi=True)
    others = [x for x in IMPLEMENTATIONS if x is not implementation]
    monkeypatch.setattr("attest.kernels.choice.choose.IMPLEMENTATIONS", (lacks, *others))
    device = Device(next(iter(implementation.capabilities.backends or ("cpu",))), "9.0")
    reason = f"platform: '{implementation.name}' takes no alibi_slopes"
    with pytest.raises(NotImplementedError, match=reason):
        implementation_for(device, call, implementation.name, lambda _: True, (0, 11, 2))
    if implementation is not XLA:
        assert implementation_for(device, call, None, lambda _: True, (0, 11, 2)) is not lacks


def test_a_tuner_keeps_the_slopes_and_takes_no_gradient_by_them() -> None:
    query, key, value = qkv(q_length=4, k_length=5)
    given = {"query": query, "key": key, "value": value, "alibi_slopes": SLOPES}
    drawn = draw(given, 3)
    np.testing.assert_array_equal(drawn["alibi_slopes"], SLOPES)
    assert (drawn["query"] != query).any()
    outputs = compiled(flash_attention, given, backward=True)(drawn)()
    assert set(outputs) == {"out", "dquery", "dkey", "dvalue"}
