"""S1 to S16: the oracle against 50 digits, and against itself where it takes another way.

Agreement is 1e-13 on out and lse and 1e-12 on gradients, relative to the gauge of each element (see
second_opinion.py): the sum of the magnitudes of what was summed. It is not relaxed by the size of the
logits, which reach +-1e4 and more.
"""

import os
import tracemalloc
from dataclasses import fields, replace
from decimal import Decimal, localcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mpf

from attest.reference import rows
from attest.reference.oracle import Answer, Cotangents, Sample, attention
from attest.reference.problem import Problem, make_problem
from attest.reference.semantics import STANDARD, Semantics
from tests.reference.second_opinion import (
    INPUTS,
    Place,
    is_padding,
    objective,
    second_opinion,
    visible,
    worst_error,
)
from tests.reference.strategies import DIALECTS, Drawn, drawn_problems

TOLERANCE = {"out": 1e-13, "lse": 1e-13} | dict.fromkeys(("d" + name for name in INPUTS), 1e-12)
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def examples(number: int) -> settings:
    """So many examples in CI, twenty times as many at night."""
    return settings(max_examples=20 * number if NIGHTLY else number)


def assert_agrees(drawn: Drawn) -> None:
    answer = attention(drawn.problem, drawn.semantics, Cotangents(drawn.d_out, drawn.d_lse))
    opinion = second_opinion(drawn.problem, drawn.semantics, drawn.d_out, drawn.d_lse)
    assert answer.items().keys() == opinion.values.keys()
    for name, array in answer.items().items():
        error = worst_error(array, opinion, name)
        assert error <= TOLERANCE[name], f"{name}: {error:.2e} of the gauge"


def assert_equal(got: Answer, want: Answer, tolerance: float = 0.0) -> None:
    """Every array alike, within a fraction of the largest element."""
    assert got.items().keys() == want.items().keys()
    for name, array in want.items().items():
        finite = array[np.isfinite(array)]
        atol = tolerance * np.max(np.abs(finite), initial=1.0)
        np.testing.assert_allclose(got.items()[name], array, rtol=0, atol=atol, err_msg=name)


def simple(
    q_len: int = 3,
    kv_len: int = 4,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    dims: tuple[int, int] = (4, 3),
    dtype: object = np.float32,
    amplitude: float = 1.0,
    seed: int = 0,
    **options: object,
) -> Drawn:
    """A problem of normal numbers with cotangents, by the standard."""
    rng = np.random.default_rng(seed)
    query, key, value, d_out = (
        rng.standard_normal(shape)
        for shape in (
            (batch, q_len, heads, dims[0]),
            (batch, kv_len, kv_heads, dims[0]),
            (batch, kv_len, kv_heads, dims[1]),
            (batch, q_len, heads, dims[1]),
        )
    )
    query, key = query * amplitude, key * amplitude
    problem = make_problem(query.astype(dtype), key.astype(dtype), value.astype(dtype), **options)
    d_lse = rng.standard_normal((batch, heads, q_len)).astype(np.float32)
    return Drawn(problem, STANDARD, d_out.astype(dtype), d_lse)


def answer_of(drawn: Drawn, sample: Sample | None = None) -> Answer:
    return attention(drawn.problem, drawn.semantics, Cotangents(drawn.d_out, drawn.d_lse), sample)


