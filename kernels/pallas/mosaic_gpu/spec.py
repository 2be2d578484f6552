"""The static properties of a call that the Hopper kernels are specialised to."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from attest.kernels.call.call import Call
from attest.kernels.configs.tunable import key_span
from attest.kernels.implementation import Settings
from attest.kernels.numerics.exponents import LOG2E
from attest.kernels.visibility.intervals import Rows, windowed

# Keys of the blocks that the table has for kernels whose registers have no room for bounds.
_BLOCK = 128
# In a window of up to so many keys, smaller blocks skip more of what it hides.
_NARROW = 256
# A scale below this is not divided by: the quotient could overflow.
_SMALLEST_SCALE = 1e-6
# From here on a scale is multiplied with before anything else: in bits it must be finite.
_LARGEST_SCALE = 2.0**100
# A polynomial takes in a cap up to here: rounding moves the logits of larger ones by whole bits.
_BARE_CAP = 2.0**16
# What a cap's polynomial may take in: its seventh power is far from the ends of float32.
_BARE_SCALES = (1e-4, 1e4)


@dataclass(frozen=True)
class KernelSpec:
    """One launch. S, the product of query and key, becomes u; u * unit is the logit in bits.

    head_dim: of the padded query and key. value_dim: of the padded value. rounded: the dtype that logits are
    rounded to, None for none. exact_reference: whether what logits are relative to is their maximum. causal:
    whether causal order alone decides what a row sees; else first, last and segments say which arrays do, and
    by_batch whether those have an entry for each batch row. alibi: whether heads have slopes; slope_batch:
    whether those of each batch row are others. mask, bias: None without; else which of their four axes have
    more than one entry. bias_dtype: of the bias in memory. q_block, k_block: the queries and keys that a step
    of a program deals with. parts: how many programs share the keys of a row, in the forward kernel. partial:
    whether it returns the sums of each part, as `attest.kernels.few_queries.Partial` has them. unrounded: as
    `attest.kernels.implementation.Settings` says. heads_apart: whether query and out are [B * H, S, 1, D] in
    memory, for the forward kernel. dropout: the probability of dropping a pair; dropout_shared: as `Call` has
    it. packed: of how many query heads the rows of a head are, in the forward kernel.
    """

    batch: int
    heads: int
    group: int  # query heads that share a key head
    q_length: int
    k_length: int
    head_dim: int
    value_dim: int
    dtype: Any
    scale: float
    cap: float | None
    rounded: Any
    normalize: bool
    exact_reference: bool
    causal: bool
    first: bool
    last: bool
    segments: bool
    by_batch: bool
    alibi: bool
    slope_batch: bool
    mask: tuple[bool, ...] | None
    bias: tuple[bool, ...] | None
    sinks: bool
    q_block: int
    k_block: int
    parts: int = 1
    partial: bool = False
    unrounded: bool = False
    bias_dtype: Any = None
    heads_apart: bool = False
    dropout: float = 0.0
    dropout_shared: str = ""
    packed: int = 1

    @property
    def unit(self) -> float:
        """Bits of a unit of u: with a cap u is the tanh, else the logit, or the bare product."""
        if self.cap is not None:
            return self.cap * LOG2E
        return LOG2E if self._scales_first else self.scale * LOG2E

    @property
    def factor(self) -> float:
        """The factor of S before anything else; 1 where the scale waits for exponent or tanh."""
        if self.bare_cap:
            return 1.0
        return self.scale if self._scales_first or self.cap is not None else 1.0

    @property
    def _scales_first(self) -> bool:
        """The scale waits where nothing comes between, and where it keeps the order of logits."""
        between = self.bias is not None or self.alibi or self.rounded is not None
        return between or not 0 < self.scale < _LARGEST_SCALE

    @property
    def folds(self) -> bool:
        """Whether the lse may be subtracted before the product: nothing comes between it and the exponent."""
        return self.cap is None and not self._scales_first and self.scale >= _SMALLEST_SCALE

    @property
    def in_nats(self) -> bool:
        """Whether references and lse are in nats: the lowest biases, in bits, are below all of float32."""
        return self.bias is not None and self.cap is None

    @property
    def reference_unit(self) -> float:
        """Bits of a unit of the references and of the lse."""
        return LOG2E if self.in_nats else 1.0

    @property
    def bare_cap(self) -> bool:
        """Whether the tanh is of S itself, times a scale that its polynomial takes in."""
        between = self.bias is not None or self.alibi or self.rounded is not None
        if self.cap is None or self.cap > _BARE_CAP or between:
            return False
        return _BARE_SCALES[0] <= self.scale / self.cap <= _BARE_SCALES[1]

    @property
    def cap_scale(self) -> float:
        """The argument of a cap's tanh, by what it is given."""
        assert self.cap is not None
        return (self.scale if self.bare_cap else 1.0) / self.cap

    @property
    def uses_ranges(self) -> bool:
        """Whether arrays say which blocks a program visits, and not causal order."""
        return self.first or self.last or self.segments

    @property
    def pairwise(self) -> bool:
        """Whether a mask or bias may hide pairs of every block."""
        return self.mask is not None or self.bias is not None

    @property
    def tiled_pairs(self) -> dict[str, Any]:
        """The dtypes of those of mask and bias that have an entry for each query and key.

        Their tiles come through shared memory.
        """
        dtypes = {"mask": jnp.int8, "bias": self.bias_dtype}
        return {name: dtype for name, dtype in dtypes.items() if all(self.axes_of_pairs(name)[2:])}

    @property
    def d_bias_dtype(self) -> Any:
        """The dtype of the gradient of a bias of every pair, as the kernel stores it."""
        return jnp.dtype(jnp.float32) if self.unrounded else self.bias_dtype

    def axes_of_pairs(self, name: str) -> tuple[bool, ...]:
        """Return which axes of the mask or the bias have more than one entry; none without one."""
        axes = self.mask if name == "mask" else self.bias
        return (False,) * 4 if axes is None else axes

    @property
    def ragged(self) -> bool:
        """Whether the last block of keys goes past their end."""
        return self.k_length % self.k_block != 0

    @property
    def hides(self) -> bool:
        """Whether some pair of a visited block may be hidden, by more than the end of the keys."""
        return self.causal or self.uses_ranges or self.pairwise

    @property
    def key_heads(self) -> int:
        """The number of key heads."""
        return self.heads // self.group

    @property
    def q_blocks(self) -> int:
        """The number of blocks of queries."""
        return -(-self.q_length // self.q_block)

    @property
    def k_blocks(self) -> int:
        """The number of blocks of keys."""
        return -(-self.k_length // self.k_block)

    @property
    def part_blocks(self) -> int:
        """The key blocks of a part, but for the last, which may have fewer."""
        return -(-self.k_blocks // self.parts)

    @property
    def entries(self) -> int:
        """The number of entries of results that have one for each part of each batch row, part by part."""
        return self.parts * self.batch

    @property
    def kept_scale(self) -> float:
        """The factor of the weights of kept pairs."""
        return 1.0 / (1.0 - self.dropout)

    @property
    def result_dtype(self) -> Any:
        """The dtype of out and of the gradients of query, key and value."""
        return jnp.float32 if self.partial or self.unrounded else self.dtype


def work_of(call: Call, few: bool = False) -> frozenset[str]:
    """Return the kinds of work that the table of blocks tells apart.

    "few": few queries, see `attest.kernels.few_queries`. "cap": a soft cap, or ALiBi. "pairs": a mask, a bias
    or ALiBi, which takes the registers of both. "mask_tiles", "bias_tiles": one with an entry for each query
    and key, which takes shared memory, too.
    "ranges": arrays say what a row sees. "bounds": those, causal order, or keys that end within a block.
    "narrow": a window of few keys. "scale": one that is not positive, or very small. "dropout": pairs are
    dropped. "full", "plain_causal": at most causal order, no cap, and a key head for each query head.
    """
    pairs = (call.attention_mask, call.bias, call.alibi_slopes)
    rows = (call.q_segment_ids, call.cum_seqlens_q, call.kv_start, call.kv_end)
    ranges = windowed(call) or any(x is not None for x in rows) or (call.causal and call.positions.given)
    shared = call.query.shape[2] != call.key.shape[2]
    capped = call.logits_soft_cap is not None
    plain = not (ranges or shared or capped or any(x is not None for x in pairs))
    kinds = {
        "few": few,
        "cap": capped or call.alibi_slopes is not None,
        "scale": call.softmax_scale < _SMALLEST_SCALE,
        "pairs": any(x is not None for x in pairs),
        "ranges": ranges,
        "bounds": ranges or call.causal or call.key.shape[1] % _BLOCK != 0,
        "full": plain and not call.causal,
        "plain_causal": plain and call.causal,
        "dropout": call.dropout_seed is not None,
        "narrow": call.sliding_window != (None, None) and key_span(call) <= _NARROW,
    }
    tiles = {f"{name}_tiles" for name in tiled_bytes(call)}
    return frozenset(name for name, found in kinds.items() if found) | tiles


def describe(
    settings: Settings,
    call: Call,
    rows: Rows,
    dims: tuple[int, int],
    q_block: int,
    k_block: int,
) -> KernelSpec:
    """Return the spec of a call whose rows are as `attest.kernels.visibility.intervals.describe_rows` says.

    dims: head_dim and value_dim of the spec. A launch whose results are partial replaces parts and partial.
    """
    placed = rows.padding is not None or call.positions.given
    ranges = call.kv_start is not None or call.kv_end is not None
    alone = call.causal and not (placed or ranges or windowed(call))
    first, last = (None, None) if alone else (rows.first, rows.last)
    segments = call.q_segment_ids is not None
    batch, q_length, heads, _ = call.query.shape
    return KernelSpec(
        batch=batch,
        heads=heads,
        group=heads // call.key.shape[2],
        q_length=q_length,
        k_length=call.key.shape[1],
        head_dim=dims[0],
        value_dim=dims[1],
        dtype=call.query.dtype,
        scale=call.softmax_scale,
        cap=call.logits_soft_cap,
        rounded=None if settings.logits_dtype == "float32" else settings.logits_dtype,
        normalize=settings.normalize_output,
        exact_reference=settings.reads_row_max or not settings.normalize_output,
        causal=alone,
        first=first is not None,
        last=last is not None,
        segments=segments,
        by_batch=segments or any(x is not None and x.shape[0] > 1 for x in (first, last, rows.position)),
        alibi=call.alibi_slopes is not None,
        slope_batch=call.alibi_slopes is not None and call.alibi_slopes.shape[0] > 1,
        mask=_axes(call.attention_mask),
        bias=_axes(call.bias),
        bias_dtype=None if call.bias is None else call.bias.dtype,
        sinks=call.softmax_aux is not None,
        q_block=q_block,
        k_block=k_block,
        unrounded=settings.unrounded,
        dropout=0.0 if call.dropout_seed is None else call.dropout_prob,
        dropout_shared=call.dropout_shared,
    )


def tiled_bytes(call: Call) -> dict[str, int]:
    """Return the bytes of an element of those of mask and bias that have an entry for each query and key."""
    arrays = {"mask": call.attention_mask, "bias": call.bias}
    tiled = {name: x for name, x in arrays.items() if x is not None and min(x.shape[2:]) > 1}
    return {name: 1 if name == "mask" else x.dtype.itemsize for name, x in tiled.items()}


def _axes(x: jax.Array | None) -> tuple[bool, ...] | None:
    return None if x is None else tuple(size > 1 for size in x.shape)
