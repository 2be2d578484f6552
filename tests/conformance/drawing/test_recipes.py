"""Cases made of rows: they switch on what the row says, share a program, and reach what a user may give."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from attest.conformance.cases.build import build
from attest.conformance.cases.case import Case
from attest.conformance.cases.families import FAMILIES, usual_largest_logit
from attest.conformance.cases.features import DTYPES, FEATURES
from attest.conformance.drawing.covering import covering_rows
from attest.conformance.drawing.dice import Deck, Dice
from attest.conformance.drawing.poison import poisoned
from attest.conformance.drawing.recipes import dealt, fillings, model
from attest.conformance.drawing.shapes import Blocks, Offer, class_of
from attest.conformance.drawing.tables import drawing
from attest.conformance.judging.execute import call_of
from attest.reference.problem import Problem
from attest.reference.semantics import Semantics
from attest.reference.visibility import allowed
from tests.conformance.drawn import ROWS

rows = st.sampled_from(ROWS)
offers = st.builds(
    Offer,
    dtype=st.sampled_from(DTYPES),
    blocks=st.sampled_from((None, Blocks(16, 16), Blocks(64, 128))),
    head_dims=st.sampled_from(((1, 256), (64, 128))),
    length_multiple=st.sampled_from((1, 8)),
    head_dim_multiple=st.sampled_from((1, 8)),
    window_sides=st.sampled_from(("both", "left")),
    sinks=st.sampled_from(("any", "shared", "per_head")),
)
seeds = st.integers(0, 10_000)


@given(rows, offers, seeds)
def test_a_case_has_the_features_of_its_row_and_fits_the_offer(
    row: frozenset[str], offer: Offer, seed: int
) -> None:
    low, high = offer.head_dims
    for case in fillings(row, offer, seed, 3):
        assert case.features == row & set(FEATURES)
        assert case.dtype == offer.dtype
        assert low <= min(case.head_dim, case.value_width)
        assert max(case.head_dim, case.value_width) <= high
        assert case.head_dim % offer.head_dim_multiple == case.value_width % offer.head_dim_multiple == 0
        assert case.q_len % offer.length_multiple == case.kv_len % offer.length_multiple == 0
        if case.sinks and offer.sinks != "any":
            assert case.sinks_per_head == (offer.sinks == "per_head")
        if case.window is not None and offer.window_sides == "left":
            assert case.window[0] is not None
            assert case.window[1] == (None if case.causal else 0)


@given(rows, offers, seeds)
def test_the_cases_of_a_row_are_compiled_once(row: frozenset[str], offer: Offer, seed: int) -> None:
    cases = fillings(row, offer, seed, 3)
    hidden = poisoned(cases[0], seed)
    programs = {
        (call.options, *((name, array.shape, array.dtype) for name, array in call.arrays.items()))
        for call in (call_of(build(case)) for case in (*cases, *([hidden] if hidden else [])))
    }
    assert len(programs) == 1
    assert len({case.seed for case in cases}) == 3


@given(rows, offers, seeds)
def test_a_case_is_as_large_as_its_class_allows(row: frozenset[str], offer: Offer, seed: int) -> None:
    (case,) = fillings(row, offer, seed, 1)
    lengths = class_of(row, "lengths")
    blocks = offer.blocks
    if lengths == "many":
        assert case.kv_len > 4 * (blocks.key if blocks else 32)
    if lengths == "tall":
        assert case.q_len > (2 * blocks.query if blocks else 32)
    if lengths == "long":
        assert case.kv_len >= 1024
    if lengths == "wide":
        assert case.kv_len > 256
    if lengths == "deep":
        assert case.q_len > 256
    budget = drawing()["budget"]["long" if lengths == "long" else "usual"]
    few = case.batch <= 2 and case.q_heads <= 2
    assert few or case.batch * case.q_heads * case.q_len * case.kv_len <= budget["logits"]
    assert few or case.batch * case.q_heads <= budget["heads"]


def planned(count: int) -> list[Case]:
    """The cases of some arrays, for a kernel that chooses its own blocks."""
    found: list[Case] = []
    for seed in range(count):
        turns = Counter[str]()
        for number, row in enumerate(covering_rows(model(), 2, seed)):
            deck = Deck(seed, tuple(sorted((name, turns[name]) for name in dealt(row))))
            turns.update(dealt(row))
            found += fillings(row, Offer(DTYPES[number % 3], deck=deck), 100 * seed + number, 3)
    return found


def test_the_values_of_the_tables_are_drawn_in_a_few_arrays() -> None:
    cases = planned(4)
    arguments = drawing()["arguments"]
    for field, table in (("sinks", "sinks"), ("segments", "segments"), ("dropout", "dropouts")):
        assert set(arguments[table]) <= {getattr(case, field) for case in cases}
    assert {*arguments["scales"], *arguments["rare_scales"]} <= {case.scale for case in cases}
    assert set(arguments["dropout_seeds"]) <= {case.dropout_seed for case in cases}
    assert {*arguments["small_caps"], *arguments["large_caps"]} <= {case.soft_cap for case in cases}
    assert set(FAMILIES) <= {case.family for case in cases}
    for field in ("mask_pattern", "bias_pattern", "segment_pattern", "mask", "bias"):
        assert len({getattr(case, field) for case in cases}) > 1


def test_sizes_meet_that_small_constants_in_a_kernel_are_too_small_for() -> None:
    cases = planned(3)
    assert any(case.q_heads > 8 and case.kv_len > 256 for case in cases)
    assert any(case.q_heads // case.kv_heads > 4 and case.kv_len > 256 for case in cases)
    assert any(case.batch > 4 and case.kv_len > 256 for case in cases)
    assert any(case.batch > 1 and case.q_len > 256 for case in cases)
    assert any(case.q_len == 1 and case.kv_len > 256 for case in cases)
    assert any(case.q_len > 512 for case in cases)
    assert any(max(case.window[0] or 0, case.window[1] or 0) > 255 for case in cases if case.window)


def test_windows_end_at_edges_of_blocks_and_beside_them() -> None:
    """The first key that the first row sees, against blocks of 16."""
    edges = {
        (case.kv_len - case.q_len - case.window[0]) % 16
        for case in planned(12)
        if case.window is not None and case.window[0] is not None and not case.lengths
    }
    assert {0, 1, 15} <= edges
    sides = [case.window for case in planned(4) if case.window is not None]
    assert any(left is None for left, _ in sides)
    assert any(right is None for _, right in sides)
    assert any(left == 0 for left, _ in sides)
    assert any((right or 0) >= 100 for _, right in sides)


def test_lengths_are_unequal_unsorted_and_some_are_zero() -> None:
    lengths = [case.lengths for case in planned(4) if case.lengths is not None]
    assert any(q != k for pairs in lengths for q, k in pairs)
    assert any([k for _, k in pairs] != sorted(k for _, k in pairs) for pairs in lengths)
    assert any(pairs[0][1] == 0 for pairs in lengths)
    assert any(pairs[-1][1] == 0 for pairs in lengths)
    assert any(len(pairs) > 8 for pairs in lengths)


def test_dropout_seeds_need_both_words() -> None:
    drawn = {case.dropout_seed for case in planned(4) if case.dropout}
    assert {0, 2**64 - 1} <= drawn


# The cap bounds the logits of the others, too; without one there is nothing to scale "cap_scaled" by.
@given(st.sampled_from(sorted(FAMILIES.keys() - {"cap_scaled"})), st.integers(0, 99))
def test_sinks_around_the_logits_weigh_neither_nothing_nor_everything(family: str, seed: int) -> None:
    case = Case(q_len=8, kv_len=32, head_dim=16, family=family, seed=seed)
    problem = build(case).problem
    logits = problem.query[0, :, 0].astype(float) @ problem.key[0, :, 0].T.astype(float) / 4
    usual = usual_largest_logit(family, 16, 0.25)
    assert np.median(np.abs(logits.max(axis=1) - usual)) < 40


HIDDEN = Case(batch=2, q_len=12, kv_len=24, q_heads=2, kv_heads=2, head_dim=4, seed=5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"mask": "11", "mask_pattern": "middle"}, slice(8, 16)),
        ({"bias": "bhq", "bias_pattern": "last"}, slice(16, 24)),
    ],
)
def test_a_third_of_the_keys_is_hidden_from_all_rows(fields: dict[str, str], expected: slice) -> None:
    problem = build(replace(HIDDEN, **fields)).problem
    if problem.attention_mask is not None:
        assert not problem.attention_mask[..., expected].any()
    if problem.bias is not None:
        assert np.isneginf(problem.bias[..., expected]).all()


def test_ids_without_order_are_large_negative_repeated_and_differ_for_keys() -> None:
    problem = build(replace(HIDDEN, q_len=64, kv_len=64, segments=5, segment_pattern="mixed")).problem
    ids, others = problem.q_segment_ids, problem.kv_segment_ids
    assert ids is not None
    assert others is not None
    assert ids.max() == 2**31 - 2
    assert ids.min() == -(2**31)
    assert (np.diff(ids, axis=1) < 0).any()
    assert not np.array_equal(ids, others)


def test_an_extreme_sink_weighs_nothing_and_is_finite() -> None:
    for dtype in DTYPES:
        case = replace(HIDDEN, dtype=dtype, sinks=3, sink_pattern="extreme")
        sinks = build(case).problem.softmax_aux
        assert sinks is not None
        assert np.isfinite(sinks.astype(float)).all()
        assert sinks[0].astype(float) < -1e4 < sinks[1].astype(float)


def test_each_option_is_dealt_before_one_comes_again() -> None:
    options = range(5)
    for round_ in range(3):
        turns = range(5 * round_, 5 * round_ + 5)
        assert sorted(Deck(3, (("a", turn),)).deal("a", "name", options) for turn in turns) == [*options]
    assert Deck(3, (("a", 0),)).deal("a", "name", options, lambda option: option == 4) == 4
    assert Deck(3).deal("a", "name", options, lambda _option: False) == 0
    assert {Deck(seed).deal("a", "name", options) for seed in range(30)} == {*options}


@given(seeds, st.integers(1, 300), st.integers(0, 2000))
def test_a_spread_number_is_within_its_bounds(seed: int, low: int, beyond: int) -> None:
    assert low <= Dice(seed, "test").spread("name", low, low + beyond) <= low + beyond


def test_spread_numbers_are_small_and_large() -> None:
    numbers = [Dice(seed, "test").spread("name", 1, 1000) for seed in range(400)]
    assert sum(number < 16 for number in numbers) > 100
    assert sum(number > 256 for number in numbers) > 40


@given(seeds, st.integers(1, 50))
def test_choices_are_independent_of_their_order_and_cover_their_range(seed: int, count: int) -> None:
    dice = Dice(seed, "test")
    first = [dice.pick(str(name), range(3)) for name in range(count)]
    assert [Dice(seed, "test").pick(str(name), range(3)) for name in reversed(range(count))] == first[::-1]
    assert sorted(dice.shuffled("items", range(count))) == list(range(count))
    assert {dice.between(str(name), 2, 4) for name in range(200)} == {2, 3, 4}
    assert not any(dice.chance(str(name), 0.0) for name in range(50))


@pytest.mark.found_outside
@given(seeds, st.sampled_from(("few", "packed", "gqa", "origin", "padded")))
def test_shared_dropout_is_drawn_where_its_sharing_shows(seed: int, beside: str) -> None:
    row = model(frozenset({"shared_dropout", "origin"})).completed(frozenset({"shared_dropout", beside}))
    case = fillings(row | {"few"}, Offer("float32", blocks=Blocks(4, 8)), seed, 1)[0]
    assert case.features >= {"dropout", "shared_dropout"}
    several = {"b": case.batch > 1, "h": case.q_heads > 1}
    for letter in case.dropout_shared or "":
        # Where the call begins elsewhere, what is shared begins there, too, and must count as 0.
        assert several[letter] or case.origin is not None
        assert case.origin is None or case.origin["bh".index(letter)] > 0


def test_shared_dropout_is_drawn_in_every_way() -> None:
    row = model(frozenset({"shared_dropout"})).completed(frozenset({"shared_dropout", "few"}))
    drawn = [fillings(row, Offer("float32"), seed, 1)[0].dropout_shared for seed in range(30)]
    assert set(drawn) == {"b", "h", "bh"}


@given(rows, offers, seeds)
def test_a_row_whose_first_case_shows_no_defect_is_drawn_again(
    row: frozenset[str], offer: Offer, seed: int
) -> None:
    first_draw = fillings(row, offer, seed, 3)
    seeds_before = {case.seed for case in first_draw}
    tried: list[Case] = []

    def accept(case: Case) -> bool:
        tried.append(case)
        return len({one.seed for one in tried} - seeds_before) > 10

    drawn = fillings(row, offer, seed, 3, accept)
    assert drawn[0].seed not in seeds_before
    assert drawn[0].features == first_draw[0].features
    assert len({(case.batch, case.q_len, case.kv_len, case.q_heads, case.window) for case in drawn}) == 1


@given(rows, offers, seeds)
def test_a_row_that_never_shows_a_defect_stays_as_it_was_drawn_first(
    row: frozenset[str], offer: Offer, seed: int
) -> None:
    (last_try,) = fillings(row, offer, seed, 1, lambda _case: False)
    (first_try,) = fillings(row, offer, seed, 1)
    assert (last_try.q_len, last_try.kv_len, last_try.window) == (
        first_try.q_len,
        first_try.kv_len,
        first_try.window,
    )


@given(
    st.sampled_from((frozenset[str](), frozenset({"q_offset"}), frozenset({"chunks"}))),
    st.sampled_from(("edge", "many", "tall", "wide", "deep")),
    st.sampled_from((frozenset[str](), frozenset({"causal"}))),
    st.sampled_from(("bottom_right", "top_left")),
    seeds,
)
def test_a_window_hides_keys_that_are_visible_without_it(
    beside: frozenset[str], lengths: str, causal: frozenset[str], corner: Any, seed: int
) -> None:
    row = model().completed(frozenset({"window", lengths}) | beside | causal)
    (case,) = fillings(row, Offer("float32", window=corner), seed, 1)
    problem, semantics = build(case).problem, Semantics(causal=corner, window=corner)
    rows_of_queries = np.arange(case.q_len, dtype=np.int64)

    def visible(problem: Problem) -> np.ndarray:
        return np.stack([allowed(problem, semantics, i, 0, rows_of_queries) for i in range(case.batch)])

    without = visible(replace(problem, sliding_window=None))
    # Where no row sees several keys, as one query at the start of a chunk, every window shows them all.
    assume((without.sum(axis=-1) > 1).any())
    assert not np.array_equal(visible(problem), without)
