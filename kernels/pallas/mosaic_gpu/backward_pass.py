"""The launches of the gradients of a checked call, and what comes before and after them.

Everything that depends on arrays but not on pairs is computed here in JAX: the interval of keys of every row,
the blocks that every block visits, Delta and the lse in bits.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from attest.kernels.call.call import Call
from attest.kernels.contract import Backward, Settings
from attest.kernels.numerics.exponents import LOG2E, in_units
from attest.kernels.numerics.row_terms import RowTerms
from attest.kernels.pallas.mosaic_gpu.blocks import BackwardBlocks, BackwardSizes, choose_backward, tile_dims
from attest.kernels.pallas.mosaic_gpu.bodies import (
    backward_bias,
    backward_fused,
    backward_joint,
    backward_key,
    backward_query,
    backward_split,
    repair_launch,
    repair_tile,
)
from attest.kernels.pallas.mosaic_gpu.bodies.backward_joint import KernelLaunch
from attest.kernels.pallas.mosaic_gpu.joint import choose_query_blocks, is_joint
from attest.kernels.pallas.mosaic_gpu.key_heads import choose_copies, sum_copies, with_copies
from attest.kernels.pallas.mosaic_gpu.launch.operands import (
    dropout,
    in_pieces,
    pair_lengths,
    pairs,
    per_query,
    tensor,
    visibility,
)
from attest.kernels.pallas.mosaic_gpu.launch.results import of_key, of_keys, of_queries, of_row, with_leak
from attest.kernels.pallas.mosaic_gpu.launch.scratch import require_fusible, scratch, suits
from attest.kernels.pallas.mosaic_gpu.launch.transfers import from_operand
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import launch
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec, describe, work_of
from attest.kernels.visibility.blocks import key_blocks, query_blocks
from attest.kernels.visibility.intervals import Rows, array_module, describe_rows

# Above, backward_key is split, and reads whole tiles.
_WIDEST_IN_PIECES = 128


def backward(settings: Settings, call: Call, terms: RowTerms, _kept: Any) -> Backward:
    """Return the gradients of query, key, value and bias."""
    rows = describe_rows(call, xp=array_module(call))
    terms = _normalized(terms)
    blocks = _blocks(settings, "backward_key", call)
    copies = choose_copies(call, blocks)
    copied = with_copies(call, copies)
    for_keys = replace(settings, unrounded=True) if copies > 1 else settings
    if blocks.fused:
        sums = _fused_cotangents(for_keys, copied, rows, terms, blocks)
    else:
        asked = settings.backward or BackwardSizes()
        of_queries = asked.backward_query or choose_query_blocks(call, blocks, copies)
        query = _kernel_launch(settings, call, rows, terms, of_queries, by_key=False)
        key = _kernel_launch(for_keys, copied, rows, terms, blocks, by_key=True)
        if is_joint(call, blocks, of_queries, copies):
            sums = _joint_cotangents(copied, key, query)
        else:
            sums = {**_query_cotangent(call, query), **_key_cotangents(copied, key)}
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


def _kernel_launch(
    settings: Settings, call: Call, rows: Rows, terms: RowTerms, blocks: BackwardBlocks, by_key: bool
) -> KernelLaunch:
    """Return the launch of a backward kernel; by_key: whether its programs own keys."""
    spec, arrays = _backward_spec(settings, call, rows, terms, blocks, by_key)
    shape = spec.shape
    blocks_of_heads = shape.key_heads * shape.k_blocks if by_key else shape.heads * shape.q_blocks
    return KernelLaunch(spec, blocks, shape.batch * blocks_of_heads, arrays)


def _query_cotangent(call: Call, it: KernelLaunch) -> dict[str, jax.Array]:
    return launch(
        partial(backward_query.backward_query, it.spec, it.blocks),
        backward_query.Shared,
        "flash_backward_query",
        it.arrays,
        _of_query(call, it),
        scratch(backward_query.Shared, it.spec, it.blocks),
        it.programs,
        it.blocks.warpgroups,
    )


def _of_query(call: Call, it: KernelLaunch) -> dict[str, jax.ShapeDtypeStruct]:
    return {"d_query": of_queries(it.spec, call.query.shape, it.spec.shape.head_dim)}


def _key_cotangents(call: Call, it: KernelLaunch) -> dict[str, jax.Array]:
    results = of_keys(it.spec, call)
    body, shared, kernel = backward_key.backward_key, backward_key.Shared, "flash_backward_key"
    if it.blocks.split:
        body, shared, kernel = backward_split.backward_split, backward_split.Shared, "flash_backward_split"
    sums: dict[str, jax.Array] = {}
    for names in (("d_key",), ("d_value",)) if it.blocks.separate else (("d_key", "d_value"),):
        sums |= launch(
            partial(body, it.spec, it.blocks),
            shared,
            kernel,
            it.arrays,
            {name: results[name] for name in names},
            scratch(shared, it.spec, it.blocks),
            it.programs,
            it.blocks.warpgroups,
        )
    return sums


def _joint_cotangents(copied: Call, key: KernelLaunch, query: KernelLaunch) -> dict[str, jax.Array]:
    """Launch tiles of keys, and behind them tiles of queries. copied: the call with copies of key heads."""
    return launch(
        partial(backward_joint.backward_joint, key, query),
        backward_joint.Shared,
        "flash_backward_joint",
        backward_joint.operands(key, query),
        {**_of_query(copied, query), **of_keys(key.spec, copied)},
        backward_joint.rooms(key, query),
        key.programs + query.programs,
        key.blocks.warpgroups,
    )


def _fused_cotangents(
    settings: Settings, call: Call, rows: Rows, terms: RowTerms, blocks: BackwardBlocks
) -> dict[str, jax.Array]:
    it = _kernel_launch(settings, call, rows, terms, blocks, by_key=True)
    spec, arrays = it.spec, it.arrays
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
        it.programs,
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
    spec = describe(settings, call, rows, tile_dims(call), q_block, k_block)
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
    arrays: Mapping[str, jax.Array],
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
        kernel, *tile_dims(call), work_of(call), fits, call.query.shape[1]
    )
