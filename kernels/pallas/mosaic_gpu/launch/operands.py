"""The operands of the Hopper kernels: tensors, visibility, masks, biases.

What is read row by row is padded here to full blocks, so that reading needs no bounds; what is past the end
sees nothing, as a hidden key that is NaN must not come back through it. Tensors of any length stay as they
are: see `transfers.py`.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from attest.kernels.call.call import Call
from attest.kernels.numerics.exponents import LOG2E
from attest.kernels.numerics.philox import dropout_words
from attest.kernels.pallas.mosaic_gpu.launch.transfers import (
    GROUP,
    PART_BYTES,
    operand_shape,
    widths_of_pieces,
)
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec
from attest.kernels.pallas.padding import padded
from attest.kernels.visibility.intervals import Rows


def in_pieces(spec: KernelSpec, call: Call) -> KernelSpec:
    """Return the spec of a launch whose tiles are cut into pieces, if arrays need no padding then.

    Only where nothing may be hidden, as repairs read whole tiles; and not with ALiBi under a soft cap,
    which would spill.
    """
    shape, channels = spec.shape, call.query.shape[3]
    alike = shape.head_dim == shape.value_dim and channels == call.value.shape[3]
    if not alike or spec.hides or (spec.logits.alibi and spec.logits.cap is not None):
        return spec
    widths = widths_of_pieces(spec.dtype, channels, shape.head_dim)
    return spec if len(widths) == 1 else replace(spec, shape=replace(shape, pieces=widths))


def tensor(x: jax.Array, *widths: int) -> jax.Array:
    """Return [B, S, H, D] as the TMA unit copies it to tiles: padded to their width where it must be.

    widths: of the pieces of a tile. Of several, the array needs no padding.
    """
    if len(widths) > 1:
        return x
    shape = operand_shape(x.dtype, x.shape, *widths)
    return padded(x, 3, math.prod(shape[3:]), 0).reshape(shape)


def per_query(spec: KernelSpec, x: jax.Array, fill: float) -> jax.Array:
    """Return [B, Hq, Sq] float32, padded to full blocks of queries."""
    return padded(x, 2, spec.shape.padded_q_length, fill)


def visibility(spec: KernelSpec, call: Call, rows: Rows, ranges: jax.Array | None) -> dict[str, jax.Array]:
    """Return what decides which keys a row sees, beyond causal order, and ALiBi: of all batch rows if of one.

    ranges: of `attest.kernels.visibility.blocks`, the blocks that each block of the kernel's owner visits.
    """
    q_length = spec.shape.padded_q_length
    entries = spec.shape.batch if spec.visibility.by_batch else 1

    def spread(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (entries, *x.shape[1:]))

    arrays: dict[str, jax.Array] = {}
    if spec.visibility.first and rows.first is not None:
        arrays["first"] = padded(spread(rows.first), 1, q_length, spec.shape.k_length)
    if spec.visibility.last and rows.last is not None:
        arrays["last"] = padded(spread(rows.last), 1, q_length, -1)
    if rows.position is not None and call.alibi_slopes is not None:
        arrays["stands"] = padded(spread(rows.position), 1, q_length, 0)
        arrays["slopes"] = call.alibi_slopes
    if call.q_segment_ids is not None and call.kv_segment_ids is not None:
        arrays["q_ids"] = padded(call.q_segment_ids, 1, q_length, -1)
        arrays["kv_ids"] = padded(call.kv_segment_ids, 1, spec.shape.padded_k_length, -2)
    if spec.visibility.uses_ranges and ranges is not None:
        arrays["ranges"] = spread(ranges)
    return arrays


def pairs(spec: KernelSpec, call: Call) -> dict[str, jax.Array]:
    """Return mask and bias, as [.., queries, keys], or [.., 1, keys] if all queries share them.

    One that keys share is [.., 1, queries]; one that queries share, too, has that entry for each key.
    """
    arrays: dict[str, jax.Array] = {}
    if call.attention_mask is not None:
        arrays["mask"] = _laid(spec, "mask", call.attention_mask.astype(jnp.int8), 0)
    if call.bias is not None:
        arrays["bias"] = _laid(spec, "bias", call.bias, -jnp.inf)
    return arrays


def pair_lengths(q_length: int, k_length: int, itemsize: int) -> tuple[int, int]:
    """Return the padded lengths of queries and keys of an array of every pair, for the TMA unit."""
    row = PART_BYTES // itemsize
    return -(-q_length // GROUP) * GROUP, -(-k_length // row) * row


def _laid(spec: KernelSpec, name: str, x: jax.Array, fill: float) -> jax.Array:
    if name in spec.tiled_pairs:
        q_length, k_length = pair_lengths(x.shape[2], x.shape[3], x.dtype.itemsize)
        return padded(padded(x, 2, q_length, fill), 3, k_length, fill)
    if x.shape[3] == 1 < x.shape[2]:
        return padded(x, 2, spec.shape.padded_q_length, fill).swapaxes(2, 3)
    x = jnp.broadcast_to(x, (*x.shape[:3], spec.shape.k_length))
    return padded(x, 3, spec.shape.padded_k_length, fill)


def dropout(call: Call) -> dict[str, jax.Array]:
    """Return [6] int32, the words of `attest.kernels.numerics.philox.dropout_words`."""
    if call.dropout_seed is None:
        return {}
    words = dropout_words(call.dropout_seed, call.positions.origin, call.dropout_shared)
    return {"dropout": lax.bitcast_convert_type(words, jnp.int32)}


def sinks(spec: KernelSpec, call: Call) -> dict[str, jax.Array]:
    """Return [2, Hq] float32, as references are: the logsumexp of each head's sinks, and the largest."""
    if call.softmax_aux is None:
        return {}
    aux = call.softmax_aux.astype(jnp.float32)
    of_head = jnp.stack((jax.nn.logsumexp(aux, axis=-1), aux.max(axis=-1)))
    return {
        "sinks": jnp.broadcast_to(of_head, (2, call.query.shape[2])) * (LOG2E / spec.logits.reference_unit)
    }
