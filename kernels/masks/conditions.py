"""The fields of a MaskInfo: the conditions under which a pair of query row and key is visible."""

from dataclasses import dataclass, field
from typing import Any

from attest.kernels.annotations import PerEntry, PerKey, PerRow, PerSequence, StoredCumSeqlens, Visible
from attest.kernels.call.call import Window

_STATIC: dict[str, Any] = {"static": True}


# Arrays do not compare to one bool, so two of these are equal only where they are one object.
@dataclass(frozen=True, eq=False)
class Conditions:
    """The conditions of a MaskInfo, as its conversions read them; a pair must meet every one (S5)."""

    attention_mask: Visible | None = None  # [B or 1, Hq or 1, Sq or 1, Sk or 1] bool, True is visible
    q_segment_ids: PerRow | None = None  # [B or 1, Sq] int32
    kv_segment_ids: PerKey | None = None  # [B or 1, Sk] int32
    q_positions: PerRow | None = None  # [B or 1, Sq] int32
    kv_positions: PerKey | None = None  # [B or 1, Sk] int32
    q_offset: PerSequence | None = None  # [1], [B] or one for each sequence, int32; excludes q_positions
    cum_seqlens_q: StoredCumSeqlens | None = None  # [n + 1] int32
    cum_seqlens_k: StoredCumSeqlens | None = None  # [n + 1] int32
    kv_lengths: PerEntry | None = None  # [B or 1] int32
    kv_start: PerRow | None = None  # [B or 1, Sq] int32
    kv_end: PerRow | None = None  # [B or 1, Sq] int32
    causal: bool = field(default=False, metadata=_STATIC)
    sliding_window: Window = field(default=(None, None), metadata=_STATIC)
    chunk_sizes: tuple[int, ...] = field(default=(), metadata=_STATIC)
    packed: bool = field(default=True, metadata=_STATIC)  # whether cum_seqlens are of one batch entry
