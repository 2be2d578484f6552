"""`attest.kernels.adapters.ejkernel` on several devices, against the oracle on the whole sequence."""

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attest.kernels.adapters.ejkernel import ring_attention, ring_flash_attention_call
from attest.kernels.operations import BwdParams, FwdParams
from tests.adapters.exact import assert_exact, normal

DEVICES = 2
here = pytest.mark.process(devices=DEVICES)
NAMES = (
    "query", "key", "value", "attention_mask", "bias", "softmax_scale", "dropout_prob", "causal",
    "dropout_seed", "fwd_params", "bwd_params", "sliding_window", "logits_soft_cap", "axis_name",
)  # fmt: skip
B, SQ, SK, HQ, HKV, D = 2, 8, 16, 4, 2, 8
QKV = {
    "query": normal(B, SQ, HQ, D, seed=1),
    "key": normal(B, SK, HKV, D, seed=2),
    "value": normal(B, SK, HKV, 6, seed=3),
}
BIAS = normal(1, HQ, SQ, SK, seed=4)
MASK = np.random.default_rng(5).integers(0, 4, (B, 1, SQ, SK)) > 0
NOTHING: dict[str, Any] = {
    **dict.fromkeys(NAMES[3:]), "dropout_prob": 0.0, "causal": False, "axis_name": "x"
}  # fmt: skip
BY_ROWS, BY_KEYS, WHOLE = P(None, None, "x"), P(None, None, None, "x"), P()


def spread(arrays: dict[str, Any], specs: dict[str, P], **options: Any) -> jax.Array:
    """The call by position in jax.shard_map; specs: of masks and biases."""
    specs = {**dict.fromkeys(QKV, P(None, "x")), **specs}

    def local(arrays: dict[str, Any]) -> jax.Array:
        return ring_flash_attention_call(*({**NOTHING, **options, **arrays}[name] for name in NAMES))

    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    run = jax.shard_map(
        local, mesh=mesh, in_specs=({name: specs[name] for name in arrays},), out_specs=P(None, "x")
    )
    return jax.jit(run)(arrays)


