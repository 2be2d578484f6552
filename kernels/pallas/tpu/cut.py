"""The tiles of a call for the TPU kernels: layouts, padding and the owner of each block.

Arrays of queries come as [channels, queries], those of keys as [keys, channels]; see `tile.py`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attest.kernels.call.call import Call
from attest.kernels.contract import Settings
from attest.kernels.numerics.philox import dropout_words
from attest.kernels.pallas.padding import padded
from attest.kernels.pallas.tpu.blocks import LANES, BlockSizes, choose
from attest.kernels.pallas.tpu.launch import Blocked, Place
from attest.kernels.pallas.tpu.target import interpreting
from attest.kernels.pallas.tpu.tile import Tile, kept_scratch
from attest.kernels.visibility.intervals import Rows, array_module, describe_rows


@dataclass(frozen=True)
class Cut:
    """A call cut into tiles: what the kernels are given of it."""

    call: Call
    sizes: BlockSizes
    rows: Rows
    batched: bool  # whether rows differ between batch entries
    tile: Tile

    @property
    def group(self) -> int:
        """The number of query heads that share a key head."""
        return self.call.query.shape[2] // self.call.key.shape[2]

    @property
    def q_blocks(self) -> int:
        """The number of blocks of queries."""
        return -(-self.call.query.shape[1] // self.sizes.q)

    @property
    def k_blocks(self) -> int:
        """The number of blocks of keys."""
        return -(-self.call.key.shape[1] // self.sizes.k)

    def queries(self, x: jax.Array) -> Blocked:
        """Return [B, Sq, Hq, C] as [B, Hq, C, Sq], padded: a block is [C, q]."""
        return self.by_row(padded(jnp.moveaxis(x, 1, 3), 2, channels(x.shape[3]), 0))

    def by_row(self, x: jax.Array) -> Blocked:
        """Return [B, Hq, lines, Sq], padded: a block is [lines, q]."""
        x = padded(x, 3, self.q_blocks * self.sizes.q, 0)
        return Blocked(x, (None, None, x.shape[2], self.sizes.q), lambda at: (at.batch, at.head, 0, at.q))

    def keys(self, x: jax.Array) -> Blocked:
        """Return [B, Sk, Hkv, C] as [B, Hkv, Sk, C], padded: a block is [k, C]."""
        x = padded(jnp.moveaxis(x, 1, 2), 2, self.k_blocks * self.sizes.k, 0)
        x = padded(x, 3, channels(x.shape[3]), 0)
        block = (None, None, self.sizes.k, x.shape[3])
        return Blocked(x, block, lambda at: (at.batch, self.key_head(at), at.k, 0))

    def key_head(self, at: Place) -> jax.Array:
        """Return the key head that the query head of a place reads (S15); not `//`, which compares signs."""
        return lax.div(at.head, jnp.int32(self.group))

    def pairs(self, x: Any) -> Blocked:
        """Cut [B or 1, Hq or 1, Sq or 1, Sk or 1], an array or a full blocks' shape, to [q or 1, k or 1]."""
        per_batch, per_head, per_row, per_key = (size > 1 for size in x.shape)
        if per_key:
            x = padded(x, 3, self.k_blocks * self.sizes.k, 0)
        if per_row:
            x = padded(x, 2, self.q_blocks * self.sizes.q, 0)

        def at_pair(at: Place) -> tuple[Any, ...]:
            row, key = at.q if per_row else 0, at.k if per_key else 0
            return at.batch if per_batch else 0, at.head if per_head else 0, row, key

        block = (self.sizes.q if per_row else 1, self.sizes.k if per_key else 1)
        return Blocked(x, (None, None, *block), at_pair)

    def visibility(self) -> dict[str, Blocked]:
        """Return the operands that decide which pairs are visible, where rows stand, and the bias."""
        call, batched = self.call, self.batched
        operands: dict[str, Blocked] = {}
        if self.tile.rows:
            known = {
                "first": (self.rows.first, call.key.shape[1]),
                "last": (self.rows.last, -1),
                "ids": (call.q_segment_ids, -1),
                "stand": (self.rows.position, 0),
            }
            shape = (call.query.shape[0] if batched else 1, call.query.shape[1])
            length = self.q_blocks * self.sizes.q
            given = [(x, fill) for x, fill in known.values() if x is not None]
            lines = [padded(jnp.broadcast_to(x, shape), 1, length, fill) for x, fill in given]
            operands["rows"] = Blocked(
                jnp.stack(lines, axis=1),
                (None, len(lines), self.sizes.q),
                lambda at: (at.batch if batched else 0, 0, at.q),
            )
        if call.kv_segment_ids is not None:
            ids = padded(call.kv_segment_ids, 1, self.k_blocks * self.sizes.k, -2)
            operands["key_ids"] = Blocked(
                ids[..., None], (None, self.sizes.k, 1), lambda at: (at.batch, at.k, 0)
            )
        if call.attention_mask is not None:
            # One row or column of bytes fills no tile of memory.
            dtype = jnp.float32 if 1 in call.attention_mask.shape[2:] else jnp.int8
            operands["mask"] = self.pairs(call.attention_mask.astype(dtype))
        if call.bias is not None:
            operands["bias"] = self.pairs(call.bias)
        return operands

    def scalars(self, ranges: jax.Array | None) -> dict[str, jax.Array]:
        """Return the operands that are read one number at a time."""
        scalars: dict[str, jax.Array] = {}
        if ranges is not None:
            entries = self.call.query.shape[0] if self.batched else 1
            ends = jnp.broadcast_to(ranges[..., ::3], (entries, ranges.shape[1], 2))
            scalars["ranges"] = ends.reshape(-1)
        if self.call.alibi_slopes is not None:
            scalars["slopes"] = self.call.alibi_slopes.reshape(-1)
        if self.call.dropout_seed is not None:
            origin, shared = self.call.positions.origin, self.call.dropout_shared
            words = dropout_words(self.call.dropout_seed, origin, shared)
            scalars["seed"] = lax.bitcast_convert_type(words, jnp.int32)
        return scalars

    def kept(self) -> dict[str, tuple[int, ...]]:
        """Return the scratch that dropout needs."""
        return {} if self.call.dropout_seed is None else {"kept": kept_scratch(self.tile)}


