"""More programs for the gradients of few key heads: copies of a head share the query heads of its group.

A program of these gradients sums over all query heads that share its keys. With few key heads and short
sequences there are fewer programs than multiprocessors, each with much to sum. A call with copies of each key
head has smaller groups and more programs. The gradient of a key is then the sum of those of its copies.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from attest.kernels.call.call import Call
from attest.kernels.pallas.mosaic_gpu.blocks import PROGRAMS, TILE_BLOCKS, BackwardBlocks

# The most memory for the float32 gradients of all copies.
_MOST_BYTES = 1 << 28
_PARTIAL_BYTES = 4
# Copying, and summing the gradients, are launches of their own: copies must save a multiprocessor at least so
# many steps, and end sooner by this factor.
_LEAST_STEPS = 16
_LEAST_GAIN = 1.15


def choose_copies(call: Call, blocks: BackwardBlocks) -> int:
    """Return the number of copies of each key head: that of the blocks, or the one that ends soonest."""
    batch, keys, heads, _ = call.key.shape
    group = call.query.shape[2] // heads
    if blocks.copies is not None:
        return math.gcd(blocks.copies, group)
    programs = batch * heads * -(-keys // blocks.own)
    steps = group * -(-call.query.shape[1] // blocks.step)
    partial = _PARTIAL_BYTES * batch * keys * heads * (call.key.shape[3] + call.value.shape[3])

    def ends(copies: int) -> float:
        return -(-programs * copies // PROGRAMS) * (steps / copies + TILE_BLOCKS)

    possible = [n for n in range(2, group + 1) if group % n == 0 and n * partial <= _MOST_BYTES]
    best = min(possible, key=ends, default=1)
    worth = max(_LEAST_GAIN * ends(best), ends(best) + _LEAST_STEPS)
    return best if ends(1) >= worth else 1


def with_copies(call: Call, copies: int) -> Call:
    """Return the same call with several copies of each key head, each for an equal part of the group."""
    if copies == 1:
        return call
    key, value = (jnp.repeat(x, copies, axis=2) for x in (call.key, call.value))
    return replace(call, key=key, value=value)


def sum_copies(cotangent: jax.Array, copies: int, dtype: jnp.dtype) -> jax.Array:
    """Return the gradients [B, Sk, Hkv, D] of key heads from those of their copies, float32, rounded once."""
    if copies == 1:
        return cotangent
    batch, keys, heads, head_dim = cotangent.shape
    return cotangent.reshape(batch, keys, heads // copies, copies, head_dim).sum(axis=3).astype(dtype)
