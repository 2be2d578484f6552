"""The specification that a Triton kernel is compiled for."""

import re
from dataclasses import fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from attest.kernels import triton
from attest.kernels.triton.compiled import Source
from attest.kernels.triton.spec import KernelSpec
from attest.kernels.triton.target import Launch, recorded


def launches(**options) -> list[Launch]:
    """What a call launches forward and backward; its heads of 24 are wider than a power of two."""
    query = jax.ShapeDtypeStruct((1, 64, 6, 24), jnp.float32)
    key = jax.ShapeDtypeStruct((1, 48, 2, 24), jnp.float32)
    value = jax.ShapeDtypeStruct((1, 48, 2, 8), jnp.float32)

    def both(*arrays):
        out, pull = jax.vjp(lambda *arrays: triton.flash_attention(*arrays, **options), *arrays)
        return pull(out)

    with recorded("sm_90") as found:
        jax.eval_shape(both, query, key, value)
    return found


def spec_of(launch: Launch) -> KernelSpec:
    (spec,) = launch.constants.values()
    assert isinstance(spec, KernelSpec)
    return spec


def test_what_follows_from_the_sizes():
    spec = spec_of(launches()[0])
    assert (spec.head_dim, spec.value_dim, spec.k_heads, spec.group, spec.heads) == (24, 8, 2, 3, 6)
    assert (spec.q_stride, spec.k_stride, spec.v_stride, spec.out_stride) == (144, 48, 16, 48)
    assert (spec.block_d, spec.block_dv) == (32, 16)
    assert [replace(spec, sinks=n).block_sinks for n in (0, 1, 2, 3, 5)] == [1, 1, 2, 4, 8]


@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_prob": 0.5, "dropout_seed": 3}])
def test_equal_calls_share_their_kernels(options):
    ones, others = launches(**options), launches(**options)
    assert {x.kernel.__name__ for x in ones} == {"forward", "backward_query", "backward_key"}
    assert [hash(spec_of(x)) for x in ones] == [hash(spec_of(x)) for x in others]
    assert [spec_of(x) for x in ones] == [spec_of(x) for x in others]


def test_different_calls_do_not():
    calls = [{}, {"causal": True}, {"logits_soft_cap": 2.0}, {"logits_dtype": "bfloat16"}]
    found = {Source.of(launches(**options)[0]) for options in calls}
    assert len(found) == len(calls)


def test_a_launch_names_the_blocks_of_its_spec():
    (forward, *_) = launches(fwd_params=triton.BlockSizes(64, 16))
    assert forward.blocks == {"BLOCK_Q": 64, "BLOCK_K": 16, "BLOCK_D": 32, "BLOCK_DV": 16}
    assert "BLOCK_Q=64 BLOCK_K=16 BLOCK_D=32 BLOCK_DV=16 warps=" in forward.name


def test_some_kernel_reads_every_field_and_no_kernel_reads_another():
    folder = Path(triton.__file__).parent
    read = {name for file in folder.glob("*.py") for name in re.findall(r"\bSPEC\.(\w+)", file.read_text())}
    properties = {name for name, x in vars(KernelSpec).items() if isinstance(x, property)}
    assert read == {field.name for field in fields(KernelSpec)} | properties - {"blocks"}
