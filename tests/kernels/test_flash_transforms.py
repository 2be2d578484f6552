"""S19, S22: every way to run flash_attention agrees, compiles once, and leaves its inputs alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from attest.kernels import differentiate as shared
from tests.kernels.implementations import all_kernels, flash_kernels
from tests.kernels.kernel_cases import normal, qkv

SINKS, BIAS = normal(4, 1), normal(1, 4, 1, 50)
COTANGENT = normal(2, 40, 4, 16, seed=5)


def plain(kernel):
    """out of query, key, value, bias and sinks."""

    def call(query, key, value, bias, sinks):
        options = {"causal": True, "logits_soft_cap": 3.0, "bias": bias, "softmax_aux": sinks}
        return kernel.call(query, key, value, **options, **kernel.blocks)[0]

    return call


def vmapped(call):
    def one(q, k, v, bias, sinks):
        return call(q[None], k[None], v[None], bias, sinks)[0]

    return jax.vmap(one, in_axes=(0, 0, 0, None, None))


def scanned(call):
    def run(*arrays):
        return jax.lax.scan(lambda carry, _: (carry, call(*arrays)), None, None, length=1)[1][0]

    return run


def sharded(call):
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P("data"), P("data"), P("data"), P(), P())
    return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("data"))


WAYS = {"jit": jax.jit, "remat": jax.checkpoint, "scan": scanned, "vmap": vmapped, "shard_map": sharded}


def gradients(call):
    """out and the gradients of everything for a fixed cotangent."""
    out, vjp = jax.vjp(call, *qkv(), BIAS, SINKS)
    return out, *vjp(COTANGENT)


@pytest.fixture(scope="module")
def eager():
    """What a kernel gives outside of any transformation."""
    known = {}

    def of(kernel):
        if kernel.call not in known:
            known[kernel.call] = gradients(plain(kernel))
        return known[kernel.call]

    return of


@flash_kernels
@pytest.mark.parametrize("way", WAYS)
def test_every_transform_gives_the_same_answer(way, kernel, eager):
    got = jax.jit(lambda: gradients(WAYS[way](plain(kernel))))()
    for a, b in zip(got, eager(kernel), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@flash_kernels
def test_shard_map_with_lengths_and_dropout(kernel):
    """Lengths and the seed are replicated, so the loops that read them must join the sharded axes."""
    arrays = qkv(batch=1)
    lengths = np.array([0, 17, 40], np.int32)
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))

    def call(query, key, value, lengths, seed):
        options = {
            "cum_seqlens_q": lengths,
            "cum_seqlens_k": lengths,
            "dropout_prob": 0.5,
            "dropout_seed": seed,
        }
        return kernel.call(query, key, value, **options)

    heads = P(None, None, "heads")
    run = jax.jit(
        jax.shard_map(
            call,
            mesh=mesh,
            in_specs=(heads, heads, heads, P(), P()),
            out_specs=(heads, P(None, "heads")),
        )
    )
    seed = jnp.array([7, 0], jnp.uint32)
    for a, b in zip(run(*arrays, lengths, seed), call(*arrays, lengths, 7), strict=True):
        np.testing.assert_array_equal(a, b)


@flash_kernels
def test_second_call_does_not_retrace(kernel, monkeypatch):
    """Eager calls share one trace per signature, whatever the seed."""
    traces = []
    of_a_trace = shared.on_mesh
    monkeypatch.setattr(shared, "on_mesh", lambda run, call: traces.append(call) or of_a_trace(run, call))
    # A signature that no other test has.
    arrays = qkv(q_length=3, k_length=2)
    for seed in (1, 2, 2**63):
        kernel.call(*arrays, dropout_prob=0.25, dropout_seed=seed, **kernel.blocks)
    assert len(traces) == 1


@all_kernels
def test_inputs_are_left_alone(kernel):
    """S19."""
    arrays = [np.array(x) for x in qkv()]
    copies = [x.copy() for x in arrays]
    kernel.call(*arrays, causal=True)
    for a, b in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(a, b)
