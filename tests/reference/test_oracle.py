"""S1 to S16: the oracle against 50 digits, against differences of itself, and against laws.

Agreement is 1e-13 on out and lse and 1e-12 on gradients, relative to the gauge of each element (see
second_opinion.py): the sum of the magnitudes of what was summed. It is not relaxed by the size of the
logits, which reach +-1e4 and more.
"""

from dataclasses import fields, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mpf

from attest.reference.oracle import Answer, Cotangents, attention
from attest.reference.problem import Problem, make_problem
from attest.reference.semantics import STANDARD, Semantics
from tests.examples import examples
from tests.reference.answers import answer_of, assert_agrees, assert_equal, simple
from tests.reference.second_opinion import (
    INPUTS,
    Place,
    objective,
    second_opinion,
)
from tests.reference.second_pairs import is_padding
from tests.reference.strategies import DIALECTS, Drawn, drawn_problems


class TestSecondOpinion:
    @examples(150)
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
            dropout_shared="h" if everything else None,
            q_segment_ids=np.array([[-1, -1, 0, 0, 1, 1]]) if segments else None,
            kv_segment_ids=np.array([[-1, 0, 0, 0, 0, 0, 0, 1, 1]]) if segments else None,
            cum_seqlens_q=np.int32([0, 5]) if everything else None,
            cum_seqlens_k=np.int32([0, 8]) if everything else None,
            normalize_output=not (everything or name == "row_max_gradient"),
            q_offset=1 if everything else None,
            origin=(1, 2, 3, 5) if everything else None,
            kv_start=np.array([[0, 1, 2, 1, 0, 0]]) if everything else None,
            kv_end=np.array([[9, 8, 5, 9, 9, 9]]) if everything else None,
            alibi_slopes=np.array([0.5, 0.25], np.float32) if everything else None,
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
