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

from attest.kernels.arguments import Call
from attest.kernels.cotangents import (
    RowTerms,
    cotangent_call,
    row_terms,
    sink_cotangent,
    without_pairs_cotangent,
)
from attest.kernels.flash import Passes, Settings, check_blocks, check_precision, flash_kernels, without_pairs
from attest.kernels.pallas.padding import padded
from attest.kernels.pallas.tpu.backward import backward_bias, backward_key, backward_query
from attest.kernels.pallas.tpu.blocks import BackwardSizes, BlockSizes
from attest.kernels.pallas.tpu.cut import Cut, channels, cut_call
from attest.kernels.pallas.tpu.forward import forward
from attest.kernels.pallas.tpu.launch import Blocked, by_bias, by_keys, by_queries, launch
from attest.kernels.ranges import key_blocks, query_blocks
from attest.kernels.visibility import Rows, ahead, describe_rows

MAX_HEAD_DIM = 256

_PRECISIONS = {
    None: lax.Precision.HIGHEST,
    "highest": lax.Precision.HIGHEST,
    "float32": lax.Precision.HIGHEST,
    "default": lax.Precision.DEFAULT,
    "fastest": lax.Precision.DEFAULT,
    "bfloat16": lax.Precision.DEFAULT,
}


def _forward(settings: Settings, call: Call) -> tuple[jax.Array, jax.Array, jax.Array]:
    _refuse_unsupported(settings, call)
    batch, q_length, q_heads, _ = call.query.shape
    k_length, _, value_dim = call.value.shape[1:]
    if 0 in (q_length, k_length):
        return without_pairs(call)
    cut = cut_call(settings, settings.forward, "forward", call)
    with ahead(call):
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
                "out": _output(shape, call.query.dtype, cut.sizes.q),
                "stats": _output((*shape[:2], 2, shape[3]), jnp.float32, cut.sizes.q),
            },
            {"m": (1, cut.sizes.q), "norm": (1, cut.sizes.q), "acc": (shape[2], cut.sizes.q), **cut.kept()},
        )
        return filled["out"], filled["stats"]

    if _hides(call, cut.rows):
        out, stats = _revealing(run, call.value)
    else:
        out, stats = run(call.value)
    lse, row_max = stats[:, :, 0, :q_length], stats[:, :, 1, :q_length]
    if cut.rows.padding is not None and call.softmax_aux is not None:
        lse = jnp.where(cut.rows.padding[:, None, :], -jnp.inf, lse)
    return jnp.moveaxis(out[:, :, :value_dim, :q_length], 3, 1), lse, row_max


