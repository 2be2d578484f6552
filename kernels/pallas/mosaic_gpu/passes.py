"""Flash attention on Hopper GPUs: the launches of a checked call, and what is not supported.

Everything that depends on arrays but not on pairs is computed here in JAX: the interval of keys of every row,
the blocks that every block visits, Delta and the lse in bits.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from attest.kernels.call.call import Call
from attest.kernels.contract import (
    Backward,
    Forward,
    Passes,
    Settings,
    check_blocks,
    check_precision,
)
from attest.kernels.few_queries import finish, has_few_queries, pack_heads
from attest.kernels.numerics.exponents import LOG2E, in_units
from attest.kernels.numerics.partial import Partial
from attest.kernels.numerics.row_terms import RowTerms
from attest.kernels.pallas.mosaic_gpu.blocks import (
    BackwardBlocks,
    BackwardSizes,
    Blocks,
    choose,
    choose_backward,
    choose_parts,
    pad_dims,
)
from attest.kernels.pallas.mosaic_gpu.bodies import (
    backward_bias,
    backward_fused,
    backward_key,
    backward_query,
    backward_split,
    forward,
    repair_launch,
    repair_tile,
)
from attest.kernels.pallas.mosaic_gpu.key_heads import choose_copies, sum_copies, with_copies
from attest.kernels.pallas.mosaic_gpu.launch.operands import (
    dropout,
    in_pieces,
    pair_lengths,
    pairs,
    per_query,
    sinks,
    tensor,
    visibility,
)
from attest.kernels.pallas.mosaic_gpu.launch.results import of_key, of_keys, of_queries, of_row, with_leak
from attest.kernels.pallas.mosaic_gpu.launch.scratch import require_fusible, scratch, suits
from attest.kernels.pallas.mosaic_gpu.launch.transfers import from_operand
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import launch
from attest.kernels.pallas.mosaic_gpu.schedule.order import schedule
from attest.kernels.pallas.mosaic_gpu.schedule.tiles import tiles
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec, describe, work_of
from attest.kernels.pallas.mosaic_gpu.target import require_hopper
from attest.kernels.visibility.blocks import key_blocks, query_blocks
from attest.kernels.visibility.intervals import Rows, array_module, describe_rows

# Above, backward_key is split, and reads whole tiles.
_WIDEST_IN_PIECES = 128
# Whether the tanh of a cap is approximate. Products take 16 bits and sum in float32, whatever is asked for.
_PRECISIONS = {
    **dict.fromkeys((None, "highest", "float32"), False),
    **dict.fromkeys(("default", "fastest", "bfloat16"), True),
}


def _forward(settings: Settings, call: Call) -> Forward:
    rows = describe_rows(call, xp=array_module(call))
    packs = settings.normalize_output and not settings.reads_row_max
    few = packs and has_few_queries(call)
    blocks = settings.forward or _chosen(call, few)
    if few:
        return _of_few(settings, call, *pack_heads(call, rows), blocks)
    return _sums(describe(settings, call, rows, _dims(call), blocks.own, blocks.k), call, rows, blocks)


def _chosen(call: Call, few: bool) -> Blocks:
    """Return the table's choice; tiles of few queries have rows of several heads."""
    queries = None if few else call.query.shape[1]
    fits = partial(suits, "forward", call, False)
    return choose(*_dims(call), work_of(call, few), queries, fits, call.query.shape[0] * call.query.shape[2])


