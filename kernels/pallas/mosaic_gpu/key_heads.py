"""More programs for the gradients of few key heads: copies of a head share the query heads of its group.

A program of these gradients sums over all query heads that share its keys. With few key heads and short
sequences there are fewer programs than multiprocessors, each with much to sum. A call with copies of each key
head has smaller groups and more programs. The gradient of a key is then the sum of those of its copies.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.call.call import Call
from attest.kernels.pallas.mosaic_gpu.blocks import PROGRAMS, TILE_BLOCKS, BackwardBlocks
from attest.kernels.visibility.intervals import windowed

# The most memory for the float32 gradients of all copies.
_MOST_BYTES = 1 << 28
_PARTIAL_BYTES = 4
# Copying, and summing the gradients, are launches of their own: copies must save a multiprocessor at least so
# many steps, and end sooner by this factor.
_LEAST_STEPS = 16
_LEAST_GAIN = 1.15
# Programs of a fused kernel wait for others of their head, so those of at least so many heads alternate.
_LEAST_ALTERNATING = 4


def choose_copies(call: Call, blocks: BackwardBlocks) -> int:
    """Return the number of copies of each key head: that of the blocks, or the one that ends soonest."""
    batch, keys, heads, _ = call.key.shape
    group = call.query.shape[2] // heads
    if blocks.copies is not None:
        return math.gcd(blocks.copies, group)
    steps = group * _steps(call, blocks)
    partial = _PARTIAL_BYTES * batch * keys * heads * (call.key.shape[3] + call.value.shape[3])

    def ends(copies: int) -> float:
        programs = batch * heads * copies * len(steps)
        longest = steps.max() / copies + TILE_BLOCKS
        if steps.min() == steps.max():
            return -(-programs // PROGRAMS) * longest
        # Long ones come first, and the others fill the gaps.
        return max(longest, (batch * heads * steps.sum() + programs * TILE_BLOCKS) / PROGRAMS)

    divisors = [n for n in range(1, group + 1) if group % n == 0]
    possible = [n for n in divisors if n * partial <= _MOST_BYTES] or [1]
    alternating = min(_LEAST_ALTERNATING, batch * heads * possible[-1]) if blocks.fused else 1
    possible = [n for n in possible if batch * heads * n >= alternating]
    best, least = min(possible, key=ends), possible[0]
    worth = max(_LEAST_GAIN * ends(best), ends(best) + _LEAST_STEPS)
    return best if ends(least) >= worth else least


def _steps(call: Call, blocks: BackwardBlocks) -> np.ndarray:
    """Return the number of blocks of queries that each block of keys of a head visits, by causal order alone.

    With a window, all blocks of keys count as equally long.
    """
    queries, keys = call.query.shape[1], call.key.shape[1]
    first = np.zeros(max(1, -(-keys // blocks.own)), int)
    if call.causal and not windowed(call):
        first = np.clip(np.arange(len(first)) * blocks.own + queries - keys, 0, queries)
    return -(-queries // blocks.step) - first // blocks.step


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
