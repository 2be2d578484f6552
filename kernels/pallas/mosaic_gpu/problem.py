"""Decides what of a call the Hopper kernel is specialised to: what is static, and what follows from it."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from kernels.arguments import Call
from kernels.pallas.mosaic_gpu.blocks import Blocks
from kernels.visibility import Rows

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Problem:
    """One launch. S, the product of query and key, becomes u; u * unit is the logit in bits.

    causal: whether causal order alone decides what a row sees; else first, last and segments say which arrays
    do, and by_batch whether those have an entry for each batch row. mask, bias: None without; else which of
    their axes before the last have more than one entry.
    """

    batch: int
    heads: int
    group: int  # query heads that share a key head
    q_length: int
    k_length: int
    head_dim: int
    dtype: Any
    scale: float
    cap: float | None
    causal: bool
    first: bool
    last: bool
    segments: bool
    by_batch: bool
    mask: tuple[bool, ...] | None
    bias: tuple[bool, ...] | None
    sinks: bool
    blocks: Blocks

    @property
    def unit(self) -> float:
        """Bits of a unit of u: with a cap u is the tanh, else the logit, or the bare product."""
        if self.cap is not None:
            return self.cap * LOG2E
        return LOG2E if self._scales_first else self.scale * LOG2E

    @property
    def factor(self) -> float:
        """What S is multiplied by before anything else; 1 where the scale waits for the exponent."""
        return self.scale if self._scales_first or self.cap is not None else 1.0

    @property
    def _scales_first(self) -> bool:
        """The scale waits where nothing comes between, and where it keeps the order of logits."""
        return self.bias is not None or self.scale <= 0

    @property
    def described(self) -> bool:
        """Whether arrays say which key blocks a block of rows visits, and not causal order."""
        return self.first or self.last or self.segments

    @property
    def pairwise(self) -> bool:
        """Whether every block must be compared, pair by pair."""
        return self.mask is not None or self.bias is not None

    @property
    def ragged(self) -> bool:
        """Whether the last block of keys goes past their end."""
        return self.k_length % self.blocks.k != 0

    @property
    def hides(self) -> bool:
        """Whether some pair of a visited block may be hidden."""
        return self.causal or self.described or self.pairwise or self.ragged

    @property
    def q_blocks(self) -> int:
        return -(-self.q_length // self.blocks.q)

    @property
    def k_blocks(self) -> int:
        return -(-self.k_length // self.blocks.k)

    @property
    def tiles(self) -> int:
        return self.batch * self.heads * self.q_blocks

    @property
    def programs(self) -> int:
        return self.tiles if self.blocks.programs is None else min(self.blocks.programs, self.tiles)


def is_plain(call: Call) -> bool:
    """Whether every row sees every key and nothing comes between product and softmax, as `choose` asks."""
    arrays = (call.attention_mask, call.bias, call.q_segment_ids, call.cum_seqlens_q, call.logits_soft_cap)
    return not call.causal and call.sliding_window == (None, None) and all(x is None for x in arrays)


def describe(call: Call, rows: Rows, blocks: Blocks) -> Problem:
    """The problem of a call whose rows are as `kernels.visibility.describe_rows` says."""
    alone = call.causal and rows.padding is None and call.sliding_window == (None, None)
    first, last = (None, None) if alone else (rows.first, rows.last)
    segments = call.q_segment_ids is not None
    batch, q_length, heads, head_dim = call.query.shape
    return Problem(
        batch=batch,
        heads=heads,
        group=heads // call.key.shape[2],
        q_length=q_length,
        k_length=call.key.shape[1],
        head_dim=head_dim,
        dtype=call.query.dtype,
        scale=call.softmax_scale,
        cap=call.logits_soft_cap,
        causal=alone,
        first=first is not None,
        last=last is not None,
        segments=segments,
        by_batch=segments or any(x is not None and x.shape[0] > 1 for x in (first, last)),
        mask=_axes(call.attention_mask),
        bias=_axes(call.bias),
        sinks=call.softmax_aux is not None,
        blocks=blocks,
    )


def _axes(x: jax.Array | None) -> tuple[bool, ...] | None:
    return None if x is None else tuple(size > 1 for size in x.shape[:3])
