"""Flash attention on TPUs: the launches of a checked call, block ranges and block sizes.

Everything that depends on arrays but not on pairs is computed here in JAX: the interval of keys of every row,
the blocks that every block visits, Delta, the sinks of every head.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from attest.kernels.call.call import Call
from attest.kernels.contract import (
    Backward,
    Forward,
    Passes,
    Settings,
    check_blocks,
    check_precision,
)
from attest.kernels.numerics.row_terms import RowTerms
from attest.kernels.pallas.padding import padded
from attest.kernels.pallas.tpu.backward import backward_bias, backward_key, backward_query
from attest.kernels.pallas.tpu.blocks import BackwardSizes, BlockSizes
from attest.kernels.pallas.tpu.cut import Cut, channels, cut_call
from attest.kernels.pallas.tpu.forward import forward
from attest.kernels.pallas.tpu.launch import Blocked, by_bias, by_keys, by_queries, launch
from attest.kernels.visibility.blocks import key_blocks, query_blocks
from attest.kernels.visibility.intervals import hides_pairs

_PRECISIONS = {
    None: lax.Precision.HIGHEST,
    "highest": lax.Precision.HIGHEST,
    "float32": lax.Precision.HIGHEST,
    "default": lax.Precision.DEFAULT,
    "fastest": lax.Precision.DEFAULT,
    "bfloat16": lax.Precision.DEFAULT,
}


def _forward(settings: Settings, call: Call) -> Forward:
    batch, q_length, q_heads, _ = call.query.shape
    value_dim = call.value.shape[3]
    cut = cut_call(settings, settings.forward, "forward", call)
    ranges = key_blocks(call, cut.rows, cut.sizes.q, cut.sizes.k)
    schedule = by_queries(batch, q_heads, cut.q_blocks, _steps(ranges, cut.k_blocks), cut.batched)
    scalars = cut.scalars(ranges)
    if call.softmax_aux is not None:
        scalars["sinks"] = _sinks(call)
    shape = (batch, q_heads, channels(value_dim), cut.q_blocks * cut.sizes.q)
    queries = {"query": cut.queries(call.query), "key": cut.keys(call.key), **cut.visibility()}

    def run(value: jax.Array) -> tuple[jax.Array, jax.Array]:
        filled = launch(
            partial(forward, cut.tile, settings.normalize_output),
            "flash_forward",
            schedule,
            scalars,
            {**queries, "value": cut.keys(value)},
            {
                "out": _output(shape, settings.result_dtype(call.query.dtype), cut.sizes.q),
                "stats": _output((*shape[:2], 2, shape[3]), jnp.float32, cut.sizes.q),
            },
            {"m": (1, cut.sizes.q), "norm": (1, cut.sizes.q), "acc": (shape[2], cut.sizes.q), **cut.kept()},
        )
        return filled["out"], filled["stats"]

    if _may_weigh_nothing(call):
        out, stats = _propagating_nonfinite(run, call.value)
    else:
        out, stats = run(call.value)
    lse, row_max = stats[:, :, 0, :q_length], stats[:, :, 1, :q_length]
    return Forward(jnp.moveaxis(out[:, :, :value_dim, :q_length], 3, 1), lse, row_max)


def _propagating_nonfinite(run: Any, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Run run(value), where a value that is not finite shows only in the rows that give it weight (S4).

    A hidden value must not leak as 0 * NaN, so such values are left out. Should there be any, the kernel runs
    once more on a value that is 1 in their places and 0 elsewhere: its result is above 0 where NaN is due.
    """
    finite = jnp.isfinite(value)
    out, stats = run(_finite_or_zero(value))

    # A loop of no or one step, because vmap would make a cond pay for both branches. The barrier ties the
    # kernel to the step: it depends on nothing else that changes, and XLA would move it out of the loop.
    def propagate_nonfinite(step: jax.Array, out: jax.Array) -> jax.Array:
        nonfinite, _ = lax.optimization_barrier((~finite, step))
        weight, _ = run(nonfinite.astype(value.dtype))
        return jnp.where(weight > 0, jnp.full((), jnp.nan, out.dtype), out)

    steps = (~finite.all()).astype(jnp.int32)
    return lax.fori_loop(jnp.int32(0), steps, propagate_nonfinite, out), stats


