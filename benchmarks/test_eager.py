"""What a call costs that is not under jax.jit, beside `jax.nn.dot_product_attention`, on a CPU.

Checks, the choice of the kernel and its configuration, and JAX's dispatch are most of it on small arrays.
"""

import tomllib
from functools import partial
from pathlib import Path

import jax
import pytest

from attest import flash_attention
from attest.kernels import operations
from benchmarks.cpu import in_turns

TARGETS = tomllib.loads((Path(__file__).parent / "targets.toml").read_text())["eager"]


@pytest.mark.parametrize("row", TARGETS["calls"], ids=lambda row: str(row["shape"]))
def test_an_eager_call(row, record_property):
    shape = row["shape"]
    arrays = [jax.random.normal(seed, shape) for seed in jax.random.split(jax.random.key(0), 3)]
    executor = operations.create_default_executor()
    calls = {
        "executor": partial(executor, operations.FlashAttention(), *arrays, causal=True),
        "operations.flash_attention": partial(operations.flash_attention, *arrays, causal=True),
        "flash_attention": partial(flash_attention, *arrays, causal=True),
        "jax.nn": partial(jax.nn.dot_product_attention, *arrays, is_causal=True),
    }
    taken = dict(zip(calls, in_turns(list(calls.values()), TARGETS["seconds"]), strict=True))
    print(f"\n{shape}: " + ", ".join(f"{name} {time * 1e6:.0f} us" for name, time in taken.items()))
    for name, over, target in (
        ("executor", "flash_attention", row["operation_ratio"]),
        ("operations.flash_attention", "flash_attention", row["operation_ratio"]),
        ("flash_attention", "jax.nn", TARGETS["peer_ratio"]),
    ):
        ratio = taken[name] / taken[over]
        record_property(f"{name} ratio", ratio)
        assert ratio <= target, f"{name} takes {ratio:.3f} of the time of {over}"
