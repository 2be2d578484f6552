"""The static properties of a call that the Hopper kernels are specialised to."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax.numpy as jnp

from attest.kernels.call.call import Call
from attest.kernels.configs.tunable import key_span
from attest.kernels.contract import Settings
from attest.kernels.numerics.exponents import LOG2E
from attest.kernels.visibility.intervals import Rows, windowed

# Keys of the blocks that the table has for kernels whose registers have no room for bounds.
_BLOCK = 128
# In a window of up to so many keys, smaller blocks skip more of what it hides.
_NARROW = 256
# To begin and end a tile takes little time beside so many keys.
_MANY = 1024
# A scale below this is not divided by: the quotient could overflow.
_SMALLEST_SCALE = 1e-6
# From here on a scale is multiplied with before anything else: in bits it must be finite.
_LARGEST_SCALE = 2.0**100
# A polynomial takes in a cap up to here: rounding moves the logits of larger ones by whole bits.
_BARE_CAP = 2.0**16
# What a cap's polynomial may take in: its seventh power is far from the ends of float32.
_BARE_SCALES = (1e-4, 1e4)


@dataclass(frozen=True)
class Shape:
    """The sizes of a call, and how the programs of a launch divide them."""

    batch: int
    heads: int  # of the query
    group: int  # query heads that share a key head
    q_length: int
    k_length: int
    head_dim: int  # of tiles of query and key
    value_dim: int  # of tiles of value
    q_block: int  # queries of a step of a program
    k_block: int  # keys of a step of a program
    key_parts: int = 1  # programs that share the keys of a row, in the forward kernel
    packed_heads: int = 1  # query heads whose rows one head holds (PackGQA), in the forward kernel
    head_major: bool = False  # query and out are [B * H, S, 1, D] in memory, in the forward kernel
    pieces: tuple[int, ...] = ()  # widths that both head dims are cut into; () for one

    @property
    def head_pieces(self) -> tuple[int, ...]:
        """The widths of the pieces of tiles of query and key."""
        return self.pieces or (self.head_dim,)

    @property
    def value_pieces(self) -> tuple[int, ...]:
        """The widths of the pieces of tiles of value."""
        return self.pieces or (self.value_dim,)

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
    def padded_q_length(self) -> int:
        """The queries of all blocks."""
        return self.q_blocks * self.q_block

    @property
    def padded_k_length(self) -> int:
        """The keys of all blocks."""
        return self.k_blocks * self.k_block

    @property
    def part_blocks(self) -> int:
        """The key blocks of a part, but for the last, which may have fewer."""
        return -(-self.k_blocks // self.key_parts)

    @property
    def entries(self) -> int:
        """The number of entries of results that have one for each part of each batch row, part by part."""
        return self.key_parts * self.batch

    @property
    def ragged(self) -> bool:
        """Whether the last block of keys goes past their end."""
        return self.k_length % self.k_block != 0


@dataclass(frozen=True)
class PairArray:
    """A mask or a bias in memory: its dtype, and which of its axes are not broadcast."""

    dtype: Any
    by_batch: bool
    by_head: bool
    by_query: bool
    by_key: bool

    @property
    def tiled(self) -> bool:
        """Whether each query and key has an entry: its tiles then come through shared memory."""
        return self.by_query and self.by_key


@dataclass(frozen=True)
class Logits:
    """The logits: S, the product of query and key, becomes u; u * unit is the logit in bits."""

    scale: float
    cap: float | None  # the soft cap, None without
    dtype: Any  # that logits are rounded to, None for no rounding
    bias: PairArray | None = None
    alibi: bool = False  # heads have slopes
    slopes_by_batch: bool = False  # each batch row has slopes of its own
    sinks: bool = False  # heads have sinks
    approximate: bool = False  # the tanh of the cap is the GPU's instruction

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
    def _has_terms(self) -> bool:
        """Whether rounding, a bias or ALiBi come after the scale, so that it cannot wait."""
        return self.bias is not None or self.alibi or self.dtype is not None

    @property
    def _scales_first(self) -> bool:
        """The scale waits where no term comes after it, and where it keeps the order of logits."""
        return self._has_terms or not 0 < self.scale < _LARGEST_SCALE

    @property
    def folds_lse(self) -> bool:
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
        if self.cap is None or self.cap > _BARE_CAP or self._has_terms:
            return False
        return _BARE_SCALES[0] <= self.scale / self.cap <= _BARE_SCALES[1]

    @property
    def cap_scale(self) -> float:
        """The argument of a cap's tanh, by what it is given."""
        assert self.cap is not None
        return (self.scale if self.bare_cap else 1.0) / self.cap