def _backward(settings: Settings, call: Call, terms: RowTerms, _kept: Any) -> Backward:
    hides = _may_weigh_nothing(call)
    d_query = _query_cotangent(settings, call, terms, hides)
    d_key, d_value = _key_cotangents(settings, call, terms, hides)
    d_bias = None if call.bias is None else _bias_cotangent(settings, call, terms, hides)
    return Backward(d_query, d_key, d_value, d_bias)


def _query_cotangent(settings: Settings, call: Call, terms: RowTerms, hides: bool) -> jax.Array:
    cut = cut_call(settings, settings.backward, "backward_query", call)
    batch, q_length, q_heads, head_dim = call.query.shape
    ranges = key_blocks(call, cut.rows, cut.sizes.q, cut.sizes.k)
    schedule = by_queries(batch, q_heads, cut.q_blocks, _steps(ranges, cut.k_blocks), cut.batched)
    shape = (batch, q_heads, channels(head_dim), cut.q_blocks * cut.sizes.q)
    filled = launch(
        partial(backward_query, cut.tile),
        "flash_backward_query",
        schedule,
        cut.scalars(ranges),
        _backward_inputs(cut, terms, hides),
        {"d_query": _output(shape, settings.result_dtype(call.query.dtype), cut.sizes.q)},
        {"total": (channels(head_dim), cut.sizes.q), **cut.kept()},
    )
    return jnp.moveaxis(filled["d_query"][:, :, :head_dim, :q_length], 3, 1)


def _key_cotangents(
    settings: Settings, call: Call, terms: RowTerms, hides: bool
) -> tuple[jax.Array, jax.Array]:
    cut = cut_call(settings, settings.backward, "backward_key", call)
    batch, k_length, k_heads, head_dim = call.key.shape
    ranges = query_blocks(call, cut.rows, cut.sizes.q, cut.sizes.k)
    schedule = by_keys(batch, k_heads, cut.group, cut.k_blocks, _steps(ranges, cut.q_blocks), cut.batched)

    def output(channels: int) -> Blocked:
        shape = (batch, k_heads, cut.k_blocks * cut.sizes.k, channels)
        return Blocked(
            jax.ShapeDtypeStruct(shape, settings.result_dtype(call.key.dtype)),
            (None, None, cut.sizes.k, channels),
            lambda at: (at.batch, cut.key_head(at), at.k, 0),
        )

    key_channels, value_channels = channels(head_dim), channels(call.value.shape[3])
    filled = launch(
        partial(backward_key, cut.tile),
        "flash_backward_key",
        schedule,
        cut.scalars(ranges),
        _backward_inputs(cut, terms, hides),
        {"d_key": output(key_channels), "d_value": output(value_channels)},
        {
            "of_key": (cut.sizes.k, key_channels),
            "of_value": (cut.sizes.k, value_channels),
            **cut.kept(),
        },
    )
    d_key, d_value = (jnp.moveaxis(filled[name][:, :, :k_length], 2, 1) for name in ("d_key", "d_value"))
    return d_key[..., :head_dim], d_value[..., : call.value.shape[3]]