class TestSecondOpinion:
    @examples(300)
    @given(drawn_problems())
    def test_standard(self, drawn: Drawn) -> None:
        assert_agrees(drawn)

    @examples(500)
    @given(drawn_problems(dialects=True))
    def test_dialects(self, drawn: Drawn) -> None:
        assert_agrees(drawn)

    @pytest.mark.parametrize("name", sorted(DIALECTS))
    def test_each_dialect_changes_something(self, name: str) -> None:
        """On a problem with all its features, each dialect gives an answer of its own, and the right one."""
        rng = np.random.default_rng(1)
        mask = rng.random((1, 2, 6, 9)) < 0.8
        mask[:, :, 2], mask[:, :, 3] = True, False
        bias = rng.standard_normal((1, 2, 6, 9)).astype(np.float32)
        everything = name == "ignored_arguments"
        segments = everything or name == "segments"
        window = (2, 3) if everything else (0, 3) if name.startswith("window") else None
        drawn = simple(
            6,
            9,
            dtype=ml_dtypes.bfloat16,
            attention_mask=mask,
            bias=bias,
            causal=everything or name in ("causal", "precedence"),
            sliding_window=window,
            logits_soft_cap=2.0,
            dropout_prob=0.5 if everything or name == "dropout" else 0.0,
            dropout_seed=11,
            q_segment_ids=np.array([[-1, -1, 0, 0, 1, 1]]) if segments else None,
            kv_segment_ids=np.array([[-1, 0, 0, 0, 0, 0, 0, 1, 1]]) if segments else None,
            cum_seqlens_q=np.int32([0, 5]) if everything else None,
            cum_seqlens_k=np.int32([0, 8]) if everything else None,
            normalize_output=not (everything or name == "row_max_gradient"),
            q_offset=1 if everything else None,
            origin=(1, 2, 3, 5) if everything else None,
            softmax_aux=None if name in ("hidden", "empty_rows") else np.array([0.5, 3.0], np.float32),
        )
        standard = answer_of(drawn)
        for choice in DIALECTS[name][0]:
            extra = {"hidden": {"sentinel": -2.0}, "dropout": {"dropout_chunk": 3}}.get(name, {})
            dialect = replace(drawn, semantics=replace(STANDARD, **{name: choice}, **extra))
            assert_agrees(dialect)
            same = all(
                np.array_equal(standard.items()[key], array, equal_nan=True)
                for key, array in answer_of(dialect).items().items()
            )
            # How far a kernel repeats itself, which gradients it has, and what leaks are not in the arrays.
            unseen = ("deterministic", "gradients", "hidden_nonfinite")
            assert same == (name in unseen or choice == "unspecified")

    def test_every_choice_of_the_dialects_is_drawn(self) -> None:
        derived = {"sentinel", "dropout_chunk"}
        assert {field.name for field in fields(Semantics)} - derived == set(DIALECTS)


