"""The oracle reads nothing that no visible pair reads, and a sample is part of the whole."""

import os
import tracemalloc
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.reference import rows
from attest.reference.oracle import Answer, Cotangents, Sample, attention
from attest.reference.semantics import STANDARD, Semantics
from tests.examples import examples
from tests.reference.answers import (
    answer_of,
    assert_agrees,
    assert_equal,
    simple,
)
from tests.reference.second_pairs import is_padding, visible
from tests.reference.strategies import Drawn, drawn_problems


class TestPoison:
    @examples(60)
    @given(drawn=drawn_problems(), poison=st.sampled_from((np.nan, np.inf, -np.inf)))
    def test_hidden_values_never_matter(self, drawn: Drawn, poison: float) -> None:
        """S4: whatever is stored where no visible pair reads; the second opinion does not even look there."""
        poisoned = _fill_hidden(drawn, poison)
        assert_agrees(poisoned)
        answer, clean = answer_of(poisoned), answer_of(_fill_hidden(drawn, 0.0))
        for name, array in answer.items().items():
            np.testing.assert_array_equal(np.isfinite(array), np.isfinite(clean.items()[name]), err_msg=name)

    def test_by_hand(self) -> None:
        mask = np.ones((1, 2, 4, 5), np.bool_)
        mask[..., 3] = False
        mask[:, :, 2] = False
        drawn = simple(4, 5, attention_mask=mask, bias=np.ones((1, 2, 4, 5), np.float32), logits_soft_cap=2.0)
        poisoned = _fill_hidden(drawn, np.nan)
        for name, index in (
            ("key", (0, 3)),
            ("value", (0, 3)),
            ("query", (0, 2)),
            ("bias", (0, slice(None), 2)),
            ("bias", (..., 3)),
        ):
            assert np.isnan(getattr(poisoned.problem, name)[index]).all(), name
        assert np.isnan(poisoned.d_out[0, 2]).all()
        assert_equal(answer_of(poisoned), answer_of(drawn), 1e-14)

    def test_a_sentinel_leaks(self) -> None:
        """A kernel that only replaces logits multiplies what is hidden by 0, and says so in its dialect."""
        mask = np.array([[[[True, False]]]])
        drawn = simple(1, 2, heads=1, attention_mask=mask)
        value = drawn.problem.value.copy()
        value[0, 1] = np.nan
        problem = replace(drawn.problem, value=value)
        leaky = Semantics(hidden="sentinel", sentinel=-1e9)
        assert np.isnan(attention(problem, leaky).out).all()
        assert np.isfinite(attention(problem, STANDARD).out).all()

    def test_no_sentinel_leaks_into_or_out_of_padding(self) -> None:
        drawn = simple(2, 2, cum_seqlens_q=np.int32([0, 1]), cum_seqlens_k=np.int32([0, 2]))
        drawn = replace(drawn, semantics=Semantics(hidden="sentinel", sentinel=-1.0))
        poisoned = replace(drawn, d_out=drawn.d_out.copy())
        poisoned.d_out[:, 1] = np.nan
        assert_equal(answer_of(poisoned), answer_of(drawn))
        value = drawn.problem.value.copy()
        value[0, 0] = np.inf
        out = attention(replace(drawn.problem, value=value), drawn.semantics).out
        assert np.isinf(out[:, 0]).all()
        assert (out[:, 1] == 0).all()


