"""Flash attention on Hopper GPUs: the forward launch of a checked call, and what is not supported."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from attest.kernels.call.call import Call
from attest.kernels.contract import (
    Forward,
    Passes,
    Settings,
    check_blocks,
    check_precision,
)
from attest.kernels.few_queries import finish, has_few_queries, pack_heads
from attest.kernels.numerics.partial import Partial
from attest.kernels.pallas.mosaic_gpu.backward_pass import backward
from attest.kernels.pallas.mosaic_gpu.blocks import (
    BackwardSizes,
    Blocks,
    choose,
    choose_parts,
    tile_dims,
)
from attest.kernels.pallas.mosaic_gpu.bodies import (
    forward,
)
from attest.kernels.pallas.mosaic_gpu.launch.operands import (
    dropout,
    in_pieces,
    pairs,
    sinks,
    tensor,
    visibility,
)
from attest.kernels.pallas.mosaic_gpu.launch.results import of_queries, of_row, with_leak
from attest.kernels.pallas.mosaic_gpu.launch.scratch import scratch, suits
from attest.kernels.pallas.mosaic_gpu.launch.transfers import from_operand
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import launch
from attest.kernels.pallas.mosaic_gpu.schedule.order import schedule
from attest.kernels.pallas.mosaic_gpu.schedule.tiles import tiles
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec, describe, work_of
from attest.kernels.pallas.mosaic_gpu.target import require_hopper
from attest.kernels.visibility.blocks import key_blocks
from attest.kernels.visibility.intervals import Rows, array_module, describe_rows

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
    return _sums(describe(settings, call, rows, tile_dims(call), blocks.own, blocks.k), call, rows, blocks)


def _chosen(call: Call, few: bool) -> Blocks:
    """Return the table's choice; tiles of few queries have rows of several heads."""
    queries = None if few else call.query.shape[1]
    fits = partial(suits, "forward", call, False)
    return choose(
        *tile_dims(call), work_of(call, few), queries, fits, call.query.shape[0] * call.query.shape[2]
    )


def _of_few(settings: Settings, call: Call, packed: Call, rows: Rows, blocks: Blocks) -> Forward:
    """Return the forward pass of a call by one tile for each part of the keys and key head.

    packed, rows: the call with packed heads. Where its rows are the heads of one query, and nothing is hidden
    that a repair would read them for, they are read and written where they are.
    """
    batch, _, heads, _ = packed.query.shape
    group = call.query.shape[2] // heads
    parts = choose_parts(batch * heads, -(-call.key.shape[1] // blocks.k), blocks.programs or batch * heads)
    spec = describe(settings, packed, rows, tile_dims(packed), blocks.own, blocks.k)
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


PASSES = Passes(
    forward=_forward,
    backward=backward,
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