def test_the_order_is_ejkernels_and_nothing_has_a_default() -> None:
    parameters = inspect.signature(ring_flash_attention_call).parameters
    assert tuple(parameters) == NAMES
    assert {x.default for x in parameters.values()} == {inspect.Parameter.empty}
    assert {x.kind for x in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


sides = st.none() | st.sampled_from([0, 2, 9])


@here
@settings(max_examples=6)
@given(
    st.booleans(),
    st.none() | st.sampled_from([3]) | st.tuples(sides, sides),
    st.none() | st.sampled_from([0.5, 20.0]),
    st.none() | st.sampled_from([0.25, -1.0]),
    st.sampled_from([0.0, 0.4]),
    st.none() | st.sampled_from([BY_ROWS, BY_KEYS, WHOLE]),
    st.none() | st.sampled_from([BY_ROWS, BY_KEYS, WHOLE]),
)
def test_options_count_in_the_whole_sequence(
    causal: bool, window: Any, cap: float | None, scale: float | None, dropout: float, mask: Any, bias: Any
) -> None:
    """Out and all gradients, that of the bias in its layout; dropout keeps what the oracle keeps."""
    common = {
        "causal": causal,
        "sliding_window": window,
        "logits_soft_cap": cap,
        "softmax_scale": scale,
        "dropout_prob": dropout,
        "dropout_seed": 7 if dropout else None,
    }
    arrays = QKV if bias is None else {**QKV, "bias": BIAS}

    def call(**arrays: Any) -> jax.Array:
        masks = {} if mask is None else {"attention_mask": jnp.asarray(MASK)}
        return spread({**arrays, **masks}, {"attention_mask": mask, "bias": bias}, **common)

    oracle = {name: x for name, x in common.items() if x is not None}
    if mask is not None:
        oracle["attention_mask"] = MASK
    assert_exact(call, arrays, options=oracle)


def test_without_an_axis_it_computes_on_one_device() -> None:
    options = {"causal": True, "dropout_prob": 0.4, "dropout_seed": 7, "attention_mask": MASK}

    def call(**arrays: Any) -> jax.Array:
        return ring_flash_attention_call(**{**NOTHING, **options, "axis_name": None, **arrays})

    assert_exact(call, {**QKV, "bias": BIAS}, options=options)


@dataclass
class Theirs:
    """Sizes as another package has them, with one that attest does not have."""

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    unknown: int | None = None


@here
@pytest.mark.parametrize(
    ("forward", "backward", "bias"),
    [
        (FwdParams(q_blocksize=2, kv_blocksize=2), None, False),
        (None, BwdParams(q_blocksize=2, kv_blocksize=2), False),
        (Theirs(2, 2, 4, 2, 1), Theirs(2, 2, 4, 2, 1), True),
    ],
)
def test_sizes_reach_the_pairs_and_change_nothing_beyond_rounding(
    forward: Any, backward: Any, bias: bool
) -> None:
    """Those that the kernel does not have, such as warps on a CPU, are left out."""
    arrays = {**QKV, "bias": BIAS} if bias else QKV
    run = partial(spread, specs={"bias": BY_ROWS}, causal=True)
    sizes = {"fwd_params": forward, "bwd_params": backward}

    def program(**options: Any) -> str:
        loss = jax.grad(lambda arrays: run(arrays, **options).sum())
        return jax.jit(loss).lower(arrays).as_text()

    assert program(**sizes) != program()
    assert_exact(lambda **arrays: run(arrays, **sizes), arrays, options={"causal": True})


SELF = {**QKV, "key": normal(B, SQ, HKV, D, seed=7), "value": normal(B, SQ, HKV, 6, seed=8)}
SELF_IDS = np.array([[1, 1, 1, 2, 2, 2, 0, 0], [3] * 7 + [0]], np.int32)


@here
@pytest.mark.found_outside
@pytest.mark.parametrize("from_outside", [False, True])
def test_ring_attention_with_first_keys_beside_its_window_and_segments(from_outside: bool) -> None:
    """They count in the whole sequence, and segment 0 is padding. Specs have the order of ejKernel."""
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    sinks, parts = normal(HQ, seed=9), P(None, "x")
    options = {
        "sliding_window": (1, 0),
        "attention_sink_size": 2,
        "causal_block_size": 4,
        "query_chunk_size": 2,
        "key_chunk_size": 2,
        "axis_name": "x",
    }

    def call(query: Any, key: Any, value: Any, ids: Any = SELF_IDS, **where: Any) -> jax.Array:
        return ring_attention(query, key, value, sinks, q_segment_ids=ids, **options, **where)

    def spread(query: Any, key: Any, value: Any) -> jax.Array:
        if from_outside:
            specs = (parts, parts, parts, P(None), None)
            return call(query, key, value, mesh=mesh, in_specs=specs, out_specs=parts)
        run = jax.shard_map(call, mesh=mesh, in_specs=(parts,) * 4, out_specs=parts)
        return jax.jit(run)(query, key, value, SELF_IDS)

    i, j = np.arange(SQ)[:, None], np.arange(SQ)[None]
    seen = (((j >= i - 1) | (j < 2)) & (j <= i))[None, None]
    ids = np.where(SELF_IDS == 0, -1, SELF_IDS)
    oracle = {
        "attention_mask": seen,
        "q_segment_ids": ids,
        "kv_segment_ids": ids,
        "softmax_aux": np.broadcast_to(sinks, (HQ, HQ)).copy(),
    }
    assert_exact(spread, SELF, options=oracle)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fwd_params": 3}, "fwd_params: got a int; expected None, or an object with q_blocksize and kv_bl"),
        ({"bwd_params": "s"}, "bwd_params: got a str; expected None, or an object with q_blocksize and kv"),
        ({"fwd_params": Theirs(q_blocksize=-1)}, "FwdParams.q_blocksize: got -1"),
        ({"dropout_prob": 0.5}, "dropout_seed: got None"),
        ({"sliding_window": (-1, 0)}, "sliding_window: got"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap: got 0"),
        ({"attention_mask": np.ones((B, 1, SQ, 3), bool)}, "attention_mask: got shape"),
        ({"axis_name": "y"}, "axis_name: got 'y'; expected an axis of a jax.shard_map around the call"),
        ({"axis_name": 3}, "axis_name: got 3; expected the name of a mesh axis"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    given = {**NOTHING, "axis_name": None, **QKV, **options}
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda: ring_flash_attention_call(**given))
