"""What flash_attention in JAX spares, time and memory."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.xla import ChunkSizes, attention, flash_attention
from tests.kernels.jaxprs import equations
from tests.kernels.kernel_cases import qkv


def test_chunks_that_nobody_sees_are_skipped():
    """The key chunks a row chunk walks follow what causal order, windows and lengths leave visible."""
    tiles = importlib.import_module("attest.kernels.xla.tiles")
    arguments = importlib.import_module("attest.kernels.call.call")

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


def test_finite_values_take_two_products():
    """The third is in a branch: of a loop of no or one step, XLA computes it before the loop."""
    query, key, value = qkv(batch=1, q_length=16, k_length=16)
    sizes = ChunkSizes(q=8, k=8)
    program = jax.make_jaxpr(lambda x: flash_attention(x, key, value, fwd_params=sizes))(query)

    def products(it):
        return [eqn for eqn in equations(it) if eqn.primitive.name == "dot_general"]

    conditions = [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "cond"]
    assert [len(products(eqn)) for eqn in conditions] == [1]
    assert len(products(program.jaxpr)) == 3


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