def _bias_cotangent(settings: Settings, call: Call, terms: RowTerms, hides: bool) -> jax.Array:
    """Launch the kernel of the bias alone, so that XLA drops it where the gradient of the bias is unused."""
    assert call.bias is not None
    cut = cut_call(settings, settings.backward, "backward_bias", call)
    batch, _, q_heads, _ = call.query.shape
    # Of a bias that keys share there is a sum for each key, and then one of those.
    shape, per_row = (*call.bias.shape[:3], call.key.shape[1]), call.bias.shape[2] > 1
    ranges = (key_blocks if per_row else query_blocks)(call, cut.rows, cut.sizes.q, cut.sizes.k)
    steps = 1 if per_row else _steps(ranges, cut.q_blocks)
    padded = (*shape[:2], cut.q_blocks * cut.sizes.q if per_row else 1, cut.k_blocks * cut.sizes.k)
    dtype = settings.result_dtype(call.bias.dtype) if shape == call.bias.shape else jnp.float32
    bias = cut.pairs(jax.ShapeDtypeStruct(padded, dtype))
    filled = launch(
        partial(backward_bias, cut.tile),
        "flash_backward_bias",
        by_bias(batch, q_heads, cut.q_blocks, cut.k_blocks, steps, cut.batched, shape),
        cut.scalars(ranges),
        _backward_inputs(cut, terms, hides),
        {"d_bias": replace(bias, at=lambda at: bias.at(replace(at, k=at.own_k)))},
        {"total": (cut.sizes.k, cut.sizes.q), **cut.kept()},
    )
    d_bias = filled["d_bias"][:, :, : shape[2], : shape[3]]
    return d_bias if shape == call.bias.shape else d_bias.sum(axis=3, keepdims=True)


def _backward_inputs(cut: Cut, terms: RowTerms, hides: bool) -> dict[str, Blocked]:
    """Return the inputs of all backward kernels. Keys and values hidden from some row are made finite."""
    key, value = cut.call.key, cut.call.value
    if hides:
        key, value = _finite_or_zero(key), _finite_or_zero(value)
    lines = [padded(terms.lse, 2, cut.q_blocks * cut.sizes.q, jnp.inf), terms.delta]
    if terms.weight is not None:
        lines.append(terms.weight)
    lines = [padded(x, 2, cut.q_blocks * cut.sizes.q, 0) for x in lines]
    return {
        "query": cut.queries(terms.query),
        "key": cut.keys(key),
        "value": cut.keys(value),
        "d_out": cut.queries(terms.d_out),
        "terms": cut.by_row(jnp.stack(lines, axis=2)),
        **cut.visibility(),
    }


def _steps(ranges: jax.Array | None, blocks: int) -> int:
    """Return the most blocks that one block visits: all of them, where arrays decide."""
    if ranges is None or isinstance(ranges, Tracer):
        return blocks
    known = np.asarray(ranges)
    return max(1, int((known[..., 3] - known[..., 0]).max()))


def _may_weigh_nothing(call: Call) -> bool:
    """Return whether some pair may have no weight: hidden, or dropped."""
    return hides_pairs(call) or call.dropout_seed is not None


def _output(shape: tuple[int, ...], dtype: Any, q: int) -> Blocked:
    """Return [B, Hq, lines, Sq], filled a block of queries at a time."""
    struct = jax.ShapeDtypeStruct(shape, dtype)
    return Blocked(struct, (None, None, shape[2], q), lambda at: (at.batch, at.head, 0, at.q))


def _sinks(call: Call) -> jax.Array:
    """Return [2 * Hq] float32: the largest sink of every head, and the sum of exp(sink - largest)."""
    assert call.softmax_aux is not None
    heads = call.query.shape[2]
    sinks = call.softmax_aux.astype(jnp.float32)
    top = sinks.max(axis=-1)
    total = jnp.exp(sinks - jnp.where(top == -jnp.inf, jnp.float32(0), top)[:, None]).sum(axis=-1)
    return jnp.concatenate([jnp.broadcast_to(x, (heads,)) for x in (top, total)])


def _finite_or_zero(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


PASSES = Passes(
    forward=_forward,
    backward=_backward,
    check_forward=partial(
        check_blocks, "fwd_params", expected=(BlockSizes,), advice="Build it as BlockSizes(q=512, k=512)."
    ),
    check_backward=partial(
        check_blocks,
        "bwd_params",
        expected=(BlockSizes, BackwardSizes),
        advice="Build it as BlockSizes(q=512, k=512), or one for each kernel as BackwardSizes.",
    ),
    check_precision=partial(
        check_precision, known=_PRECISIONS, advice="None is float32, 'default' is bfloat16."
    ),
    # What compiles for TPUs that are not here cannot call back to say how it is partitioned.
    partitioned=False,
)