class TestDifferences:
    """Central differences at 50 digits, h = 1e-20: no chain rule at all, an error below 1e-18.

    Of logits of 1e9 and beyond, which only sentinels reach, the differences would cancel; of NaN too.
    """

    STEP = mpf("1e-20")

    def difference(self, drawn: Drawn, place: Place) -> mpf:
        """d objective / d input at one place, row maxima held constant unless they are differentiated."""
        maxima = second_opinion(drawn.problem, drawn.semantics).maxima
        d_lse = None if drawn.d_lse is None else drawn.d_lse.copy()
        # Sentinels give the lse of padding a value, and it is a constant all the same.
        for batch, row in np.ndindex(drawn.problem.query.shape[:2]):
            if d_lse is not None and is_padding(drawn.problem, drawn.semantics, batch, row):
                d_lse[batch, :, row] = 0.0
        stored = mpf(float(getattr(drawn.problem, place[0])[place[1]]))
        ends = [
            objective(
                second_opinion(
                    drawn.problem, drawn.semantics, moved={place: stored + sign * self.STEP}, maxima=maxima
                ),
                drawn.semantics,
                drawn.d_out,
                d_lse,
            )
            for sign in (1, -1)
        ]
        return (ends[0] - ends[1]) / (2 * self.STEP)

    def assert_differentiates(self, drawn: Drawn, name: str, index: tuple[int, ...]) -> None:
        got = getattr(answer_of(drawn), "d" + name)[index]
        opinion = second_opinion(drawn.problem, drawn.semantics, drawn.d_out, drawn.d_lse)
        want, gauge = self.difference(drawn, (name, index)), opinion.gauges["d" + name][index]
        assert abs(mpf(float(got)) - want) <= mpf("1e-12") * gauge + mpf("1e-18")
        assert abs(opinion.values["d" + name][index] - want) <= mpf("1e-18") * (1 + gauge)

    @pytest.mark.parametrize("name", INPUTS)
    @pytest.mark.parametrize("normalize_output", [True, False])
    @pytest.mark.parametrize("row_max_gradient", ["constant", "differentiated"])
    def test_every_element(self, name: str, normalize_output: bool, row_max_gradient: Any) -> None:
        rng = np.random.default_rng(2)
        drawn = simple(
            2,
            3,
            dims=(2, 2),
            causal=True,
            bias=rng.standard_normal((1, 1, 2, 3)).astype(np.float32),
            logits_soft_cap=1.5,
            softmax_aux=rng.standard_normal((2, 2)).astype(np.float32),
            dropout_prob=0.3,
            dropout_seed=1,
            normalize_output=normalize_output,
        )
        drawn = replace(drawn, semantics=replace(STANDARD, row_max_gradient=row_max_gradient))
        for index in np.ndindex(getattr(drawn.problem, name).shape):
            self.assert_differentiates(drawn, name, index)

    def test_padding_beside_sentinels(self) -> None:
        """Its lse is the logsumexp of the sinks, which get no gradient of it."""
        drawn = simple(
            2,
            3,
            softmax_aux=np.array([0.5], np.float32),
            cum_seqlens_q=np.int32([0, 1]),
            cum_seqlens_k=np.int32([0, 2]),
        )
        drawn = replace(drawn, semantics=replace(STANDARD, hidden="sentinel", sentinel=-2.0))
        self.assert_differentiates(drawn, "softmax_aux", (0,))
        self.assert_differentiates(drawn, "value", (0, 2, 0, 0))

    @examples(40)
    @given(drawn=drawn_problems(dialects=True, largest=3), data=st.data())
    def test_drawn(self, drawn: Drawn, data: st.DataObject) -> None:
        tame: dict[str, object] = {}
        if drawn.semantics.empty_rows == "nan":
            tame["empty_rows"] = "zero"
        if drawn.semantics.sentinel < -1e4:
            tame["sentinel"] = -1e4
        # A maximum that ties has no derivative to compare the oracle's choice with.
        tame["row_max_gradient"] = "constant"
        drawn = replace(drawn, semantics=replace(drawn.semantics, **tame))
        answer = answer_of(drawn)
        for name in INPUTS:
            gradient = getattr(answer, "d" + name)
            if gradient is None or gradient.size == 0:
                continue
            index = np.unravel_index(data.draw(st.integers(0, gradient.size - 1), label=name), gradient.shape)
            index = tuple(int(i) for i in index)
            if np.isfinite(float(getattr(drawn.problem, name)[index])):
                self.assert_differentiates(drawn, name, index)


