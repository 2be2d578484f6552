"""MaskInfo: who sees whom in an attention call, as one pytree that keeps structure as structure."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from attest.kernels.annotations import (
    AbstractKey,
    AbstractQuery,
    CumSeqlens,
    Key,
    KVLengths,
    KVPositions,
    KVRange,
    MaskOfAxes,
    PerKey,
    PerRow,
    QOffset,
    QPositions,
    Query,
    SharedKVSegmentIds,
    SharedQSegmentIds,
    Size,
    SlidingWindow,
    Visible,
    VisibleBias,
)
from attest.kernels.call.call import check_window
from attest.kernels.call.options import check_dtype, check_size, refuse
from attest.kernels.masks.as_arguments import flash_attention_arguments
from attest.kernels.masks.checks import (
    check_cumulative,
    check_end,
    check_ids,
    check_kv_lengths,
    check_mask,
    check_places,
)
from attest.kernels.masks.conditions import Conditions
from attest.kernels.masks.segments import hide_keys, segment_ids_of
from attest.kernels.masks.shardings import AxisName, partition_specs
from attest.kernels.masks.sizes import sizes_of
from attest.kernels.masks.visible_pairs import positions_of, visible_pairs


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class MaskInfo(Conditions):
    """The keys that each query row sees: a pair is visible only if every condition permits it (S5).

    A pytree: arrays are leaves, options are static. Build it with `from_attention_mask`, `from_segments` or
    `from_cu_seqlens`, or from `MaskInfo()`, in which everything is visible, and add conditions with the
    methods `apply_*`. These check their arguments; the fields are not checked, since JAX fills them with
    whatever it maps over. Every method returns a new MaskInfo.

    Positions belong to the MaskInfo, not to one condition: causal order, windows and chunks compare them,
    whichever was added first (S23). A token with a negative segment id is padding (S8); 0 is a segment.
    """

    @classmethod
    def from_attention_mask(
        cls,
        attention_mask: MaskOfAxes,
        q_positions: QPositions | None = None,
        kv_positions: KVPositions | None = None,
        *,
        axes: str | None = None,
    ) -> "MaskInfo":
        """Return the MaskInfo of a mask; see `apply_attention_mask` and `with_positions`."""
        return cls().apply_attention_mask(attention_mask, axes=axes).with_positions(q_positions, kv_positions)

    @classmethod
    def from_segments(
        cls,
        q_segment_ids: SharedQSegmentIds,
        kv_segment_ids: SharedKVSegmentIds | None = None,
        q_positions: QPositions | None = None,
        kv_positions: KVPositions | None = None,
    ) -> "MaskInfo":
        """Return the MaskInfo of segment ids; see `apply_segments` and `with_positions`."""
        return cls().apply_segments(q_segment_ids, kv_segment_ids).with_positions(q_positions, kv_positions)

    @classmethod
    def from_cu_seqlens(
        cls,
        cum_seqlens_q: CumSeqlens,
        cum_seqlens_k: CumSeqlens | None = None,
        q_positions: QPositions | None = None,
        kv_positions: KVPositions | None = None,
        *,
        padded: bool = False,
    ) -> "MaskInfo":
        """Return the MaskInfo of n sequences by their cumulative lengths, [n + 1] int32 or int64 (S9).

        The sequences are packed in one batch entry; `padded=True` means n batch entries, each with one
        sequence at its beginning. Without cum_seqlens_k the keys have the lengths of the queries.

        Raises: ValueError naming the argument.
        """
        cum_q, cum_k = check_cumulative(cum_seqlens_q, cum_seqlens_k, padded)
        info = cls(cum_seqlens_q=cum_q, cum_seqlens_k=cum_k, packed=not padded)
        return info.with_positions(q_positions, kv_positions)

    def apply_attention_mask(self, attention_mask: MaskOfAxes, *, axes: str | None = None) -> "MaskInfo":
        """Hide the pairs where a mask is 0 or False.

        attention_mask: bool or integer, of 2 to 4 axes, each of its full size or 1.
        axes: one letter for each axis: b batch, h query heads, q queries, k keys, or t for the tokens of
            self-attention, queries and keys. One of "bhqk", "bqk", "hqk", "qk", "bk", "bt". By default 4
            axes are "bhqk", 3 are "bqk", and 2 are "bt", as in ejKernel: where such a mask is 0 the token is
            padding. It becomes segment ids.

        Raises: ValueError naming the argument.
        """
        mask, of_tokens = check_mask(attention_mask, axes)
        if of_tokens:
            return self._without_tokens(mask)
        if self.attention_mask is not None:
            shapes = self.attention_mask.shape, mask.shape
            if any(1 not in sizes and len(set(sizes)) > 1 for sizes in zip(*shapes, strict=True)):
                expected = f"axes of size 1 or those of the mask that is there, {shapes[0]}"
                refuse("attention_mask", f"shape {shapes[1]}", expected, "Name its axes with axes=.")
            mask = self.attention_mask & mask
        return replace(self, attention_mask=mask)

    def _without_tokens(self, visible: jax.Array) -> "MaskInfo":
        """Return the MaskInfo with hidden tokens [B or 1, S] as padding."""
        q_ids, kv_ids = self.q_segment_ids, self.kv_segment_ids
        if q_ids is None or kv_ids is None:
            q_ids = kv_ids = jnp.zeros((1, visible.shape[1]), jnp.int32)
        lengths = {visible.shape[1], q_ids.shape[1], kv_ids.shape[1]}
        batches = {visible.shape[0], q_ids.shape[0], 1}
        if len(lengths) > 1 or len(batches) > 2:
            refuse(
                "attention_mask",
                f"shape {visible.shape} for tokens",
                f"the batch and the length of the segment ids, {q_ids.shape} and {kv_ids.shape}",
                "axes='bk' is a mask of keys alone.",
            )
        return replace(
            self, q_segment_ids=hide_keys(q_ids, visible), kv_segment_ids=hide_keys(kv_ids, visible)
        )

    def apply_segments(
        self, q_segment_ids: SharedQSegmentIds, kv_segment_ids: SharedKVSegmentIds | None = None
    ) -> "MaskInfo":
        """Hide the pairs of other segments: ids [B or 1, Sq] and [B or 1, Sk], integer (S8).

        A pair is visible where both ids are the same and not negative. A negative id is padding. Without
        kv_segment_ids the keys have the ids of the queries.

        Raises: ValueError naming the argument, also where there are segment ids already.
        """
        if self.q_segment_ids is not None:
            refuse(
                "q_segment_ids",
                "segment ids beside those that are there",
                "one pair of segment ids",
                "Combine them into one, and apply a mask of tokens after it.",
            )
        q_ids, kv_ids = check_ids(q_segment_ids, kv_segment_ids)
        return replace(self, q_segment_ids=q_ids, kv_segment_ids=kv_ids)

    def apply_causal(self) -> "MaskInfo":
        """Hide the keys whose position is after that of the row (S6).

        By default the last row has the position of the last key, in each sequence of cumulative lengths.
        Top-left order, as in ejKernel and jax.nn, is `with_positions(q_offset=0)`.
        """
        return replace(self, causal=True)

    def apply_sliding_window(self, sliding_window: SlidingWindow) -> "MaskInfo":
        """Hide the keys more than `left` positions before the row and more than `right` after it (S7).

        An integer w is (w, w), None leaves a side open and (0, 0) is the row's own position. Of several
        windows the narrowest counts.

        Raises: ValueError naming the argument.
        """
        sides = zip(self.sliding_window, check_window(sliding_window), strict=True)
        left, right = (min((side for side in both if side is not None), default=None) for both in sides)
        return replace(self, sliding_window=(left, right))

    def apply_chunked(self, chunk_size: Size) -> "MaskInfo":
        """Hide the keys outside the row's chunk: positions p and t share floor(p / c) = floor(t / c) (S24).

        Raises: ValueError naming the argument.
        """
        sizes = sorted({*self.chunk_sizes, check_size("chunk_size", chunk_size)})
        # A chunk lies in one chunk of any multiple of its size.
        kept = [size for size in sizes if not any(size % other == 0 for other in sizes if other < size)]
        return replace(self, chunk_sizes=tuple(kept))

    def apply_kv_lengths(self, kv_lengths: KVLengths) -> "MaskInfo":
        """Hide the keys from index kv_lengths[b] on: an integer, or an integer array [B] or [1].

        Positions do not change: for decoding give `with_positions(q_offset=kv_lengths - Sq)`. Of several
        lengths the shortest counts.

        Raises: ValueError naming the argument.
        """
        lengths = check_kv_lengths(kv_lengths)
        if self.kv_lengths is not None:
            sizes = {self.kv_lengths.shape[0], lengths.shape[0]}
            if len(sizes | {1}) > 2:
                expected = f"batch 1 or {self.kv_lengths.shape[0]}, as before"
                refuse("kv_lengths", f"shape {lengths.shape}", expected, "Give one length for each entry.")
            lengths = jnp.minimum(self.kv_lengths, lengths)
        return replace(self, kv_lengths=lengths)

    def apply_kv_ranges(self, kv_start: KVRange | None = None, kv_end: KVRange | None = None) -> "MaskInfo":
        """Hide the keys outside kv_start[b, i] <= j < kv_end[b, i] from row i: [B or 1, Sq], integer (S28).

        j is the index of a key in the array, whatever its position. None leaves a side open. Of several
        ranges the narrowest counts.

        Raises: ValueError naming the argument.
        """
        start = check_end("kv_start", kv_start, self.kv_start)
        end = check_end("kv_end", kv_end, self.kv_end)
        if start is not None and self.kv_start is not None:
            start = jnp.maximum(start, self.kv_start)
        if end is not None and self.kv_end is not None:
            end = jnp.minimum(end, self.kv_end)
        return replace(
            self,
            kv_start=self.kv_start if start is None else start,
            kv_end=self.kv_end if end is None else end,
        )

    def with_positions(
        self,
        q_positions: QPositions | None = None,
        kv_positions: KVPositions | None = None,
        *,
        q_offset: QOffset | None = None,
    ) -> "MaskInfo":
        """Set the positions of rows and keys, in place of those set before; None changes nothing (S23).

        q_positions [B or 1, Sq] and kv_positions [B or 1, Sk], integer, in [-2**30, 2**30). q_offset, an
        integer or one for each batch entry or sequence, puts row i at position i + q_offset.

        Raises: ValueError naming the argument.
        """
        places = check_places(q_positions, kv_positions, q_offset)
        changed: dict[str, Any] = {}
        if q_positions is not None or q_offset is not None:
            changed |= {"q_positions": places.q, "q_offset": places.q_offset}
        if kv_positions is not None:
            changed["kv_positions"] = places.kv
        return replace(self, **changed)

    def get_or_compute_attention_mask(
        self, q_length: int | None = None, kv_length: int | None = None
    ) -> Visible:
        """Return the visible pairs as a mask, bool [B or 1, Hq or 1, Sq, Sk], all conditions included.

        Lengths are needed where no array tells them. An axis of a key or row mask stays 1 where nothing needs
        its length. A mask cannot tell padding from a row that sees no key, which matters to sinks (S11).

        Raises: ValueError where a length is needed, or is not that of the arrays.
        """
        sizes = sizes_of(self, q_length=q_length, kv_length=kv_length)
        visible = visible_pairs(self, sizes)
        if visible is None:
            return jnp.ones((1, 1, sizes.queries(), sizes.keys()), bool)
        lengths = [
            size if known is None else known
            for size, known in zip(visible.shape[2:], (sizes.q_length, sizes.kv_length), strict=True)
        ]
        return jnp.broadcast_to(visible, (*visible.shape[:2], *lengths))

    def get_or_compute_segment_ids(
        self, q_length: int | None = None, kv_length: int | None = None
    ) -> tuple[PerRow, PerKey]:
        """Return segment ids, int32 [B or 1, Sq] and [B or 1, Sk].

        Ids that are stored are returned, whatever conditions there are beside them. Elsewhere the ids make
        exactly the visible pairs. Lengths become ids under jax.jit, too; other conditions need concrete
        arrays, and a mask that is block-diagonal. A row that sees no key gets an id that no key has.

        Raises: ValueError where no ids make the mask, or where it is traced.
        """
        if self.q_segment_ids is not None and self.kv_segment_ids is not None:
            return self.q_segment_ids, self.kv_segment_ids
        return segment_ids_of(self, sizes_of(self, q_length=q_length, kv_length=kv_length))

    def get_or_compute_positions(
        self, q_length: int | None = None, kv_length: int | None = None
    ) -> tuple[PerRow, PerKey]:
        """Return the positions of rows and keys, int32 [B or 1, Sq] and [B or 1, Sk] (S23).

        Those of packed sequences begin at 0 in each, if cumulative lengths tell the sequences; segment ids
        change no position.

        Raises: ValueError where a length is needed, or is not that of the arrays.
        """
        return positions_of(self, sizes_of(self, q_length=q_length, kv_length=kv_length))

    def bias(
        self, q_length: int | None = None, kv_length: int | None = None, *, dtype: Any = "float32"
    ) -> VisibleBias:
        """Return the mask as a bias: 0 where a pair is visible and -inf where it is hidden (S2).

        The shape is that of `get_or_compute_attention_mask`; the dtype one of clause S16.
        """
        visible = self.get_or_compute_attention_mask(q_length, kv_length)
        return jnp.where(visible, 0.0, -math.inf).astype(check_dtype("dtype", dtype))

    def arguments(
        self, query: Query | AbstractQuery, key: Key | AbstractKey, *, alibi: bool = False
    ) -> dict[str, Any]:
        """Return keyword arguments of `attest.flash_attention` that make exactly these pairs visible.

        query and key are the arrays of the call, or their `jax.ShapeDtypeStruct`. Causal order, windows,
        lengths, ranges, segments, positions and the smallest chunk are passed as such; masks of keys, lengths
        beside segments and chunks of keys with positions as segment ids. What is left becomes a mask
        [B or 1, Hq or 1, Sq or 1, Sk or 1]. Padding stays padding. alibi: whether the call has alibi_slopes,
        which read positions where nothing else does (S25).

        Raises: ValueError naming the array whose size is not that of the call.
        """
        return flash_attention_arguments(self, query, key, alibi=alibi)

    def shardings(
        self,
        *,
        batch: AxisName = None,
        heads: AxisName = None,
        q_length: AxisName = None,
        kv_length: AxisName = None,
    ) -> "MaskInfo":
        """Return the PartitionSpecs of the arrays as a MaskInfo, such as `in_specs` of jax.shard_map takes.

        Each argument names the mesh axis or axes over which that axis of the call is split. Axes of size 1
        are not split.

        Raises: ValueError where a shard would not mean its part of the whole, as with cumulative lengths.
        """
        return partition_specs(self, batch, heads, q_length, kv_length)
