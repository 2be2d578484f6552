"""The oracle where numbers are extreme, where rows are empty or padding, and where a call is malformed."""

from dataclasses import replace
from decimal import Decimal, localcontext

import ml_dtypes
import numpy as np
import pytest

from attest.reference import rows
from attest.reference.oracle import Cotangents, Sample, attention
from attest.reference.problem import make_problem
from attest.reference.semantics import STANDARD, Semantics
from tests.reference.answers import answer_of, assert_agrees, assert_equal, simple
from tests.reference.strategies import Drawn


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
