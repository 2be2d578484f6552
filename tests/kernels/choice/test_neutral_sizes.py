"""Neutral block sizes of a call: each implementation translates them, as those of an operation."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest import flash_attention, flash_attention_with_lse
from attest.kernels import operations, triton, xla
from attest.kernels.contract import Implementation
from attest.kernels.implementations import XLA
from attest.kernels.operations import BwdParams, FlashAttentionConfig, FwdParams

X = jnp.ones((1, 256, 2, 64), jnp.bfloat16)
# Sizes of both passes that the tables choose for no call here.
SIZES = {"xla": (64, 32), "pallas_tpu": (256, 128)}


def program(call: Any) -> str:
    """Both passes, as JAX traces them."""

    def both(x: jax.Array) -> Any:
        out, pull = jax.vjp(lambda x: call(x, x, x, causal=True), x)
        return pull(out)

    return str(jax.make_jaxpr(both)(X))


@pytest.mark.found_outside
@pytest.mark.parametrize(
    "given",
    [
        {"fwd_params": FwdParams},
        {"bwd_params": BwdParams},
        {"fwd_params": FwdParams, "bwd_params": BwdParams},
    ],
)
@pytest.mark.parametrize("platform", SIZES)
def test_they_are_translated_as_those_of_an_operation(platform: str, given: dict[str, Any]) -> None:
    rows, keys = SIZES[platform]
    sizes = {name: kind(q_blocksize=rows, kv_blocksize=keys) for name, kind in given.items()}
    found = program(partial(flash_attention, **sizes, platform=platform))
    cfg = FlashAttentionConfig(**sizes, platform=platform)
    assert found == program(lambda *x, **options: operations.FlashAttention().run(*x, cfg=cfg, **options))
    assert found != program(partial(flash_attention, platform=platform))


@pytest.mark.found_outside
def test_without_a_platform_they_are_those_of_the_kernel_that_runs() -> None:
    """A size that it does not have is left out, as with platform "auto" in a configuration."""
    given = FwdParams(q_blocksize=64, kv_blocksize=32, num_warps=4)
    found = program(partial(flash_attention, fwd_params=given))
    assert "f32[2,1,64,32]" in found  # the logits of a tile
    assert "f32[2,1,64,32]" not in program(flash_attention)
    out, lse = flash_attention_with_lse(X, X, X, fwd_params=given)
    for got, want in zip((out, lse), flash_attention_with_lse(X, X, X), strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=1e-2)


@pytest.mark.found_outside
def test_beside_sizes_of_the_implementation() -> None:
    found = program(
        partial(
            flash_attention, platform="xla", fwd_params=FwdParams(64, 32), bwd_params=xla.ChunkSizes(16, 8)
        )
    )
    config = xla.Config(xla.ChunkSizes(64, 32), xla.ChunkSizes(16, 8))
    assert found == program(partial(flash_attention, config=config))


def test_sizes_that_are_all_none_choose_nothing() -> None:
    found = program(partial(flash_attention, fwd_params=FwdParams(), bwd_params=BwdParams(), platform="xla"))
    assert found == program(partial(flash_attention, platform="xla"))


def without_sizes() -> Implementation:
    return Implementation("mine", XLA.capabilities, XLA.load)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fwd_params": FwdParams(num_warps=4), "platform": "xla"}, "fwd_params.num_warps: got 4; exp"),
        ({"bwd_params": BwdParams(num_stages=2), "platform": "xla"}, "bwd_params.num_stages: got 2; exp"),
        ({"fwd_params": BwdParams(), "platform": "xla"}, "fwd_params: got a BwdParams; expected FwdParams."),
        ({"bwd_params": FwdParams()}, "bwd_params: got a FwdParams; expected BwdParams."),
        ({"fwd_params": FwdParams(), "config": xla.Config()}, "fwd_params: got a FwdParams and a config; e"),
        ({"fwd_params": FwdParams(64), "platform": without_sizes()}, "fwd_params: got block sizes; exp"),
        (
            {"fwd_params": FwdParams(64), "bwd_params": triton.BlockSizes(64, 64), "platform": "xla"},
            "bwd_params: got a BlockSizes; expected ChunkSizes",
        ),
    ],
)  # fmt: skip
def test_those_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        flash_attention(X, X, X, **options)
