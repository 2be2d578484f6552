"""Calls of ring attention and of one device, with every clause, for the tests on eight devices."""

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attest.kernels import flash_attention_with_lse
from attest.kernels.ring import ring_attention_with_lse
from tests.kernels.kernel_cases import normal

DEVICES = 8
BATCH, HEADS, KEY_HEADS, DIM, VALUE_DIM = 2, 4, 2, 16, 8
STRATEGIES = ("ring", "zigzag", "all_gather", "ulysses")
FLOATS = ("query", "key", "value", "bias", "softmax_aux")

on_eight_devices = pytest.mark.process(devices=DEVICES)
strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def mesh_of(devices: int, kind: AxisType = AxisType.Auto, **more: int) -> Any:
    shape = (devices, *more.values())
    count = int(np.prod(shape))
    return jax.make_mesh(shape, ("x", *more), axis_types=(kind,) * len(shape), devices=jax.devices()[:count])


def numbers(low: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(low, high, shape).astype(np.int32)


def features(q: int, k: int) -> dict[str, dict[str, Any]]:
    """Options by name, of BATCH entries of q rows and k keys."""
    slopes = np.array([0.5, -0.25, 0.125, 1.0], np.float32)
    third = np.array([0, q // 3, q // 3 + q - 2], np.int32), np.array([0, k - 7, k - 7 + k // 2], np.int32)
    return {
        "plain": {},
        "causal, sinks, cap": {"causal": True, "softmax_aux": normal(HEADS, 2), "logits_soft_cap": 3.0},
        "window, dropout": {"sliding_window": (9, 3), "dropout_prob": 0.4, "dropout_seed": 5},
        "causal, dropout from an origin": {
            "causal": True,
            "dropout_prob": 0.4,
            "dropout_seed": 5,
            "origin": (1, 2, 3, 8),
        },
        "dropout that all entries share": {
            "dropout_prob": 0.4,
            "dropout_seed": 5,
            "dropout_shared": "b",
            "origin": (1, 2, 3, 8),
        },
        "causal, dropout that all heads share": {
            "causal": True,
            "dropout_prob": 0.4,
            "dropout_seed": 5,
            "dropout_shared": "h",
            "origin": (1, 2, 3, 8),
        },
        "chunks, causal, not normalised, shared sinks": {
            "causal": True,
            "chunk_size": 10,
            "normalize_output": False,
            "softmax_aux": normal(1, 2),
        },
        "segments, bias of every pair, mask of keys": {
            "q_segment_ids": np.sort(numbers(-1, 3, BATCH, q), axis=1),
            "kv_segment_ids": np.sort(numbers(-1, 3, BATCH, k), axis=1),
            "bias": normal(1, HEADS, q, k),
            "attention_mask": numbers(0, 3, BATCH, 1, 1, k) > 0,
        },
        "bias of rows, mask of every pair": {
            "bias": normal(BATCH, 1, q, 1),
            "attention_mask": numbers(0, 3, 1, HEADS, q, k) > 0,
            "causal": True,
        },
        "bias of keys, offset": {"bias": normal(1, 1, 1, k), "q_offset": 3, "sliding_window": (20, 0)},
        "positions in any order, ALiBi": {
            "q_positions": numbers(0, 64, BATCH, q),
            "kv_positions": numbers(0, 64, 1, k),
            "causal": True,
            "alibi_slopes": slopes,
        },
        "lengths, causal, sinks": {
            "cum_seqlens_q": third[0],
            "cum_seqlens_k": third[1],
            "causal": True,
            "softmax_aux": normal(1, 1),
        },
        "ranges, ALiBi": {
            "kv_start": numbers(0, 30, BATCH, q),
            "kv_end": numbers(10, 64, 1, q),
            "alibi_slopes": slopes,
        },
        "positions of keys alone, offset": {
            "kv_positions": numbers(0, 64, BATCH, k),
            "q_offset": 3,
            "causal": True,
        },
    }


NAMES = tuple(features(32, 32))


def inputs(q: int, k: int, dtype: str = "float32") -> dict[str, jax.Array]:
    return {
        "query": normal(BATCH, q, HEADS, DIM, dtype=dtype),
        "key": normal(BATCH, k, KEY_HEADS, DIM, seed=2, dtype=dtype),
        "value": normal(BATCH, k, KEY_HEADS, VALUE_DIM, seed=3, dtype=dtype),
    }


def both_passes(call: Any, options: dict[str, Any], given: dict[str, jax.Array]) -> Any:
    """(out, lse) and the gradients by name, for cotangents that are fixed; 0 where the lse is -inf."""
    floats = {**given, **{name: x for name, x in options.items() if name in FLOATS}}
    others = {name: x for name, x in options.items() if name not in FLOATS}

    def run(floats: dict[str, jax.Array]) -> Any:
        (out, lse), pull = jax.vjp(lambda floats: call(**floats, **others), floats)
        d_lse = jnp.where(lse == -jnp.inf, 0.0, jnp.cos(lse))
        return (out, lse), pull((jnp.sin(out), d_lse))[0]

    return jax.jit(run)(floats)


@lru_cache
def on_one_device(name: str, q: int, k: int) -> Any:
    return both_passes(flash_attention_with_lse, features(q, k)[name], inputs(q, k))


def on_ring(name: str, q: int, k: int, devices: int, strategy: str | None) -> Any:
    call = partial(ring_attention_with_lse, mesh=mesh_of(devices), axis_name="x", strategy=strategy)
    return both_passes(call, features(q, k)[name], inputs(q, k))


def assert_same(found: Any, wanted: Any) -> None:
    """Within the order of float32 sums: the same pairs are visible, and the same ones are dropped."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5, err_msg=str(path))


def in_shard_map(devices: int, specs: dict[str, P], options: dict[str, Any]) -> Any:
    """A call of arrays that are sharded outside, with a spec for each that the devices split."""
    mesh = mesh_of(devices)

    def call(**arrays: Any) -> Any:
        return jax.shard_map(
            lambda arrays: ring_attention_with_lse(**arrays, **options, axis_name="x"),
            mesh=mesh,
            in_specs=({name: specs.get(name, P()) for name in arrays},),
            out_specs=(P(None, "x"), P(None, None, "x")),
        )(arrays)

    return call


SEQUENCE = dict.fromkeys(("query", "key", "value"), P(None, "x"))