class TestExtremes:
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
    @pytest.mark.parametrize(
        "options", [{}, {"normalize_output": False}, {"softmax_aux": np.float32([1e4, -1e4])}]
    )
    def test_logits_of_ten_thousand(self, dtype: object, options: dict[str, object]) -> None:
        drawn = simple(6, 12, dtype=dtype, amplitude=90.0, dims=(16, 4), **options)
        logits = next(rows.row_blocks(drawn.problem, STANDARD)).logits
        assert logits.max() > 1e4
        assert logits.min() < -1e4
        assert_agrees(drawn)

    def test_a_value_that_only_a_tiny_weight_reads(self) -> None:
        """exp(-700) keeps its 1e-13 too: the difference of the logits is rounded once."""
        query, value = np.ones((1, 1, 1, 1), np.float32), np.zeros((1, 40, 1, 1), np.float32)
        key = -np.linspace(0, 700, 40, dtype=np.float32).reshape(value.shape)
        for far in range(40):
            only = value.copy()
            only[0, far] = 1
            problem = make_problem(query, key, only)
            assert_agrees(Drawn(problem, STANDARD, query, query[..., 0]))

    def test_ties_at_ten_thousand(self) -> None:
        """The largest logits differ by less than float64 resolves at 1e4: only the pairs tell them apart."""
        drawn = simple(3, 5, dims=(3, 2), seed=4)
        query, key = drawn.problem.query.copy(), drawn.problem.key.copy()
        query[..., 0], key[..., 0] = 100, 100
        query[..., 1:] *= np.float32(1e-6)
        key[..., 1:] *= np.float32(1e-6)
        problem = replace(drawn.problem, query=query, key=key, softmax_scale=1.0)
        for normalize_output in (True, False):
            assert_agrees(replace(drawn, problem=replace(problem, normalize_output=normalize_output)))

    @pytest.mark.parametrize("cap", [1e-3, 1.0, 50.0, 1e4])
    @pytest.mark.parametrize("amplitude", [0.01, 1.0, 70.0])
    @pytest.mark.parametrize("sinks", ["as_given", "capped"])
    def test_caps(self, cap: float, amplitude: float, sinks: str) -> None:
        """Near a cap of 1e4 a logit keeps its digits too: cap * tanh is computed as a pair."""
        aux = np.array([5e3, -0.25], np.float32) if sinks == "capped" else None
        drawn = simple(4, 7, amplitude=amplitude, dims=(8, 2), logits_soft_cap=cap, softmax_aux=aux)
        assert_agrees(replace(drawn, semantics=Semantics(sinks=sinks)))  # type: ignore[arg-type]

    def test_a_capped_sink_beside_a_capped_key(self) -> None:
        """Both near 4600, so that their weights show the last digits of both."""
        one, key = np.ones((1, 1, 1, 1), np.float32), np.full((1, 1, 1, 1), 5e3, np.float32)
        for sink in np.arange(4995, 5005, dtype=np.float32):
            problem = make_problem(one, key, one, softmax_aux=sink[None], logits_soft_cap=1e4)
            assert_agrees(Drawn(problem, Semantics(sinks="capped"), one, one[..., 0]))

    def test_one_visible_key(self) -> None:
        mask = np.zeros((1, 1, 3, 5), np.bool_)
        mask[..., 2] = True
        drawn = simple(3, 5, amplitude=70.0, attention_mask=mask)
        assert_agrees(drawn)
        answer = answer_of(drawn)
        np.testing.assert_array_equal(
            answer.out, np.broadcast_to(drawn.problem.value[:, 2:3], answer.out.shape)
        )

    @pytest.mark.parametrize("amplitude", [0.3, 6.0])
    def test_fifty_thousand_keys(self, amplitude: float) -> None:
        """Of much the same weight, and of weights that a few keys dominate."""
        drawn = simple(1, 50_000, heads=1, dims=(2, 2), amplitude=amplitude)
        problem, answer = drawn.problem, answer_of(drawn)
        with localcontext(prec=30):
            q, k, v = (
                [[Decimal(float(x)) for x in row] for row in array[0, :, 0]]
                for array in (problem.query, problem.key, problem.value)
            )
            scale = 1 / Decimal(2).sqrt()
            weights = [((q[0][0] * row[0] + q[0][1] * row[1]) * scale).exp() for row in k]
            total = sum(weights)
            lse = total.ln()
            assert abs(Decimal(float(answer.lse[0, 0, 0])) - lse) <= abs(lse) * Decimal("1e-13")
            # d lse / d query is the mean of the keys: one gradient by hand, at full length.
            by_lse = attention(
                problem, STANDARD, Cotangents(np.zeros_like(drawn.d_out), np.ones((1, 1, 1), np.float32))
            )
            assert by_lse.dquery is not None
            for d in range(2):
                for got, vectors, factor in ((answer.out, v, Decimal(1)), (by_lse.dquery, k, scale)):
                    terms = [w * row[d] for w, row in zip(weights, vectors, strict=True)]
                    want, gauge = (factor * sum(x) / total for x in (terms, map(abs, terms)))
                    assert abs(Decimal(float(got[0, 0, 0, d])) - want) <= gauge * Decimal("1e-13")

    def test_bias_of_minus_infinity_hides(self) -> None:
        bias = np.zeros((1, 1, 3, 4), np.float32)
        bias[0, 0, :, 1] = -np.inf
        bias[0, 0, 2] = -np.inf
        for cap in (None, 2.0):
            drawn = simple(bias=bias, logits_soft_cap=cap)
            masked = simple(attention_mask=bias == 0, bias=np.zeros_like(bias), logits_soft_cap=cap)
            assert_agrees(drawn)
            assert_equal(answer_of(drawn), answer_of(masked))
            assert (answer_of(drawn).out[:, 2] == 0).all()

    def test_visible_nan_is_never_hushed_up(self) -> None:
        drawn = simple()
        query = drawn.problem.query.copy()
        query[0, 1, 0, 0] = np.nan
        answer = answer_of(replace(drawn, problem=replace(drawn.problem, query=query)))
        assert np.isnan(answer.out[0, 1, 0]).all()
        assert np.isnan(answer.lse[0, 0, 1])
        assert np.isfinite(answer.out[0, [0, 2]]).all()
        assert answer.dvalue is not None
        assert np.isnan(answer.dvalue).all()

    def test_a_visible_nan_spoils_only_its_own_column(self) -> None:
        drawn = simple()
        value = drawn.problem.value.copy()
        value[0, 2, 0, 1] = np.nan
        out = attention(replace(drawn.problem, value=value)).out
        assert np.isnan(out[..., 1]).all()
        np.testing.assert_allclose(out[..., [0, 2]], answer_of(drawn).out[..., [0, 2]], rtol=1e-13)

    def test_an_infinite_bias_takes_the_cap(self) -> None:
        bias = np.array([[[[np.inf, 1.0]]]], np.float32)
        drawn = simple(1, 2, heads=1, bias=bias, logits_soft_cap=3.0)
        assert next(rows.row_blocks(drawn.problem, STANDARD)).logits[0, 0] == 3.0

    @pytest.mark.parametrize(
        "sizes",
        [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}, {"q_len": 0, "kv_len": 0}, {"batch": 2, "kv_len": 0}],
    )
    @pytest.mark.parametrize("sinks", [None, np.float32([1.0, 2.0])])
    def test_nothing_there(self, sizes: dict[str, int], sinks: np.ndarray | None) -> None:
        drawn = simple(**sizes, softmax_aux=sinks, dropout_prob=0.5, dropout_seed=1, causal=True)  # type: ignore[arg-type]
        assert_agrees(drawn)
        answer = answer_of(drawn)
        assert (answer.out == 0).all()
        want = -np.inf if sinks is None else np.log(np.exp(1) + np.exp(2))
        np.testing.assert_allclose(answer.lse, np.full_like(answer.lse, want), rtol=1e-15)