def _fill_hidden(drawn: Drawn, filling: float) -> Drawn:
    """Store `filling` wherever no visible pair reads it."""
    problem = drawn.problem
    batch, q_len, heads, _ = problem.query.shape
    kv_len, kv_heads = problem.key.shape[1:3]
    sees = np.zeros((batch, heads, q_len, kv_len), np.bool_)
    for index in np.ndindex(sees.shape):
        sees[index] = visible(problem, drawn.semantics, *index)
    seen_keys = sees.any(axis=2).reshape(batch, kv_heads, heads // kv_heads, kv_len).any(axis=2)
    seeing_rows = sees.any(axis=3)
    query, key, value = problem.query.copy(), problem.key.copy(), problem.value.copy()
    d_out = drawn.d_out.copy()
    d_lse = None if drawn.d_lse is None else drawn.d_lse.copy()
    query[~seeing_rows.transpose(0, 2, 1)] = filling
    d_out[~seeing_rows.transpose(0, 2, 1)] = filling
    for array in (key, value):
        array[~seen_keys.transpose(0, 2, 1)] = filling
    if d_lse is not None:
        for b, h, i in np.argwhere(~seeing_rows):
            if problem.softmax_aux is None or is_padding(problem, drawn.semantics, b, i):
                d_lse[b, h, i] = filling
    bias = problem.bias
    if bias is not None:
        bias, read = bias.copy(), np.zeros(bias.shape, np.bool_)
        for index in np.argwhere(sees):
            read[tuple(0 if size == 1 else i for i, size in zip(index, bias.shape, strict=True))] = True
        # What a bias of -inf hides is hidden by the bias itself.
        bias[~read & ~np.isneginf(bias)] = filling
    problem = replace(problem, query=query, key=key, value=value, bias=bias)
    return replace(drawn, problem=problem, d_out=d_out, d_lse=d_lse)


class TestSampling:
    @examples(50)
    @given(drawn=drawn_problems(dialects=True), data=st.data())
    def test_sampled_is_part_of_the_whole(self, drawn: Drawn, data: st.DataObject) -> None:
        problem = drawn.problem
        chosen = []
        for length in (problem.q_len, problem.kv_len):
            indices = st.lists(st.integers(0, length - 1), max_size=4) if length else st.just([])
            chosen.append(np.array(data.draw(indices), np.int64))
        whole, part = answer_of(drawn), answer_of(drawn, Sample(*chosen))
        assert part.dbias is None
        assert part.dsoftmax_aux is None
        picked = {
            "out": whole.out[:, chosen[0]],
            "lse": whole.lse[..., chosen[0]],
            "dquery": None if whole.dquery is None else whole.dquery[:, chosen[0]],
            "dkey": None if whole.dkey is None else whole.dkey[:, chosen[1]],
            "dvalue": None if whole.dvalue is None else whole.dvalue[:, chosen[1]],
        }
        assert_equal(part, Answer(**picked), 1e-13)  # type: ignore[arg-type]

    def test_forward_only(self) -> None:
        drawn = simple(5, 6)
        part = attention(drawn.problem, sample=Sample(np.array([4, 1]), np.array([0])))
        np.testing.assert_allclose(part.out, attention(drawn.problem).out[:, [4, 1]], rtol=1e-14)
        assert part.items().keys() == {"out", "lse"}

    @pytest.mark.parametrize("elements", [1, 14, 21])
    @pytest.mark.parametrize("seed", range(3))
    def test_blocks_of_rows_change_nothing(
        self, monkeypatch: pytest.MonkeyPatch, elements: int, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        drawn = simple(
            8,
            7,
            batch=2,
            heads=4,
            kv_heads=2,
            causal=True,
            bias=rng.standard_normal((1, 4, 1, 7)).astype(np.float32),
            softmax_aux=np.float32([0.3]),
            dropout_prob=0.3,
            dropout_seed=5,
        )
        whole = answer_of(drawn)
        monkeypatch.setattr(rows, "_BLOCK_ELEMENTS", elements)
        sizes = {len(block.rows) for block in rows.row_blocks(drawn.problem, STANDARD)}
        assert max(sizes) == max(1, elements // 7)
        assert_equal(answer_of(drawn), whole, 1e-14)

    def test_memory_is_a_block_of_rows_times_the_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """16 live rows of 16384: far less than the 2 GiB that all weights of one head would take."""
        length, live = 16384, np.arange(0, 16384, 1024)
        drawn = simple(length, length, heads=1, dims=(16, 16), causal=True)
        d_out = np.zeros_like(drawn.d_out)
        d_out[:, live] = drawn.d_out[:, live]
        monkeypatch.setattr(rows, "_BLOCK_ELEMENTS", 4 * length)
        tracemalloc.start()
        try:
            sampled = attention(drawn.problem, STANDARD, Cotangents(d_out), Sample(live, live))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert np.isfinite(sampled.out).all()
        assert peak < 80 * 4 * length * 8

    @pytest.mark.skipif("ATTEST_SLOW" not in os.environ, reason="ten seconds and a gigabyte; set ATTEST_SLOW")
    def test_production_size(self) -> None:
        length = 131072
        chosen = np.sort(np.random.default_rng(0).choice(length, 64, replace=False))
        drawn = simple(length, length, heads=1, dims=(128, 128), dtype=ml_dtypes.bfloat16, causal=True)
        d_out = np.zeros_like(drawn.d_out)
        d_out[:, chosen] = drawn.d_out[:, chosen]
        sampled = attention(drawn.problem, STANDARD, Cotangents(d_out), Sample(chosen, chosen))
        for array in sampled.items().values():
            assert np.isfinite(array).all()

    def test_heads_can_be_chosen(self) -> None:
        drawn = simple(heads=4, kv_heads=2, batch=2)
        blocks = list(rows.row_blocks(drawn.problem, STANDARD, heads=np.array([3, 1])))
        assert [(block.batch, block.head, block.kv_head) for block in blocks] == [
            (0, 1, 0),
            (0, 3, 1),
            (1, 1, 0),
            (1, 3, 1),
        ]
