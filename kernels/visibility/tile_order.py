"""The number of heads that a kernel takes together where its tiles differ in length, as in causal order.

Long tiles come first, so that short ones fill the gaps at the end. The operands of all heads together may be
more than the L2 cache holds, so heads are taken in groups that fit it, as in FlashAttention-3 (Shah and
others, arXiv 2407.08608). With few heads, a group may have too few tiles: the long ones of the last
group would start late, and most programs would wait for them.
"""

# What the L2 cache of a GPU holds beside what else passes through it: an H100 has 50 MB, an A100 40 MB.
L2_BYTES = 32 * 2**20
# The tiles of a group: one and a half for each multiprocessor of an H100. The last program then ends at most
# 6 % later than with the best number of heads together, for up to 96 heads of 4 to 256 tiles.
_LEAST_TILES = 1.5 * 132


def query_heads_together(k_length: int, group: int, row_bytes: int) -> int:
    """Return how many query heads a kernel takes together whose tiles are blocks of queries.

    k_length: the keys that a head reads. group: the query heads that read one key head. row_bytes: of a key
    and its value.
    """
    return _together(k_length * row_bytes) * group


def key_heads_together(q_length: int, group: int, row_bytes: int) -> int:
    """Return how many key heads a kernel takes together whose tiles are blocks of keys.

    q_length: the queries of a query head. group: the query heads that read one key head. row_bytes: of a
    query and its cotangent of out.
    """
    return _together(q_length * group * row_bytes)


def balanced_heads_together(together: int, heads: int, blocks: int) -> int:
    """Return how many heads a kernel takes together so that its programs end at about the same time.

    together: the least number, a power of two. heads: the number of heads in all batch entries. blocks: the
    tiles of a head. Each group, the last one included, has enough tiles for all multiprocessors, unless there
    is only one group.
    """
    enough = _LEAST_TILES / max(1, blocks)
    while together < heads and (together < enough or 0 < heads % together < enough):
        together *= 2
    return together


def _together(size: int) -> int:
    """Return the largest power of two of such sizes, so that calls of many lengths share one kernel."""
    return 1 << (max(1, L2_BYTES // max(1, size)).bit_length() - 1)
