"""The axes of masks and biases in cases: which of batch, heads, queries and keys an array has of its own."""

MASK_AXES = ("11", "1h", "b1", "bh")
BIAS_AXES = ("111", "11q", "1h1", "1hq", "b11", "b1q", "bh1", "bhq")
# The same with the axes of queries and keys, one of them or both shared.
BROADCAST_MASK_AXES = ("b11k", "111k", "bh1k", "1h1k", "b1q1", "bhq1", "11q1")
BROADCAST_BIAS_AXES = ("b1q1", "bhq1", "11q1", "1hq1", "bh11", "1111")
MASKS = (*MASK_AXES, *BROADCAST_MASK_AXES)
BIASES = (*BIAS_AXES, *BROADCAST_BIAS_AXES)


def own_axes(axes: str) -> tuple[bool, bool, bool, bool]:
    """Return which of batch, heads, queries and keys a mask or bias has of its own, from its field."""
    batch, heads, queries, keys = (axis != "1" for axis in axes + "bhqk"[len(axes) :])
    return batch, heads, queries, keys


def has_pattern(pattern: str, axes: str) -> bool:
    """Return whether a mask or bias of these axes can hide a third of the rows, or of the keys."""
    _, _, queries, keys = own_axes(axes)
    if pattern in ("rows", "lowest rows"):
        return queries
    return keys or pattern not in ("first", "middle", "last", "lowest")
