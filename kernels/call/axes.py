"""The axes of each array of a call, as it is given to `attest.flash_attention` with one batch dimension.

b: batch entry. h: query head. g: key head. q: row. k: key. A dot: an axis that is never split over devices,
such as channels, sinks, sequences or the words of a seed.
"""

from collections.abc import Mapping

AXES: Mapping[str, str] = {
    "query": "bqh.",
    "key": "bkg.",
    "value": "bkg.",
    "attention_mask": "bhqk",
    "bias": "bhqk",
    "softmax_aux": "h.",
    "q_segment_ids": "bq",
    "kv_segment_ids": "bk",
    "q_positions": "bq",
    "kv_positions": "bk",
    "q_offset": "b",
    "origin": ".",
    "kv_start": "bq",
    "kv_end": "bq",
    "cum_seqlens_q": ".",
    "cum_seqlens_k": ".",
    "alibi_slopes": "bh",
    "dropout_seed": ".",
}


def behind_batch(name: str) -> int | None:
    """Return how many axes an array has behind its batch dimensions; None where it has no batch."""
    axes = AXES.get(name, "")
    return len(axes) - 1 if axes.startswith("b") else None