def _of_few(settings: Settings, call: Call, packed: Call, rows: Rows, blocks: Blocks) -> Forward:
    """Return the forward pass of a call by one tile for each part of the keys and key head.

    packed, rows: the call with packed heads. Where its rows are the heads of one query, and nothing is hidden
    that a repair would read them for, they are read and written where they are.
    """
    batch, _, heads, _ = packed.query.shape
    group = call.query.shape[2] // heads
    parts = choose_parts(batch * heads, -(-call.key.shape[1] // blocks.k), blocks.programs or batch * heads)
    spec = describe(settings, packed, rows, _dims(packed), blocks.own, blocks.k)
    spec = replace(spec, shape=replace(spec.shape, packed_heads=group))
    query = None
    if call.query.shape[1] == 1 and not spec.hides:
        query = call.query.reshape(batch * heads, -1, 1, call.query.shape[3])
        if parts == 1 and call.softmax_aux is None and not settings.unrounded:
            found = _sums(spec, packed, rows, blocks, query)
            lse, row_max = (x.reshape(batch, -1, 1) for x in found[1:3])
            return Forward(found.out.reshape(*call.query.shape[:3], -1), lse, row_max)
    sums = _sums(spec.in_parts(parts), packed, rows, blocks, query)
    total, norm, reference = (x.reshape(parts, batch, *x.shape[1:]) for x in sums[:3])
    return finish(Partial(total, norm, reference), call, settings.result_dtype(call.query.dtype))


def _sums(
    spec: KernelSpec,
    call: Call,
    rows: Rows,
    blocks: Blocks,
    query: jax.Array | None = None,
) -> Forward:
    """Run the forward kernel; partial results are sums: out's totals, norms for lse, references for row_max.

    query: that of the call as [B * Hkv, rows, 1, D], where its memory has rows of a key head together. Out
    has that shape, too, unless it is of parts.
    """
    q_length = call.query.shape[1]
    spec = in_pieces(replace(spec, shape=replace(spec.shape, head_major=query is not None)), call)
    query = call.query if query is None else query
    ranges = key_blocks(call, rows, blocks.own, blocks.k) if spec.visibility.uses_ranges else None
    count = tiles(spec)
    if blocks.programs is not None and count <= blocks.programs:
        blocks = replace(blocks, programs=None)
    arrays = {
        "query": require_hopper(tensor(query, *spec.shape.head_pieces)),
        "key": tensor(call.key, *spec.shape.head_pieces),
        "value": tensor(call.value, *spec.shape.value_pieces),
        **visibility(spec, call, rows, ranges),
        **pairs(spec, call),
        **sinks(spec, call),
        **dropout(call),
        **_schedule(spec, blocks),
    }
    number = of_row(spec)
    out = of_queries(spec, (*query.shape[:3], call.value.shape[3]), spec.shape.value_dim)
    if spec.results.partial:
        out = jax.ShapeDtypeStruct((*number.shape, spec.shape.value_dim), jnp.float32)
    outputs = {"out": out, "lse": number, "row_max": number}
    filled = launch(
        partial(forward.flash_forward, spec, blocks),
        forward.Shared,
        "flash_forward",
        arrays,
        with_leak(spec, outputs, number),
        scratch(forward.Shared, spec, blocks),
        blocks.programs or count,
        blocks.warpgroups,
    )
    out, lse, row_max = (filled[name] for name in ("out", "lse", "row_max"))
    width = call.value.shape[3]
    out = out[:, :, :q_length, :width] if spec.results.partial else from_operand(out)[:, :q_length, :, :width]
    return Forward(out, lse[..., :q_length], row_max[..., :q_length])


def _schedule(spec: KernelSpec, blocks: Blocks) -> dict[str, jax.Array]:
    """Return the tiles of each program of a persistent kernel, where tiles differ in length."""
    if blocks.programs is None or not spec.visibility.causal:
        return {}
    return {"schedule": jnp.asarray(schedule(spec, blocks.programs))}


def _backward(settings: Settings, call: Call, terms: RowTerms, _kept: Any) -> Backward:
    rows = describe_rows(call, xp=array_module(call))
    terms = _normalized(terms)
    blocks = _blocks(settings, "backward_key", call)
    copies = choose_copies(call, blocks)
    copied = with_copies(call, copies)
    for_keys = replace(settings, unrounded=True) if copies > 1 else settings
    if blocks.fused:
        sums = _fused_cotangents(for_keys, copied, rows, terms, blocks)
    else:
        d_query = _query_cotangent(settings, call, rows, terms)
        sums = {"d_query": d_query, **_key_cotangents(for_keys, copied, rows, terms, blocks)}
    of = {"d_query": call.query, "d_key": call.key, "d_value": call.value}
    cut = {name: from_operand(x)[:, : of[name].shape[1], :, : of[name].shape[3]] for name, x in sums.items()}
    dtype = settings.result_dtype(call.query.dtype)
    d_key, d_value = (sum_copies(cut[name], copies, dtype) for name in ("d_key", "d_value"))
    d_bias = None if call.bias is None else _bias_cotangent(settings, call, rows, terms)
    return Backward(cut["d_query"].astype(dtype), d_key, d_value, d_bias)


def _normalized(terms: RowTerms) -> RowTerms:
    """Return terms without a weight: P * weight = exp(S - (lse - log(weight))) takes it in."""
    weight = terms.weight
    if weight is None:
        return terms
    sound = weight > 0
    lse = jnp.where(sound, terms.lse - jnp.log(weight), terms.lse)
    return replace(terms, lse=lse, delta=jnp.where(sound, terms.delta / weight, terms.delta), weight=None)


def _query_cotangent(settings: Settings, call: Call, rows: Rows, terms: RowTerms) -> jax.Array:
    blocks = _blocks(settings, "backward_query", call)
    spec, arrays = _backward_spec(settings, call, rows, terms, blocks, by_key=False)
    d_query = of_queries(spec, call.query.shape, spec.shape.head_dim)
    filled = launch(
        partial(backward_query.backward_query, spec, blocks),
        backward_query.Shared,
        "flash_backward_query",
        arrays,
        {"d_query": d_query},
        scratch(backward_query.Shared, spec, blocks),
        spec.shape.batch * spec.shape.heads * spec.shape.q_blocks,
        blocks.warpgroups,
    )
    return filled["d_query"]


def _key_cotangents(
    settings: Settings, call: Call, rows: Rows, terms: RowTerms, blocks: BackwardBlocks
) -> dict[str, jax.Array]:
    spec, arrays = _backward_spec(settings, call, rows, terms, blocks, by_key=True)
    results = of_keys(spec, call)
    body, shared, kernel = backward_key.backward_key, backward_key.Shared, "flash_backward_key"
    if blocks.split:
        body, shared, kernel = backward_split.backward_split, backward_split.Shared, "flash_backward_split"
    sums: dict[str, jax.Array] = {}
    for names in (("d_key",), ("d_value",)) if blocks.separate else (("d_key", "d_value"),):
        sums |= launch(
            partial(body, spec, blocks),
            shared,
            kernel,
            arrays,
            {name: results[name] for name in names},
            scratch(shared, spec, blocks),
            spec.shape.batch * spec.shape.key_heads * spec.shape.k_blocks,
            blocks.warpgroups,
        )
    return sums


def _fused_cotangents(
    settings: Settings, call: Call, rows: Rows, terms: RowTerms, blocks: BackwardBlocks
) -> dict[str, jax.Array]:
    spec, arrays = _backward_spec(settings, call, rows, terms, blocks, by_key=True)
    require_fusible(spec, blocks)
    outputs = {
        "d_query": jax.ShapeDtypeStruct((*of_row(spec).shape, spec.shape.head_dim), jnp.float32),
        **({"key_leak": of_key(spec)} if spec.hides else {}),
        **of_keys(spec, call),
    }
    filled = launch(
        partial(backward_fused.backward_fused, spec, blocks),
        backward_fused.Shared,
        "flash_backward_fused",
        arrays,
        with_leak(spec, outputs, of_key(spec)),
        scratch(backward_fused.Shared, spec, blocks),
        spec.shape.batch * spec.shape.key_heads * spec.shape.k_blocks,
        blocks.warpgroups,
    )
    d_query = (filled.pop("d_query") * spec.logits.scale).astype(spec.result_dtype).swapaxes(1, 2)
    blind = spec.shape.q_length - spec.shape.k_length if spec.visibility.causal else 0
    if blind > 0:
        # No program visits a block of which no row sees a key.
        d_query = d_query.at[:, :blind].set(0)
    of_query = {"d_query": d_query}
    if spec.hides:
        # dS of a hidden pair is 0. So only a key that is not finite reaches dquery from behind one.
        leak = jnp.repeat(filled.pop("key_leak").sum(axis=2, keepdims=True), spec.shape.group, axis=1)
        of_query["leak"] = jnp.broadcast_to(leak, of_row(spec).shape)
    for_queries, for_keys = partial(repair_tile.d_query, blocks.own), partial(repair_tile.d_key, blocks.step)
    of_query = _repaired(spec, for_queries, "flash_repair_query", arrays, of_query)
    return {**of_query, **_repaired(spec, for_keys, "flash_repair_key", arrays, filled)}


def _bias_cotangent(settings: Settings, call: Call, rows: Rows, terms: RowTerms) -> jax.Array:
    """Launch the kernel of the bias alone, so that XLA drops it where the gradient of the bias is unused."""
    assert call.bias is not None
    blocks = _blocks(settings, "backward_bias", call)
    spec, arrays = _backward_spec(settings, call, rows, terms, blocks, by_key=True)
    q_length, k_length = spec.shape.q_blocks * blocks.step, spec.shape.k_blocks * blocks.own
    by_query = call.bias.shape[2] > 1
    # Of a bias that keys share there is a sum for each key, and then one of those.
    shared, dtype = call.bias.shape[3] < call.key.shape[1], settings.result_dtype(call.bias.dtype)
    tiled = "bias" in spec.tiled_pairs
    if tiled:
        stored = spec.d_bias_dtype
        lengths = pair_lengths(call.query.shape[1], call.key.shape[1], stored.itemsize)
    else:
        stored = jnp.float32 if shared else dtype
        lengths = (k_length, q_length) if by_query else (k_length,)
    filled = launch(
        partial(backward_bias.backward_bias, spec, blocks),
        backward_bias.Shared,
        "flash_backward_bias",
        arrays,
        {"d_bias": jax.ShapeDtypeStruct((*call.bias.shape[:2], *lengths), stored)},
        scratch(backward_bias.Shared, spec, blocks),
        backward_bias.programs(spec),
        blocks.warpgroups,
    )
    d_bias = filled["d_bias"]
    if not tiled:
        d_bias = d_bias.swapaxes(2, 3) if by_query else d_bias[:, :, None]
    d_bias = d_bias[:, :, : call.bias.shape[2], : call.key.shape[1]]
    return d_bias.sum(axis=3, keepdims=True).astype(dtype) if shared else d_bias


def _backward_spec(
    settings: Settings, call: Call, rows: Rows, terms: RowTerms, blocks: BackwardBlocks, by_key: bool
) -> tuple[KernelSpec, dict[str, jax.Array]]:
    """Return the spec of a backward kernel, and what it reads; by_key: whether its programs own keys."""
    q_block, k_block = (blocks.step, blocks.own) if by_key else (blocks.own, blocks.step)
    spec = describe(settings, call, rows, _dims(call), q_block, k_block)
    # Where one kernel reads whole tiles, arrays are padded for both.
    if not (blocks.fused or blocks.split or spec.shape.head_dim > _WIDEST_IN_PIECES):
        spec = in_pieces(spec, call)
    visited = query_blocks if by_key else key_blocks
    ranges = visited(call, rows, q_block, k_block) if spec.visibility.uses_ranges else None
    return spec, {
        "query": tensor(terms.query, *spec.shape.head_pieces),
        "key": tensor(call.key, *spec.shape.head_pieces),
        "value": tensor(call.value, *spec.shape.value_pieces),
        "d_out": tensor(terms.d_out, *spec.shape.value_pieces),
        **_row_numbers(spec, terms),
        **visibility(spec, call, rows, ranges),
        **pairs(spec, call),
        **dropout(call),
    }


def _repaired(
    spec: KernelSpec,
    body: repair_launch.Body,
    name: str,
    arrays: dict[str, jax.Array],
    filled: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    """Remove from a kernel's results what may have leaked into them from something hidden (S4)."""
    leak = filled.pop("leak", None)
    return filled if leak is None else repair_launch.repair(body, name, spec, arrays, filled, leak)


def _row_numbers(spec: KernelSpec, terms: RowTerms) -> dict[str, jax.Array]:
    """Return the start of each row's accumulators, or its lse where that is subtracted later.

    Under dropout the logarithm of `kept_scale` is subtracted from the lse, so that P is that of a kept pair.
    """
    logits = spec.logits
    unit = -1.0 / logits.scale if logits.folds_lse else LOG2E / logits.reference_unit
    lse = terms.lse - math.log(spec.kept_scale) if spec.dropout else terms.lse
    return {
        "lse": per_query(spec, in_units(lse, unit), -jnp.inf if logits.folds_lse else jnp.inf),
        "delta": per_query(spec, terms.delta * (-1.0 / spec.kept_scale), 0.0),
    }


def _blocks(settings: Settings, kernel: str, call: Call) -> BackwardBlocks:
    asked = settings.backward or BackwardSizes()
    fits = partial(suits, kernel, call, asked.backward_query is not None)
    return getattr(asked, kernel) or choose_backward(
        kernel, *_dims(call), work_of(call), fits, call.query.shape[1]
    )


def _dims(call: Call) -> tuple[int, int]:
    """Return the head dims of tiles, of query and key, and of value."""
    return pad_dims(call.query.shape[3], call.value.shape[3])


PASSES = Passes(
    forward=_forward,
    backward=_backward,
    check_forward=partial(
        check_blocks,
        "fwd_params",
        expected=(Blocks,),
        advice="Build it as attest.kernels.pallas.mosaic_gpu.Blocks.",
    ),
    check_backward=partial(
        check_blocks,
        "bwd_params",
        expected=(BackwardSizes,),
        advice="Build it as attest.kernels.pallas.mosaic_gpu.BackwardSizes.",
    ),
    check_precision=partial(
        check_precision, known=_PRECISIONS, advice="'default' approximates the tanh of a soft cap."
    ),
    # Rows without a number are recomputed only where one has reached a key that is hidden from it.
    cleans_rows=True,
    # What a launch behind the fused kernel repairs is changed in place.
    partitioned=False,
)
