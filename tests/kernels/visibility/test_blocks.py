"""Block ranges against brute force over pairs: nothing visible is skipped, nothing hidden is called whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from attest.kernels.call.call import check_call
from attest.kernels.visibility.blocks import key_blocks, query_blocks
from attest.kernels.visibility.intervals import array_module, describe_rows
from tests.examples import examples
from tests.kernels.kernel_cases import visible_pairs

# (queries, keys, queries a block, keys a block); few, since JAX compiles for each.
SHAPES = st.sampled_from([(13, 18, 4, 5), (18, 13, 5, 4), (16, 24, 8, 8), (3, 20, 8, 4)])
SIDE = st.none() | st.integers(0, 20)


@st.composite
def _lengths(draw, q_length, k_length, batch):
    """Cumulative lengths of 1 to 3 packed sequences, or of one sequence for each of two batch entries."""
    if batch == 1:
        n = draw(st.integers(1, 3))
        cuts = [
            sorted(draw(st.lists(st.integers(0, x), min_size=n, max_size=n))) for x in (q_length, k_length)
        ]
        q, k = ([0, *cut] for cut in cuts)
    else:
        q, k = (np.cumsum([0, *draw(st.tuples(*[st.integers(0, x)] * 2))]) for x in (q_length, k_length))
    return {"cum_seqlens_q": np.asarray(q, np.int32), "cum_seqlens_k": np.asarray(k, np.int32)}


@st.composite
def _ids(draw, length, batch, contiguous):
    """Segment ids; contiguous ones count 0, 1, 2 without gaps, others are anything, padding too."""
    if contiguous:
        cuts = sorted(draw(st.lists(st.integers(1, length - 1), min_size=2, max_size=2, unique=True)))
        return np.tile(np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32), (batch, 1))
    rows = st.lists(st.integers(-1, 2), min_size=length, max_size=length)
    return np.array([draw(rows) for _ in range(batch)], np.int32)


@st.composite
def _ranges(draw, q_length, k_length, batch):
    """A first key of each row, the end of its keys, or both; some rows see nothing."""
    given = draw(st.sets(st.sampled_from(("kv_start", "kv_end")), min_size=1))
    numbers = st.lists(st.integers(-2, k_length + 2), min_size=q_length, max_size=q_length)
    return {
        name: np.array([draw(numbers) for _ in range(draw(st.sampled_from((1, batch))))])
        for name in sorted(given)
    }


@st.composite
def calls(draw, kind):
    """(call, blocks, visible pairs [N, Sq, Sk]); kind: "intervals", "contiguous" segments, or "any"."""
    q_length, k_length, block_q, block_k = draw(SHAPES)
    batch = draw(st.sampled_from([1, 2]))
    options = {}
    if kind != "contiguous":
        options["causal"] = draw(st.booleans())
        options["sliding_window"] = draw(st.none() | st.tuples(SIDE, SIDE))
        if draw(st.booleans()):
            options["chunk_size"] = draw(st.integers(1, 20))
        if draw(st.booleans()):
            options |= draw(_ranges(q_length, k_length, batch))
        if draw(st.booleans()):
            options |= draw(_lengths(q_length, k_length, batch))
    if kind == "contiguous" or (kind == "any" and draw(st.booleans())):
        options["q_segment_ids"] = draw(_ids(q_length, batch, kind == "contiguous"))
        options["kv_segment_ids"] = draw(_ids(k_length, batch, kind == "contiguous"))
    query, key = (jnp.zeros((batch, length, 1, 1)) for length in (q_length, k_length))
    visible, _ = visible_pairs(query, key, options)
    return check_call(query, key, key, **options), (block_q, block_k), visible[:, 0]


def by_block(view, call, blocks, visible):
    """For each batch entry and block that visits: the four numbers, and the blocks that it may visit, each
    as its visible pairs and whether all of its keys exist."""
    ranges = view(call, describe_rows(call), *blocks)
    if ranges is None:
        assert visible.all()
        return
    own, other = blocks
    if view is query_blocks:
        visible, own, other = visible.transpose(0, 2, 1), other, own
    ranges = np.broadcast_to(ranges, (len(visible), *ranges.shape[1:]))
    for pairs, entry in zip(visible, ranges, strict=True):
        assert len(entry) == -(-pairs.shape[0] // own)
        for i, numbers in enumerate(entry):
            rows = pairs[i * own : (i + 1) * own]
            yield numbers, [rows[:, at : at + other] for at in range(0, pairs.shape[1], other)]


VIEWS = pytest.mark.parametrize("view", [key_blocks, query_blocks])


@VIEWS
@examples(6)
@given(calls("any"))
def test_what_is_visible_is_visited_and_what_is_whole_is_visible(view, drawn):
    call, blocks, visible = drawn
    for (start, full_start, full_stop, stop), tiles in by_block(view, call, blocks, visible):
        assert 0 <= start <= full_start <= full_stop <= stop <= len(tiles)
        for j, tile in enumerate(tiles):
            assert start <= j < stop or not tile.any()
            if full_start <= j < full_stop:
                assert tile.all()
                # A kernel compares no key with the length there; rows past the end it never stores.
                assert view is query_blocks or tile.shape[1] == blocks[1]


@VIEWS
@examples(20)
@given(calls("intervals") | calls("contiguous"))
def test_nothing_more_is_visited(view, drawn):
    """Tight where visibility is an interval of keys a row, and for segments one after another."""
    call, blocks, visible = drawn
    # Rows of several packed sequences in one block see keys with gaps between them, which are visited, too.
    assume(view is key_blocks or call.cum_seqlens_q is None or len(visible) > 1)
    # So do rows with ranges of their own.
    assume(view is key_blocks or (call.kv_start is None and call.kv_end is None))
    for (start, _, _, stop), tiles in by_block(view, call, blocks, visible):
        seen = [j for j, tile in enumerate(tiles) if tile.any()]
        assert (start, stop) == ((seen[0], seen[-1] + 1) if seen else (0, 0))


@given(calls("intervals"))
def test_nothing_that_is_whole_is_compared(drawn):
    call, blocks, visible = drawn
    for (_, full_start, full_stop, _), tiles in by_block(key_blocks, call, blocks, visible):
        whole = [j for j, tile in enumerate(tiles) if tile.all() and tile.shape[1] == blocks[1]]
        assert whole == list(range(full_start, full_stop))


CALLS = (
    {"causal": True},
    {"sliding_window": (5, 2)},
    {"sliding_window": (2**31, 0), "causal": True},
    {"chunk_size": 6},
    {"causal": True, "alibi_slopes": np.ones((1, 1), np.float32)},
)


@pytest.mark.parametrize("options", CALLS, ids=", ".join)
@pytest.mark.parametrize("lengths", [(13, 18), (18, 13)])
def test_numpy_describes_what_no_array_decides(options, lengths):
    """Rows and ranges are those that JAX computes, in int32."""
    query, key = (np.zeros((2, length, 1, 8), np.float32) for length in lengths)
    call = check_call(query, key, key, **options)
    assert array_module(call) is np
    of_numpy, of_jax = describe_rows(call, xp=np), describe_rows(call)
    for view in (key_blocks, query_blocks):
        pairs = jax.tree.leaves((of_numpy, view(call, of_numpy, 4, 5)))
        expected = jax.tree.leaves((of_jax, view(call, of_jax, 4, 5)))
        for got, wanted in zip(pairs, expected, strict=True):
            assert isinstance(got, np.ndarray)
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", ["kv_start", "kv_end"])
def test_jax_describes_what_an_array_decides(name):
    query = np.zeros((2, 8, 1, 8), np.float32)
    call = check_call(query, query, query, causal=True, **{name: np.zeros((1, 8), np.int32)})
    assert array_module(call) is jnp


def test_ranges_are_traced():
    """Lengths are arrays, so the ranges are too."""

    def ranges(lengths):
        query = jnp.zeros((2, 16, 1, 1))
        call = check_call(query, query, query, cum_seqlens_q=lengths, cum_seqlens_k=lengths)
        return key_blocks(call, describe_rows(call), 8, 8)

    got = jax.jit(ranges)(np.array([0, 8, 11], np.int32))
    np.testing.assert_array_equal(got, [[[0, 0, 1, 1], [0, 0, 0, 0]], [[0, 0, 0, 1], [0, 0, 0, 0]]])
