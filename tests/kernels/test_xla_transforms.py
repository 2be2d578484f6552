"""S17, S19, S22: every way to run flash_attention agrees, compiles once, and leaves its inputs alone."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernel_cases import normal, qkv

from kernels.xla import ChunkSizes, attention, flash_attention, flash_attention_with_lse

flash_module = importlib.import_module("kernels.xla.flash_attention")

SINKS, BIAS = normal(4, 1), normal(1, 4, 1, 13)
OPTIONS = {
    "causal": True,
    "logits_soft_cap": 3.0,
    "fwd_params": ChunkSizes(4, 5),
    "bwd_params": ChunkSizes(3, 6),
}
COTANGENT = normal(2, 9, 4, 6, seed=5)


def gradients(call, *arrays):
    """out and the gradients of everything for a fixed cotangent."""
    out, vjp = jax.vjp(call, *arrays)
    return out, *vjp(COTANGENT)


def plain(query, key, value, bias, sinks):
    return flash_attention(query, key, value, bias=bias, softmax_aux=sinks, **OPTIONS)


def vmapped(query, key, value, bias, sinks):
    def one(q, k, v):
        return plain(q[None], k[None], v[None], bias, sinks)[0]

    return jax.vmap(one)(query, key, value)


def scanned(query, key, value, bias, sinks):
    def step(carry, _):
        return carry, plain(query, key, value, bias, sinks)

    return jax.lax.scan(step, None, None, length=1)[1][0]


def sharded(query, key, value, bias, sinks):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P("data"), P("data"), P("data"), P(), P())
    return jax.shard_map(plain, mesh=mesh, in_specs=specs, out_specs=P("data"))(
        query, key, value, bias, sinks
    )


WAYS = {"jit": plain, "remat": jax.checkpoint(plain), "scan": scanned, "vmap": vmapped, "shard_map": sharded}


@pytest.fixture(scope="module")
def eager():
    return gradients(plain, *qkv(), BIAS, SINKS)


@pytest.mark.parametrize("way", WAYS)
def test_every_transform_gives_the_same_answer(way, eager):
    got = jax.jit(lambda *arrays: gradients(WAYS[way], *arrays))(*qkv(), BIAS, SINKS)
    for a, b in zip(got, eager, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_shard_map_with_lengths_and_dropout():
    """Lengths and the seed are replicated, so the loops that read them must join the sharded axes."""
    arrays = qkv(batch=1)
    lengths = np.array([0, 4, 9], np.int32)
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))

    def call(query, key, value, lengths, seed):
        options = {
            "cum_seqlens_q": lengths,
            "cum_seqlens_k": lengths,
            "dropout_prob": 0.5,
            "dropout_seed": seed,
        }
        return flash_attention_with_lse(query, key, value, **options)

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


def test_second_call_does_not_retrace():
    """Eager calls share one compilation per signature, whatever the seed."""
    arrays = qkv()
    traced = []

    def run(seed):
        traced.append(flash_module._attend._cache_size())
        return flash_attention(*arrays, dropout_prob=0.25, dropout_seed=seed)

    run(1), run(2), run(2**63)
    assert traced[1] == traced[2]


def test_two_calls_agree_to_the_bit(eager):
    """S17."""
    for a, b in zip(gradients(plain, *qkv(), BIAS, SINKS), eager, strict=True):
        np.testing.assert_array_equal(a, b)


def test_inputs_are_left_alone():
    """S19."""
    arrays = [np.array(x) for x in qkv()]
    copies = [x.copy() for x in arrays]
    flash_attention(*arrays, causal=True)
    attention(*arrays, causal=True)
    for a, b in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(a, b)


def test_chunks_that_nobody_sees_are_skipped():
    """The key chunks a row chunk walks follow what causal order, windows and lengths leave visible."""
    tiles = importlib.import_module("kernels.xla.tiles")
    arguments = importlib.import_module("kernels.arguments")

    def ranges(**options):
        query, key, value = qkv(batch=1, q_length=16, k_length=16)
        call = arguments.check_call(query, key, value, **options)
        rows = tiles.cut_rows(call, tiles.cut(call, 4, 4))
        return list(zip(rows.k_start.tolist(), rows.k_stop.tolist(), strict=True))

    lengths = np.array([0, 4, 12], np.int32)
    assert ranges() == [(0, 4)] * 4
    assert ranges(causal=True) == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert ranges(sliding_window=(2, 0)) == [(0, 1), (0, 2), (1, 3), (2, 4)]
    packed = ranges(cum_seqlens_q=lengths, cum_seqlens_k=lengths)
    assert packed[:3] == [(0, 1), (1, 3), (1, 3)]
    assert packed[3][0] >= packed[3][1]


def test_memory_grows_with_the_length_not_its_square():
    """At 16384 tokens the temporaries of forward and backward are under a tenth of the materialised ones."""
    shape = jax.ShapeDtypeStruct((1, 16384, 4, 64), jnp.float32)

    def temporaries(call):
        def run(q, k, v, d_out):
            return jax.vjp(call, q, k, v)[1](d_out)

        return jax.jit(run).lower(*(shape,) * 4).compile().memory_analysis().temp_size_in_bytes

    flash = temporaries(lambda q, k, v: flash_attention(q, k, v, causal=True))
    materialised = temporaries(lambda q, k, v: attention(q, k, v, causal=True)[0])
    assert flash < materialised / 10
    assert flash < 16 * 4 * np.prod(shape.shape)
