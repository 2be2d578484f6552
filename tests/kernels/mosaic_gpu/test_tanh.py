"""Whether the cap of the Hopper kernels is as near as they declare, and each of its two ways the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.conformance.subject import find
from attest.kernels.pallas.mosaic_gpu import flash_attention, flash_attention_with_lse
from attest.kernels.pallas.mosaic_gpu.tile.tanh import Cap
from tests.kernels.mosaic_gpu.test_kernels import needs_hopper, tensors


def declared(name: str) -> float:
    subject = find(name)
    return subject.numerics("bfloat16", subject.tilings[0]).tanh


DECLARED = declared("pallas.mosaic_gpu")
ANY = np.geomspace(1e-30, 100.0, 1 << 14, dtype=np.float32)
CAPS = [Cap(1.0), Cap(0.125 / 30.0, 43.3), Cap(1e-4), Cap(1e4, 1.5)]


def tile(x: np.ndarray) -> jax.Array:
    return jnp.asarray(np.concatenate([x, -x]).reshape(64, -1), jnp.float32)


@pytest.mark.parametrize("cap", CAPS)
def test_it_is_as_near_as_declared(cap: Cap) -> None:
    x = tile(ANY / np.float32(cap.scale))
    exact = cap.unit * np.tanh(cap.scale * np.asarray(x, np.float64))
    normal = np.abs(exact) > np.finfo(np.float32).tiny
    found = np.asarray(jax.jit(cap.of_any)(x), np.float64)
    assert np.abs(found[normal] / exact[normal] - 1.0).max() <= DECLARED


@pytest.mark.parametrize("cap", CAPS)
def test_small_ones_are_the_same_either_way(cap: Cap) -> None:
    x = tile((ANY[np.abs(ANY) <= 0.5] / np.float32(cap.scale))[: 1 << 13])
    np.testing.assert_array_equal(jax.jit(cap.of_any)(x), jax.jit(cap.of_small)(x))


def test_what_has_no_tanh_or_a_whole_one() -> None:
    x = jnp.asarray([[0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 0.5]], jnp.float32)
    np.testing.assert_array_equal(
        Cap(1.0).of_any(x)[0, :7], np.asarray([0.0, -0.0, 1.0, -1.0, np.nan, 1.0, -1.0], np.float32)
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("precision", "approximate"),
    [(None, False), ("highest", False), ("default", True), (jax.lax.Precision.DEFAULT, True)],
)
def test_the_default_precision_takes_the_instruction_in_both_passes(
    precision: Any, approximate: bool, bias: bool
) -> None:
    query, key, value = tensors(64)
    options: dict[str, Any] = {"bias": jnp.zeros((1, 1, query.shape[1], key.shape[1]))} if bias else {}

    def call(query: jax.Array) -> jax.Array:
        return flash_attention(query, key, value, logits_soft_cap=20.0, precision=precision, **options)

    forward, both = jax.make_jaxpr(call)(query), jax.make_jaxpr(lambda x: jax.vjp(call, x)[1](x))(query)
    assert [" tanh" in str(forward), str(both).count(" tanh") > str(forward).count(" tanh")] == [
        approximate,
        approximate,
    ]


@needs_hopper
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("precision", "name"), [(None, "pallas.mosaic_gpu"), ("default", "pallas.mosaic_gpu.default_precision")]
)
@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
def test_the_lse_of_one_key_is_a_tanh_as_near_as_declared(
    cap: float, precision: str | None, name: str, bias: bool
) -> None:
    logits = jnp.asarray(cap * np.concatenate([ANY[::16], -ANY[::16]]), jnp.bfloat16)
    query = jnp.zeros((1, len(logits), 1, 64), jnp.bfloat16).at[0, :, 0, 0].set(logits)
    key = jnp.zeros((1, 1, 1, 64), jnp.bfloat16).at[..., 0].set(1.0)
    options: dict[str, Any] = {"bias": jnp.zeros((1, 1, len(logits), 1))} if bias else {}
    _, lse = flash_attention_with_lse(
        query, key, key, softmax_scale=1.0, logits_soft_cap=cap, precision=precision, **options
    )
    exact = cap * np.tanh(np.asarray(logits, np.float64) / cap)
    # Beside the tanh, the scale, the cap and the change from bits round once each.
    error = np.abs(np.asarray(lse, np.float64)[0, 0] - exact)
    assert (error <= (declared(name) + 2.0**-21) * np.abs(exact) + 2.0**-23).all()
