"""How many heads are taken together: as many as the cache holds, in few different numbers."""

from hypothesis import given
from hypothesis import strategies as st

from attest.kernels.visibility.tile_order import L2_BYTES, key_heads_together, query_heads_together

lengths = st.integers(0, 10**6)
groups = st.integers(1, 64)
widths = st.integers(1, 2048)


@given(lengths, groups, widths)
def test_the_keys_of_a_group_fit_the_cache(length: int, group: int, row_bytes: int) -> None:
    heads, rest = divmod(query_heads_together(length, group, row_bytes), group)
    assert rest == 0
    assert heads == 1 or heads * length * row_bytes <= L2_BYTES
    # Twice as many would not fit, and few different numbers are compiled for.
    assert 2 * heads * max(1, length * row_bytes) > L2_BYTES
    assert heads.bit_count() == 1


@given(lengths, groups, widths)
def test_the_queries_of_a_group_fit_the_cache(length: int, group: int, row_bytes: int) -> None:
    heads = key_heads_together(length, group, row_bytes)
    assert heads == query_heads_together(length * group, 1, row_bytes)