class TestEmptyRowsAndPadding:
    def test_a_token_that_sees_nothing(self) -> None:
        """S10: 0, -inf and no gradients; with sinks (S11) their logsumexp, whose cotangent they get."""
        mask = np.ones((1, 1, 3, 4), np.bool_)
        mask[:, :, 1] = False
        without = answer_of(simple(attention_mask=mask))
        assert (without.out[:, 1] == 0).all()
        assert np.isneginf(without.lse[..., 1]).all()
        sinks = np.array([0.5, 1.5], np.float32)
        drawn = simple(attention_mask=mask, softmax_aux=sinks)
        only = np.zeros_like(drawn.d_lse)
        only[..., 1] = drawn.d_lse[..., 1]
        drawn = replace(drawn, d_lse=only, d_out=np.zeros_like(drawn.d_out))
        answer = answer_of(drawn)
        assert (answer.out[:, 1] == 0).all()
        np.testing.assert_allclose(answer.lse[..., 1], np.log(np.exp(0.5) + np.exp(1.5)), rtol=1e-15)
        share = np.exp(0.5) / (np.exp(0.5) + np.exp(1.5))
        want = float(only.sum(dtype=np.float64)) * np.array([share, 1 - share])
        np.testing.assert_allclose(answer.dsoftmax_aux, want, rtol=1e-14)
        for gradient in (answer.dquery, answer.dkey, answer.dvalue):
            assert gradient is not None
            assert (gradient == 0).all()

    @pytest.mark.parametrize("by", ["lengths", "packed", "segments"])
    def test_padding_is_not_even_empty(self, by: str) -> None:
        """S9: past a length, past the last sequence, or of a negative segment: -inf despite sinks."""
        ids = np.array([[0, 0, -1, -1]] * 2)
        options: dict[str, object] = {
            "lengths": {"cum_seqlens_q": np.int32([0, 2, 4]), "cum_seqlens_k": np.int32([0, 4, 8])},
            "packed": {"cum_seqlens_q": np.int32([0, 1, 2]), "cum_seqlens_k": np.int32([0, 2, 2])},
            "segments": {"q_segment_ids": ids, "kv_segment_ids": ids},
        }[by]
        drawn = simple(4, 4, batch=1 if by == "packed" else 2, softmax_aux=np.float32([1.0]), **options)
        assert_agrees(drawn)
        answer = answer_of(drawn)
        assert (answer.out[:, 2:] == 0).all()
        assert np.isneginf(answer.lse[..., 2:]).all()
        assert np.isfinite(answer.lse[..., :2]).all()
        quiet = replace(drawn, d_out=drawn.d_out.copy(), d_lse=drawn.d_lse.copy())  # type: ignore[union-attr]
        quiet.d_out[:, 2:] = 0
        quiet.d_lse[..., 2:] = 0  # type: ignore[index]
        assert_equal(answer, answer_of(quiet))

    @pytest.mark.parametrize("empty_rows", ["zero", "mean_of_values", "nan", "unspecified"])
    @pytest.mark.parametrize("hidden", ["absent", "sentinel"])
    @pytest.mark.parametrize("normalize_output", [True, False])
    def test_no_dialect_of_empty_rows_reaches_padding(
        self, empty_rows: str, hidden: str, normalize_output: bool
    ) -> None:
        lengths = {"cum_seqlens_q": np.int32([0, 3]), "cum_seqlens_k": np.int32([0, 2])}
        drawn = simple(4, 3, causal=True, normalize_output=normalize_output, **lengths)
        semantics = Semantics(empty_rows=empty_rows, hidden=hidden, sentinel=-9.0)  # type: ignore[arg-type]
        drawn = replace(drawn, semantics=semantics)
        assert_agrees(drawn)
        answer = answer_of(drawn)
        assert (answer.out[:, 3] == 0).all()
        assert not np.isnan(answer.lse[..., 3]).any()
        # The first row is a token that causal leaves nothing to see, and the dialect may say what it likes.
        moved = {"zero": False, "unspecified": False, "mean_of_values": True, "nan": True}[empty_rows]
        assert (answer.out[:, 0] != 0).all() == (moved or hidden == "sentinel")

    def test_nan_rows_need_no_cotangent_to_spoil_gradients(self) -> None:
        drawn = simple(3, 2, causal=True)
        silent = replace(drawn, d_out=np.zeros_like(drawn.d_out), d_lse=None)
        silent = replace(silent, semantics=Semantics(empty_rows="nan"))
        assert_agrees(silent)
        assert np.isnan(answer_of(silent).dkey).all()  # type: ignore[arg-type]

    @pytest.mark.parametrize("packed", [False, True])
    def test_sequences_of_no_tokens(self, packed: bool) -> None:
        cums = {"cum_seqlens_q": np.int32([0, 0, 3, 3]), "cum_seqlens_k": np.int32([0, 2, 4, 4])}
        drawn = simple(4, 5, batch=1 if packed else 3, causal=True, **cums)
        assert_agrees(drawn)
        answer = answer_of(drawn)
        # Three queries of a sequence with two keys: the first is causal to nothing.
        sees = np.isfinite(answer.lse)
        if packed:
            np.testing.assert_array_equal(sees[0, 0], [False, True, True, False])
        else:
            np.testing.assert_array_equal(sees[:, 0], [[False] * 4, [False, True, True, False], [False] * 4])