def _revealing(run: Any, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """run(value), where a value that is not finite shows only in the rows that give it weight (S4).

    A hidden value must not leak as 0 * NaN, so such values are left out. Should there be any, the kernel runs
    once more on a value that is 1 in their places and 0 elsewhere: its result is above 0 where NaN is due.
    """
    finite = jnp.isfinite(value)
    out, stats = run(_finite_or_zero(value))

    # A loop of no or one turn, because vmap would make a cond pay for both branches. The barrier ties the
    # kernel to the turn: it depends on nothing else that changes, and XLA would move it out of the loop.
    def reveal(turn: jax.Array, out: jax.Array) -> jax.Array:
        strange, _ = lax.optimization_barrier((~finite, turn))
        marks, _ = run(strange.astype(value.dtype))
        return jnp.where(marks > 0, jnp.full((), jnp.nan, out.dtype), out)

    turns = (~finite.all()).astype(jnp.int32)
    return lax.fori_loop(jnp.int32(0), turns, reveal, out), stats


def _backward(
    settings: Settings,
    call: Call,
    out: jax.Array,
    lse: jax.Array,
    row_max: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
) -> Call:
    hides = _hides(call, describe_rows(call))
    terms = row_terms(call, out, lse, row_max, d_out, d_lse, settings.normalize_output, hides)
    d_sinks = sink_cotangent(call, lse, terms.delta)
    if 0 in (*call.query.shape[:2], call.key.shape[1]):
        return without_pairs_cotangent(call, d_sinks)
    d_query = _query_cotangent(settings, call, terms, hides)
    d_key, d_value = _key_cotangents(settings, call, terms, hides)
    d_bias = None if call.bias is None else _bias_cotangent(settings, call, terms, hides)
    return cotangent_call(call, d_query, d_key, d_value, d_bias, d_sinks)


def _query_cotangent(settings: Settings, call: Call, terms: RowTerms, hides: bool) -> jax.Array:
    cut = cut_call(settings, settings.backward, "backward_query", call)
    batch, q_length, q_heads, head_dim = call.query.shape
    with ahead(call):
        ranges = key_blocks(call, cut.rows, cut.sizes.q, cut.sizes.k)
    schedule = by_queries(batch, q_heads, cut.q_blocks, _steps(ranges, cut.k_blocks), cut.batched)
    shape = (batch, q_heads, channels(head_dim), cut.q_blocks * cut.sizes.q)
    filled = launch(
        partial(backward_query, cut.tile),
        "flash_backward_query",
        schedule,
        cut.scalars(ranges),
        _backward_inputs(cut, terms, hides),
        {"d_query": _output(shape, call.query.dtype, cut.sizes.q)},
        {"total": (channels(head_dim), cut.sizes.q), **cut.kept()},
    )
    return jnp.moveaxis(filled["d_query"][:, :, :head_dim, :q_length], 3, 1)


def _key_cotangents(
    settings: Settings, call: Call, terms: RowTerms, hides: bool
) -> tuple[jax.Array, jax.Array]:
    cut = cut_call(settings, settings.backward, "backward_key", call)
    batch, k_length, k_heads, head_dim = call.key.shape
    with ahead(call):
        ranges = query_blocks(call, cut.rows, cut.sizes.q, cut.sizes.k)
    schedule = by_keys(batch, k_heads, cut.group, cut.k_blocks, _steps(ranges, cut.q_blocks), cut.batched)

    def output(channels: int) -> Blocked:
        shape = (batch, k_heads, cut.k_blocks * cut.sizes.k, channels)
        return Blocked(
            jax.ShapeDtypeStruct(shape, call.key.dtype),
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
    """A launch of its own, so that XLA drops it where nobody asks for the gradient of the bias."""
    assert call.bias is not None
    cut = cut_call(settings, settings.backward, "backward_bias", call)
    batch, _, q_heads, _ = call.query.shape
    shape, per_row = call.bias.shape, call.bias.shape[2] > 1
    with ahead(call):
        ranges = (key_blocks if per_row else query_blocks)(call, cut.rows, cut.sizes.q, cut.sizes.k)
    steps = 1 if per_row else _steps(ranges, cut.q_blocks)
    padded = (*shape[:2], cut.q_blocks * cut.sizes.q if per_row else 1, cut.k_blocks * cut.sizes.k)
    bias = cut.pairs(jax.ShapeDtypeStruct(padded, call.bias.dtype))
    filled = launch(
        partial(backward_bias, cut.tile),
        "flash_backward_bias",
        by_bias(batch, q_heads, cut.q_blocks, cut.k_blocks, steps, cut.batched, shape),
        cut.scalars(ranges),
        _backward_inputs(cut, terms, hides),
        {"d_bias": replace(bias, at=lambda at: bias.at(replace(at, k=at.own_k)))},
        {"total": (cut.sizes.k, cut.sizes.q), **cut.kept()},
    )
    return filled["d_bias"][:, :, : shape[2], : shape[3]]


def _backward_inputs(cut: Cut, terms: RowTerms, hides: bool) -> dict[str, Blocked]:
    """What all backward kernels read. Keys and values that some row does not see must not reach it as NaN."""
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
    """The most blocks that one block visits: all of them, where it is arrays that decide."""
    if ranges is None or isinstance(ranges, Tracer):
        return blocks
    known = np.asarray(ranges)
    return max(1, int((known[..., 3] - known[..., 0]).max()))


def _hides(call: Call, rows: Rows) -> bool:
    """Whether some pair may have no weight: hidden, or dropped."""
    arrays = (
        *(rows.first, rows.last, call.q_segment_ids, call.attention_mask, call.bias),
        call.dropout_seed,
    )
    return any(x is not None for x in arrays)


def _output(shape: tuple[int, ...], dtype: Any, q: int) -> Blocked:
    """[B, Hq, lines, Sq], filled a block of queries at a time."""
    struct = jax.ShapeDtypeStruct(shape, dtype)
    return Blocked(struct, (None, None, shape[2], q), lambda at: (at.batch, at.head, 0, at.q))


def _sinks(call: Call) -> jax.Array:
    """[2 * Hq] float32: the largest sink of every head, then the sum of all sinks' exponentials over its."""
    assert call.softmax_aux is not None
    heads = call.query.shape[2]
    sinks = call.softmax_aux.astype(jnp.float32)
    top = sinks.max(axis=-1)
    total = jnp.exp(sinks - jnp.where(top == -jnp.inf, jnp.float32(0), top)[:, None]).sum(axis=-1)
    return jnp.concatenate([jnp.broadcast_to(x, (heads,)) for x in (top, total)])


def _finite_or_zero(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def _refuse_unsupported(settings: Settings, call: Call) -> None:
    """Raises NotImplementedError naming what these kernels do not take (clause S20)."""
    dtypes = {
        "query, key and value": call.query.dtype.name,
        "bias": None if call.bias is None else call.bias.dtype.name,
        "logits_dtype": settings.logits_dtype,
    }
    for name, dtype in dtypes.items():
        if dtype == "float16":
            raise NotImplementedError(
                f"attest.kernels.pallas.tpu: float16 is not supported, got it for {name}. TPUs compute in "
                "bfloat16 and float32: cast to one of them, or use attest.kernels.xla."
            )
    dim = max(call.query.shape[3], call.value.shape[3])
    if dim > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"attest.kernels.pallas.tpu: head_dim {dim} is not supported, at most {MAX_HEAD_DIM} is. "
            "Use attest.kernels.xla."
        )


flash_attention, flash_attention_with_lse = flash_kernels(
    Passes(
        check_forward=partial(
            check_blocks,
            "fwd_params",
            expected=(BlockSizes,),
            advice="Build it as BlockSizes(q=512, k=512).",
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
        forward=_forward,
        backward=_backward,
        numerics="""
    Numerics: dots take the inputs' dtype and sum in float32; softmax is float32; P and dS are cast to the
    inputs' dtype for the second dot; out and each gradient are rounded once, to their input's dtype. Delta
    uses out as rounded. precision matters to float32 inputs alone: None, "highest" and "float32" are float32
    products, "default", "fastest" and "bfloat16" round the operands of every dot to bfloat16. fwd_params is
    BlockSizes, bwd_params BlockSizes or BackwardSizes. Every sum runs in one order: bit-identical from run to
    run (S17).

    Runs on TPUs, or on a CPU under `jax.experimental.pallas.tpu.force_tpu_interpret_mode`. Head dims from 1
    to 256, bfloat16 and float32; NotImplementedError for others.
""",
    )
)