@dataclass(frozen=True)
class Visibility:
    """Which keys a row sees: those of causal order alone, or what arrays say; and a mask."""

    causal: bool  # causal order alone decides, and none of the three arrays
    first: bool  # an array has the first key of each row
    last: bool  # an array has the last key of each row
    segments: bool  # arrays have the segments of queries and keys
    by_batch: bool  # these arrays and the positions have an entry for each batch row
    mask: PairArray | None = None

    @property
    def uses_ranges(self) -> bool:
        """Whether arrays say which blocks a program visits, and not causal order."""
        return self.first or self.last or self.segments


@dataclass(frozen=True)
class Dropout:
    """Dropout of query-key pairs (S12, S29)."""

    prob: float  # of dropping a pair, above 0
    by_batch: bool  # each batch row has a mask of its own
    by_head: bool  # each query head has a mask of its own

    @property
    def kept_scale(self) -> float:
        """The factor of the weights of kept pairs."""
        return 1.0 / (1.0 - self.prob)


@dataclass(frozen=True)
class Results:
    """The results of the kernels."""

    normalize: bool  # out is divided by the sum of its weights
    exact_reference: bool  # weights are relative to the maximum of their row, not to a number close to it
    partial: bool = False  # the forward kernel returns a part's sums, as `numerics.partial.Partial` has them
    unrounded: bool = False  # as `attest.kernels.contract.Settings` has it


@dataclass(frozen=True)
class KernelSpec:
    """Everything about a launch that its kernel is compiled for; equal launches have equal specs."""

    dtype: Any  # of query, key and value
    shape: Shape
    logits: Logits
    visibility: Visibility
    results: Results
    dropout: Dropout | None = None

    @property
    def pair_arrays(self) -> dict[str, PairArray]:
        """The mask and the bias by name, those that there are."""
        arrays = {"mask": self.visibility.mask, "bias": self.logits.bias}
        return {name: x for name, x in arrays.items() if x is not None}

    @property
    def tiled_pairs(self) -> dict[str, PairArray]:
        """Those of mask and bias that have an entry for each query and key."""
        return {name: x for name, x in self.pair_arrays.items() if x.tiled}

    @property
    def pairwise(self) -> bool:
        """Whether a mask or bias may hide pairs of every block."""
        return self.visibility.mask is not None or self.logits.bias is not None

    @property
    def hides(self) -> bool:
        """Whether some pair of a visited block may be hidden, by more than the end of the keys."""
        return self.visibility.causal or self.visibility.uses_ranges or self.pairwise

    @property
    def kept_scale(self) -> float:
        """The factor of the weights of pairs that dropout keeps; 1 without dropout."""
        return 1.0 if self.dropout is None else self.dropout.kept_scale

    @property
    def result_dtype(self) -> Any:
        """The dtype of out and of the gradients of query, key and value."""
        return jnp.float32 if self.results.partial or self.results.unrounded else self.dtype

    @property
    def d_bias_dtype(self) -> Any:
        """The dtype of the gradient of a bias of every pair, as the kernel stores it."""
        assert self.logits.bias is not None
        return jnp.dtype(jnp.float32) if self.results.unrounded else self.logits.bias.dtype

    def with_blocks(self, q_block: int, k_block: int) -> "KernelSpec":
        """Return the spec of a launch whose steps deal with other numbers of queries and keys."""
        return replace(self, shape=replace(self.shape, q_block=q_block, k_block=k_block))

    def in_parts(self, key_parts: int) -> "KernelSpec":
        """Return the spec of the forward launch that returns the sums of so many parts of the keys."""
        return replace(
            self,
            shape=replace(self.shape, key_parts=key_parts),
            results=replace(self.results, partial=True),
        )


def describe(
    settings: Settings, call: Call, rows: Rows, dims: tuple[int, int], q_block: int, k_block: int
) -> KernelSpec:
    """Return the spec of a call whose rows are as `attest.kernels.visibility.intervals.describe_rows` says.

    dims: head_dim and value_dim of the spec.
    """
    return KernelSpec(
        dtype=call.query.dtype,
        shape=_shape(call, dims, q_block, k_block),
        logits=_logits(settings, call),
        visibility=_visibility(call, rows),
        results=Results(
            normalize=settings.normalize_output,
            exact_reference=settings.reads_row_max or not settings.normalize_output,
            unrounded=settings.unrounded,
        ),
        dropout=None if call.dropout_seed is None else _dropout(call.dropout_prob, call.dropout_shared),
    )


