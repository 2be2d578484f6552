"""Speed and memory of flash_attention on this machine, beside the targets of `targets.toml`.

Run it alone on a quiet machine: `pytest -s benchmarks`. Each time is compared with that of
`jax.nn.dot_product_attention` taken in turns in the same test, so that whatever slows the machine slows both.
"""

import time
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from attest.conformance.peers.jax_nn import XLA
from attest.kernels.xla import flash_attention

TARGETS = tomllib.loads((Path(__file__).parent / "targets.toml").read_text())["xla"]["flash_attention"]
ROUNDS = 5


def flash(query, key, value):
    return flash_attention(query, key, value, causal=True)


def peer(query, key, value):
    return XLA.call(query, key, value, causal=True)[0]


def forward(call):
    return jax.jit(lambda query, key, value, _: call(query, key, value))


def forward_backward(call):
    return jax.jit(lambda query, key, value, d_out: jax.vjp(call, query, key, value)[1](d_out))


def seconds(run, arrays):
    start = time.perf_counter()
    jax.block_until_ready(run(*arrays))
    return time.perf_counter() - start


def compare_with_target(benchmark, ours, theirs, target, unit):
    """Record both numbers and their ratio with the benchmark; fail if the ratio is above its target."""
    ratio = ours / theirs
    benchmark.extra_info.update(ours=ours, theirs=theirs, unit=unit, ratio=ratio, target=TARGETS[target])
    line = f"{target} {ratio:.4f} (target {TARGETS[target]}): {ours:.6g} {unit}, the peer {theirs:.6g}"
    print("\n" + line)
    assert ratio <= TARGETS[target], line


@pytest.mark.parametrize(
    ("direction", "target"),
    [(forward, "forward_ratio"), (forward_backward, "forward_backward_ratio")],
    ids=["forward", "forward_backward"],
)
def test_time(benchmark, direction, target):
    """The best of a few rounds of each, alternating, after one call each to compile."""
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, TARGETS["shape"], jnp.float32) for key in keys]
    ours, theirs = direction(flash), direction(peer)
    seconds(ours, arrays), seconds(theirs, arrays)
    peer_seconds = []

    def alternate():
        peer_seconds.append(seconds(theirs, arrays))
        return (), {}

    benchmark.pedantic(lambda: jax.block_until_ready(ours(*arrays)), setup=alternate, rounds=ROUNDS)
    compare_with_target(benchmark, benchmark.stats.stats.min, min(peer_seconds), target, "seconds")


def test_memory(benchmark):
    """Temporary bytes as XLA plans them; nothing is run, since the peer's would not fit everywhere."""
    batch, _, heads, head_dim = TARGETS["shape"]
    array = jax.ShapeDtypeStruct((batch, TARGETS["memory_length"], heads, head_dim), jnp.float32)

    def temporary_bytes(call):
        compiled = forward_backward(call).lower(*(array,) * 4).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    theirs = temporary_bytes(peer)
    ours = benchmark.pedantic(temporary_bytes, args=(flash,), rounds=1)
    compare_with_target(benchmark, ours, theirs, "memory_ratio", "bytes")