class TestPoison:
    @examples(120)
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
    @examples(100)
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


class TestLaws:
    """What follows from the clauses without any arithmetic of ours."""

    def test_inputs_are_left_alone(self) -> None:
        drawn = simple(bias=np.zeros((1, 1, 1, 4), np.float32), softmax_aux=np.float32([1.0]))
        arrays = [drawn.problem.query, drawn.problem.key, drawn.problem.value, drawn.problem.bias]
        arrays += [drawn.problem.softmax_aux, drawn.d_out, drawn.d_lse]
        for array in arrays:
            assert array is not None
            array.setflags(write=False)
        answer_of(drawn)

    def test_groups_read_their_own_head(self) -> None:
        """S1, S15: query head h reads KV head h // group, whose gradients sum over the group."""
        drawn = simple(heads=6, kv_heads=2, batch=2)
        problem = drawn.problem
        spread = replace(
            problem, key=np.repeat(problem.key, 3, axis=2), value=np.repeat(problem.value, 3, axis=2)
        )
        grouped, each = answer_of(drawn), answer_of(replace(drawn, problem=spread))
        assert each.dkey is not None
        assert each.dvalue is not None
        want = replace(
            each,
            dkey=each.dkey.reshape(2, 4, 2, 3, 4).sum(axis=3),
            dvalue=each.dvalue.reshape(2, 4, 2, 3, 3).sum(axis=3),
        )
        assert_equal(grouped, want, 1e-15)

    def test_packed_is_one_after_the_other(self) -> None:
        """S9: a packed batch row equals its sequences taken alone, causal aligned for each."""
        cum_q, cum_k = np.int32([0, 2, 2, 5]), np.int32([0, 3, 4, 6])
        drawn = simple(6, 8, causal=True, cum_seqlens_q=cum_q, cum_seqlens_k=cum_k)
        packed = answer_of(drawn)
        for n in range(3):
            q, k = slice(*cum_q[n : n + 2]), slice(*cum_k[n : n + 2])
            problem: Problem = drawn.problem
            alone = make_problem(problem.query[:, q], problem.key[:, k], problem.value[:, k], causal=True)
            assert drawn.d_lse is not None
            answer = attention(alone, STANDARD, Cotangents(drawn.d_out[:, q], drawn.d_lse[..., q]))
            assert packed.dquery is not None
            assert packed.dkey is not None
            assert packed.dvalue is not None
            cut = Answer(
                packed.out[:, q],
                packed.lse[..., q],
                packed.dquery[:, q],
                packed.dkey[:, k],
                packed.dvalue[:, k],
            )
            assert_equal(answer, cut, 1e-14)

    def test_lse_of_two_is_a_change_of_unit(self) -> None:
        drawn = simple()
        binary = answer_of(replace(drawn, semantics=Semantics(lse_base="two")))
        np.testing.assert_allclose(binary.lse * np.log(2), answer_of(drawn).lse, rtol=1e-15)

    def test_no_lse_cotangent_is_zero(self) -> None:
        drawn = simple()
        none, zero = replace(drawn, d_lse=None), replace(drawn, d_lse=np.zeros_like(drawn.d_lse))
        assert_equal(answer_of(none), answer_of(zero))
        ignoring = replace(drawn, semantics=Semantics(lse_gradient=False))
        assert_equal(answer_of(ignoring), answer_of(zero))

    def test_only_declared_gradients(self) -> None:
        drawn = simple(bias=np.zeros((1, 1, 1, 4), np.float32), softmax_aux=np.float32([1.0]))
        chosen = replace(drawn, semantics=Semantics(gradients=frozenset({"value", "bias"})))
        assert answer_of(chosen).items().keys() == {"out", "lse", "dvalue", "dbias"}
        assert attention(drawn.problem).items().keys() == {"out", "lse"}
        assert answer_of(simple()).items().keys() == {"out", "lse", "dquery", "dkey", "dvalue"}


class TestRefusals:
    @pytest.mark.parametrize(
        ("cotangents", "sample", "message"),
        [
            (Cotangents(np.zeros((1, 3, 2, 4))), None, r"cotangents.out: got shape \(1, 3, 2, 4\)"),
            (Cotangents(np.zeros((1, 3, 2, 3)), np.zeros((1, 3, 2))), None, "cotangents.lse: got shape"),
            (None, Sample(np.array([3]), np.array([0])), r"sample.query_rows: got \[3\].* below 3"),
            (None, Sample(np.array([0]), np.array([-1])), r"sample.key_rows: got \[-1\].* below 4"),
            (None, Sample(np.array([[0]]), np.array([0])), "sample.query_rows"),
        ],
    )
    def test_what_does_not_fit(
        self, cotangents: Cotangents | None, sample: Sample | None, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            attention(simple().problem, STANDARD, cotangents, sample)
