"""Speed of `xla.flash_attention` on small workloads, beside `jax.nn.dot_product_attention`, on a CPU.

The two are timed in turns, and compared by their medians.
"""

import time
import tomllib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from attest.conformance.peers.jax_nn import XLA
from attest.kernels.xla import flash_attention
from benchmarks.cpu import in_turns

TARGETS = tomllib.loads((Path(__file__).parent / "targets.toml").read_text())["xla"]["small"]
COMPILATIONS = 3


def peer(query, key, value, causal):
    return XLA.call(query, key, value, causal=causal)[0]


def forward(call):
    return lambda query, key, value, _: call(query, key, value)


def forward_backward(call):
    def run(query, key, value, d_out):
        out, vjp = jax.vjp(call, query, key, value)
        return out, vjp(d_out)

    return run


def compiled(function, arrays):
    """The compiled function, and the least CPU seconds that compiling it took."""
    taken = []
    for _ in range(COMPILATIONS):
        jax.clear_caches()
        lowered = jax.jit(function).lower(*arrays)
        start = time.process_time()
        program = lowered.compile()
        taken.append(time.process_time() - start)
    return program, min(taken)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("direction", [forward, forward_backward], ids=["forward", "forward_backward"])
@pytest.mark.parametrize("shape", TARGETS["shapes"], ids=str)
def test_small(shape, direction, causal, record_property):
    batch, q_length, k_length, heads, head_dim = shape
    queries, keys = (batch, q_length, heads, head_dim), (batch, k_length, heads, head_dim)
    seeds = jax.random.split(jax.random.key(0), 4)
    arrays = [
        jax.random.normal(seed, size, jnp.float32)
        for seed, size in zip(seeds, (queries, keys, keys, queries), strict=True)
    ]
    programs = [compiled(direction(partial(call, causal=causal)), arrays) for call in (flash_attention, peer)]
    (ours, our_compilation), (theirs, their_compilation) = programs
    our_time, their_time = in_turns([partial(ours, *arrays), partial(theirs, *arrays)], TARGETS["seconds"])
    ratio = our_time / their_time
    compile_ratio = our_compilation / their_compilation
    record_property("ratio", ratio)
    record_property("compile_ratio", compile_ratio)
    line = f"time {ratio:.2f}, compilation {compile_ratio:.2f} of the peer's"
    print(f"\n{shape}: {line}, which takes {their_time * 1e6:.0f} us")
    assert ratio <= TARGETS["ratio"], line
    assert compile_ratio <= TARGETS["compile_ratio"], line