def _shape(call: Call, dims: tuple[int, int], q_block: int, k_block: int) -> Shape:
    batch, q_length, heads, _ = call.query.shape
    k_length, k_heads = call.key.shape[1:3]
    return Shape(batch, heads, heads // k_heads, q_length, k_length, *dims, q_block, k_block)


def _logits(settings: Settings, call: Call) -> Logits:
    slopes = call.alibi_slopes
    return Logits(
        scale=call.softmax_scale,
        cap=call.logits_soft_cap,
        dtype=None if settings.logits_dtype == "float32" else settings.logits_dtype,
        bias=None if call.bias is None else _pair_array(call.bias.shape, call.bias.dtype),
        alibi=slopes is not None,
        slopes_by_batch=slopes is not None and slopes.shape[0] > 1,
        sinks=call.softmax_aux is not None,
        approximate=call.logits_soft_cap is not None and bool(settings.precision),
    )


def _visibility(call: Call, rows: Rows) -> Visibility:
    placed = rows.padding is not None or call.positions.given
    ranges = call.kv_start is not None or call.kv_end is not None
    alone = call.causal and not (placed or ranges or windowed(call))
    first, last = (None, None) if alone else (rows.first, rows.last)
    segments = call.q_segment_ids is not None
    return Visibility(
        causal=alone,
        first=first is not None,
        last=last is not None,
        segments=segments,
        by_batch=segments or any(x is not None and x.shape[0] > 1 for x in (first, last, rows.position)),
        mask=None if call.attention_mask is None else _pair_array(call.attention_mask.shape, jnp.int8),
    )


@lru_cache(maxsize=256)
def _pair_array(shape: tuple[int, ...], dtype: Any) -> PairArray:
    batch, heads, q_length, k_length = shape
    return PairArray(dtype, batch > 1, heads > 1, q_length > 1, k_length > 1)


@lru_cache(maxsize=256)
def _dropout(prob: float, shared: str) -> Dropout:
    return Dropout(prob, by_batch="b" not in shared, by_head="h" not in shared)


def work_of(call: Call, few: bool = False) -> frozenset[str]:
    """Return the kinds of work that the table of blocks tells apart.

    "few": few queries, see `attest.kernels.few_queries`. "cap": a soft cap, or ALiBi. "pairs": a mask, a bias
    or ALiBi, which takes the registers of both. "mask_tiles", "bias_tiles": one with an entry for each query
    and key, which takes shared memory, too.
    "ranges": arrays say what a row sees. "causal": causal order alone does. "bounds": one of these, or keys
    that end within a block.
    "narrow": a window of few keys. "scale": one that is not positive, or very small. "dropout": pairs are
    dropped. "full", "plain_causal": at most causal order, and no cap.
    "many_keys": so many that beginning and ending a tile takes little time beside them.
    """
    pairs = (call.attention_mask, call.bias, call.alibi_slopes)
    rows = (call.q_segment_ids, call.cum_seqlens_q, call.kv_start, call.kv_end)
    ranges = windowed(call) or any(x is not None for x in rows) or (call.causal and call.positions.given)
    capped = call.logits_soft_cap is not None
    plain = not (ranges or capped or any(x is not None for x in pairs))
    kinds = {
        "few": few,
        "cap": capped or call.alibi_slopes is not None,
        "scale": call.softmax_scale < _SMALLEST_SCALE,
        "pairs": any(x is not None for x in pairs),
        "ranges": ranges,
        "causal": call.causal and not ranges,
        "bounds": ranges or call.causal or call.key.shape[1] % _BLOCK != 0,
        "full": plain and not call.causal,
        "plain_causal": plain and call.causal,
        "many_keys": call.key.shape[1] >= _MANY,
        "dropout": call.dropout_seed is not None,
        "narrow": call.sliding_window != (None, None) and key_span(call) <= _NARROW,
    }
    tiles = {f"{name}_tiles" for name in tiled_bytes(call)}
    return frozenset(name for name, found in kinds.items() if found) | tiles


def tiled_bytes(call: Call) -> dict[str, int]:
    """Return the bytes of an element of those of mask and bias that have an entry for each query and key."""
    arrays = {"mask": call.attention_mask, "bias": call.bias}
    tiled = {name: x for name, x in arrays.items() if x is not None and min(x.shape[2:]) > 1}
    return {name: 1 if name == "mask" else x.dtype.itemsize for name, x in tiled.items()}