def cut_call(settings: Settings, asked: Any, kernel: str, call: Call) -> Cut:
    """Cut the call as a kernel, by name, reads it; asked: the block sizes that the caller gives, or None.

    Raises: NotImplementedError for block sizes that a TPU does not take.
    """
    sizes = getattr(asked, kernel.removeprefix("backward_"), asked)
    q_length, k_length = call.query.shape[1], call.key.shape[1]
    if sizes is None:
        dim = max(call.query.shape[3], call.value.shape[3])
        # The blocks of float32 inputs have room for float32 results, too.
        itemsize = settings.result_dtype(call.query.dtype).itemsize
        sizes = choose(kernel, dim, itemsize, q_length, k_length)
    elif not interpreting() and (sizes.q % LANES or sizes.k % LANES):
        raise NotImplementedError(
            f"attest.kernels.pallas.tpu: {sizes} is not supported on a TPU, where blocks are multiples of "
            f"{LANES}."
        )
    rows = describe_rows(call, xp=array_module(call))
    known = {"first": rows.first, "last": rows.last, "ids": call.q_segment_ids, "stand": rows.position}
    arrays = [x for x in known.values() if x is not None]
    slopes = call.alibi_slopes
    tile = Tile(
        q=sizes.q,
        k=sizes.k,
        k_length=None if k_length % sizes.k == 0 else k_length,
        rows=tuple(name for name, x in known.items() if x is not None),
        slope_heads=0 if slopes is None or len(slopes) == 1 else slopes.shape[1],
        scale=call.softmax_scale,
        cap=call.logits_soft_cap,
        logits_dtype=settings.logits_dtype,
        dropout_prob=call.dropout_prob,
        dropout_shared=call.dropout_shared,
        precision=settings.precision if call.query.dtype == jnp.float32 else lax.Precision.DEFAULT,
    )
    batched = call.q_segment_ids is not None or any(x.shape[0] > 1 for x in arrays)
    return Cut(call, sizes, rows, batched, tile)


def channels(dim: int) -> int:
    """Return the padded head dim: Mosaic has no product over a single channel, so 1 becomes 2."""
    return max(dim, 2)
