"""Cases: JSON there and back, names by content, and every malformed field refused by name."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import find, given
from hypothesis import strategies as st

from attest.conformance.cases.axes import BROADCAST_BIAS_AXES, BROADCAST_MASK_AXES
from attest.conformance.cases.build import build
from attest.conformance.cases.case import (
    ALIBI_PATTERNS,
    LIMITS,
    POSITION_PATTERNS,
    RANGE_PATTERNS,
    Case,
    case_from_json,
)
from attest.conformance.cases.families import FAMILIES
from attest.conformance.cases.shapes import shapes_of
from attest.conformance.drawing.corpus import load_corpus
from attest.conformance.drawing.strategies import simpler, smallest
from attest.reference.semantics import STANDARD
from attest.reference.visibility import allowed
from tests.conformance.drawn import drawn_cases

drawn = drawn_cases()


@given(drawn)
def test_a_case_survives_json(case: Case) -> None:
    again = case_from_json(case.to_json())
    assert again == case
    assert again.id == case.id


@given(drawn)
def test_a_case_switches_on_what_its_features_say(case: Case) -> None:
    built = build(case)
    problem = built.problem
    found = {
        "causal": problem.causal,
        "window": problem.sliding_window is not None,
        "mask": problem.attention_mask is not None,
        "integer_mask": built.integer_mask is not None,
        "bias": problem.bias is not None,
        "segments": problem.q_segment_ids is not None,
        "padded": problem.cum_seqlens_q is not None and problem.batch > 1,
        "packed": problem.cum_seqlens_q is not None and problem.batch == 1,
        "sinks": problem.softmax_aux is not None,
        "soft_cap": problem.logits_soft_cap is not None,
        "dropout": problem.dropout_prob > 0,
        "scale": problem.softmax_scale is not None,
        "gqa": problem.group > 1,
        "value_dim": problem.value_dim != problem.head_dim,
        "unnormalized": not problem.normalize_output,
        "q_offset": problem.q_offset is not None,
        "positions": problem.q_positions is not None and problem.kv_positions is not None,
        "origin": any(problem.origin),
        "chunks": problem.chunk_size is not None,
        "ranges": problem.kv_start is not None or problem.kv_end is not None,
        "alibi": problem.alibi_slopes is not None,
        "shared_dropout": problem.dropout_shared is not None,
    }
    assert case.features == {name for name, on in found.items() if on}


@given(drawn.flatmap(lambda case: st.tuples(st.just(case), simpler(case))))
def test_a_simpler_case_has_nothing_more(pair: tuple[Case, Case]) -> None:
    assert_has_nothing_more(*pair)


@given(drawn)
def test_the_smallest_cases_have_nothing_more(case: Case) -> None:
    found = list(smallest(case))
    for less in found:
        assert_has_nothing_more(case, less)
    if case.lengths is None and case.q_len > 2 and case.kv_len > 3:
        assert {less.features for less in found} >= {
            frozenset({name}) for name in case.features - {"integer_mask", "gqa"}
        }


def assert_has_nothing_more(case: Case, less: Case) -> None:
    assert less.features <= case.features
    for name in ("batch", "q_len", "kv_len", "q_heads", "kv_heads", "head_dim", "sinks"):
        assert getattr(less, name) <= getattr(case, name)
    plain = Case()
    for name in ("mask_pattern", "bias_pattern", "segment_pattern", "sink_pattern", "dropout_seed"):
        assert getattr(less, name) in (getattr(case, name), getattr(plain, name))


COORDINATES = Case(
    q_len=5, kv_len=7, batch=2, causal=True, dropout=0.5, positions="shuffled", origin=(1, 2, 3, 6)
)


@pytest.mark.parametrize(
    "case",
    [
        COORDINATES,
        replace(COORDINATES, positions=None, q_offset=-3),
        replace(COORDINATES, positions=None, q_offset=(-3, 2)),
        replace(COORDINATES, positions="shard"),
    ],
)
def test_coordinates_survive_json_and_shrink(case: Case) -> None:
    again = case_from_json(json.loads(json.dumps(case.to_json())))
    assert again == case
    assert again.id == case.id
    features = {"q_offset" if case.positions is None else "positions", "origin"}
    assert case.features == {"causal", "dropout"} | features
    assert {less.features for less in smallest(case)} >= {frozenset({name}) for name in features}
    searched = [
        find(simpler(case), lambda less, name=name: name in less.features) for name in sorted(features)
    ]
    for less in searched:
        assert_has_nothing_more(case, less)
        assert len(less.features) == 1
        assert less.q_offset in (None, 0)
        assert less.origin in (None, (0, 0, 0, 0))


@pytest.mark.parametrize("pattern", ALIBI_PATTERNS)
def test_slopes_differ_from_head_to_head(pattern: str) -> None:
    case = Case(batch=2, q_heads=4, kv_heads=2, q_len=6, kv_len=8, alibi=pattern)
    assert case_from_json(case.to_json()) == case
    assert find(simpler(case), lambda less: less.features == {"alibi"}).alibi == pattern
    slopes = build(case).problem.alibi_slopes
    assert slopes is not None
    assert slopes.shape == (2 if pattern == "entries" else 1, 4)
    assert len(np.unique(slopes)) == slopes.size
    assert ((slopes < 0).any() and (slopes > 0).any()) == (pattern == "entries")


@pytest.mark.found_outside
@pytest.mark.parametrize("shared", ["b", "h", "bh"])
def test_shared_dropout_survives_json_and_shrinks(shared: str) -> None:
    case = Case(batch=2, q_heads=2, kv_heads=2, q_len=6, kv_len=8, dropout=0.5, dropout_shared=shared)
    assert case_from_json(json.loads(json.dumps(case.to_json()))) == case
    assert case.features == {"dropout", "shared_dropout"}
    assert find(simpler(case), lambda less: "shared_dropout" in less.features).dropout_shared == shared
    assert case.features in {less.features for less in smallest(case)}
    assert build(case).problem.dropout_shared == shapes_of(case)[1]["dropout_shared"] == shared
    assert replace(case, dropout_shared=None).to_json() == {
        name: value for name, value in case.to_json().items() if name != "dropout_shared"
    }


@pytest.mark.parametrize("pattern", RANGE_PATTERNS)
def test_chunks_and_ranges_survive_json_and_shrink(pattern: str) -> None:
    case = Case(q_len=30, kv_len=36, batch=2, chunk_size=9, ranges=pattern)
    assert case_from_json(json.loads(json.dumps(case.to_json()))) == case
    assert case.features == {"chunks", "ranges"}
    assert {less.features for less in smallest(case)} >= {frozenset({name}) for name in case.features}
    assert find(simpler(case), lambda less: less.features == {"chunks"}).chunk_size == 1
    built = build(case).problem
    alone = {"kv_start": pattern.startswith("starts"), "kv_end": pattern.endswith("ends")}
    ends = {name for name, given in alone.items() if given} or {*alone}
    arrays, _ = shapes_of(case)
    for name in ("kv_start", "kv_end"):
        array = getattr(built, name)
        assert (array is not None) == (name in ends) == (name in arrays)
        if array is not None:
            assert (array.shape, array.dtype) == (arrays[name].shape, arrays[name].dtype)
            assert len(np.unique(array)) > 5
            assert len(array) == (1 if pattern in ("starts", "shared ends") else 2)
    rows = np.arange(case.q_len)
    seen = [allowed(replace(built, chunk_size=None), STANDARD, batch, 0, rows) for batch in range(2)]
    unseen = ~np.any(seen, axis=(0, 1))
    assert unseen[:6].all() == alone["kv_start"]
    assert unseen[-6:].all() == alone["kv_end"]
    assert (pattern == "scattered") == any((~each.any(axis=1)).any() for each in seen)


@pytest.mark.parametrize("mask", [*BROADCAST_MASK_AXES, "bh"])
@pytest.mark.parametrize("bias", [*BROADCAST_BIAS_AXES, None])
def test_masks_and_biases_may_be_shared(mask: str, bias: str | None) -> None:
    case = Case(batch=2, q_len=3, kv_len=4, q_heads=2, kv_heads=2, mask=mask, bias=bias)
    shared = {"broadcast"} if len(mask) == 4 or bias is not None else set[str]()
    assert case.features == {"mask", *(("bias",) if bias else ()), *shared}
    problem, (arrays, _) = build(case).problem, shapes_of(case)
    for name, axes in (("attention_mask", mask), ("bias", bias)):
        if axes is not None:
            own = zip("bhqk", axes.ljust(4, "?"), (2, 2, 3, 4), strict=True)
            shape = tuple(1 if letter == "1" else size for _, letter, size in own)
            assert getattr(problem, name).shape == arrays[name].shape == shape
    whole = find(simpler(case), lambda less: "broadcast" not in less.features and "mask" in less.features)
    assert whole.mask == mask[:2]


PACKED = Case(batch=1, q_len=6, kv_len=9, causal=True, lengths=((2, 3), (0, 4), (4, 2)), q_offset=(1, -2, 3))
PADDED = replace(PACKED, batch=3)


@pytest.mark.parametrize("case", [PACKED, PADDED, replace(PADDED, lengths=None)], ids=str)
def test_an_offset_for_each_sequence(case: Case) -> None:
    assert case_from_json(json.loads(json.dumps(case.to_json()))) == case
    offset = build(case).problem.q_offset
    assert isinstance(offset, np.ndarray)
    assert offset.dtype == np.int32
    assert offset.tolist() == [1, -2, 3]
    alone = find(simpler(case), lambda less: less.features == {"q_offset"})
    assert alone.q_offset == 0
    varied = find(
        simpler(case), lambda less: isinstance(less.q_offset, tuple) and len(set(less.q_offset)) > 1
    )
    assert varied.sequences > 1
    for less in smallest(case):
        assert_has_nothing_more(case, less)
        assert isinstance(less.q_offset, tuple) == (less.lengths is not None and "q_offset" in less.features)


def test_an_offset_for_each_sequence_is_wrong_for_another_number_of_them() -> None:
    with pytest.raises(ValueError, match=r"q_offset: got \(1, -2, 3\), expected an integer, or 2 of them"):
        replace(PADDED, batch=2, lengths=None)


# What follows from a pattern: how many arrays of positions it has, whether all batch entries share them, the
# steps from one token to the next if there is an order, and whether positions follow from the seed.
POSITIONS = {
    "shard": (True, {1}, True),
    "far": (True, {1}, True),
    "shuffled": (False, None, True),
    "repeated": (False, {0, 1}, False),
    "reversed": (False, {-1}, False),
    "queries": (False, None, True),
    "keys": (False, None, True),
}


@pytest.mark.parametrize("pattern", POSITION_PATTERNS)
def test_positions(pattern: str) -> None:
    """Every pattern hides some pairs of a causal call and shows others."""
    shared, order, seeded = POSITIONS[pattern]
    case = replace(COORDINATES, positions=pattern, seed=3)
    problem = build(case).problem
    given = {"q_positions": problem.q_positions, "kv_positions": problem.kv_positions}
    found = {name: array for name, array in given.items() if array is not None}
    assert {"queries": {"q_positions"}, "keys": {"kv_positions"}}.get(pattern, {*given}) == {*found}
    for name, array in found.items():
        assert array.dtype == np.int32
        assert len(array) == (1 if shared else 2)
        if order is not None:
            assert set(np.diff(array, axis=1).flat) == order
        if pattern == "far":
            assert 2**30 - 1000 < array.min() <= array.max() < 2**30
        again = [getattr(build(replace(case, seed=seed)).problem, name) for seed in range(3, 9)]
        assert any(not np.array_equal(array, other) for other in again) == seeded
    rows = np.arange(case.q_len)
    assert 0 < allowed(problem, STANDARD, 0, 0, rows).mean() < 1


def test_old_cases_keep_their_names() -> None:
    assert Case(q_len=5, kv_len=7, causal=True).to_json() == {"q_len": 5, "kv_len": 7, "causal": True}


MALFORMED = [
    ("a list", []),
    ("nonsense", {"nonsense": 1}),
    ("dtype", {"dtype": "float64"}),
    ("dtype", {"dtype": 16}),
    ("batch", {"batch": 0}),
    ("batch", {"batch": True}),
    ("q_len", {"q_len": -1}),
    ("kv_len", {"kv_len": "3"}),
    ("q_heads", {"q_heads": 3, "kv_heads": 2}),
    ("kv_heads", {"kv_heads": 0}),
    ("head_dim", {"head_dim": 0}),
    ("value_dim", {"value_dim": 0}),
    ("family", {"family": "gaussian"}),
    ("window", {"window": [-1, 0]}),
    ("window", {"window": [1]}),
    ("window", {"window": 4}),
    ("mask", {"mask": "h"}),
    ("mask", {"mask": "bhqk"}),
    ("mask_pattern", {"mask": "b1q1", "mask_pattern": "first"}),
    ("mask_pattern", {"mask": "b11k", "mask_pattern": "rows"}),
    ("empty_rows", {"mask": "b11k", "empty_rows": True}),
    ("bias_pattern", {"bias": "1hq1", "bias_pattern": "lowest"}),
    ("chunk_size", {"chunk_size": 0}),
    ("ranges", {"ranges": "some"}),
    ("alibi", {"alibi": "some"}),
    ("empty_rows", {"empty_rows": True}),
    ("integer_mask", {"integer_mask": True}),
    ("bias", {"bias": "bq"}),
    ("bias_hides", {"bias_hides": True}),
    ("segments", {"segments": 0}),
    ("lengths", {"lengths": []}),
    ("lengths", {"lengths": [[1, 2, 3]]}),
    ("lengths", {"lengths": [[-1, 1]], "q_len": 4}),
    ("lengths", {"lengths": [[1, 1], [1, 1], [1, 1]], "batch": 2}),
    ("lengths", {"lengths": [[3, 3], [2, 2]], "q_len": 4, "kv_len": 9}),
    ("lengths", {"lengths": [[3, 30], [2, 2]], "batch": 2, "q_len": 4, "kv_len": 9}),
    ("sinks", {"sinks": -1}),
    ("sinks_per_head", {"sinks_per_head": True}),
    ("soft_cap", {"soft_cap": 0.0}),
    ("soft_cap", {"soft_cap": float("nan")}),
    ("dropout", {"dropout": 1.0}),
    ("dropout_shared", {"dropout": 0.5, "dropout_shared": "hb"}),
    ("dropout_shared", {"dropout": 0.5, "dropout_shared": True}),
    ("dropout_shared", {"dropout_shared": "b"}),
    ("scale", {"scale": float("inf")}),
    ("tiling", {"tiling": -2}),
    ("seed", {"seed": 2**64}),
    ("mask_pattern", {"mask_pattern": "first"}),
    ("mask_pattern", {"mask": "11", "mask_pattern": "some"}),
    ("bias_pattern", {"bias_pattern": "large"}),
    ("bias_pattern", {"bias": "111", "bias_pattern": "rows"}),
    ("bias_pattern", {"bias": "111", "bias_pattern": "some"}),
    ("segment_pattern", {"segment_pattern": "mixed"}),
    ("segment_pattern", {"segments": 2, "segment_pattern": "some"}),
    ("q_offset", {"q_offset": 1.5}),
    ("q_offset", {"q_offset": 1 << 30}),
    ("q_offset", {"q_offset": -(1 << 30) - 1}),
    ("q_offset", {"q_offset": 1, "positions": "shard"}),
    ("q_offset", {"q_offset": [1, 1 << 30], "batch": 2}),
    ("q_offset", {"q_offset": [1, 2], "positions": "shard", "batch": 2}),
    ("q_offset", {"q_offset": [1, 2]}),
    ("q_offset", {"q_offset": []}),
    ("q_offset", {"q_offset": [True]}),
    ("q_offset", {"q_offset": True}),
    ("positions", {"positions": "sorted"}),
    ("positions", {"positions": [1]}),
    ("origin", {"origin": [0, 0, 0]}),
    ("origin", {"origin": [0, 0, 0, True]}),
    ("origin", {"origin": [0, -1, 0, 0]}),
    ("origin", {"origin": [0, 0, 0, (1 << 32) - 1], "kv_len": 2}),
    ("sink_pattern", {"sink_pattern": "logits"}),
    ("sink_pattern", {"sinks": 1, "sink_pattern": "some"}),
    ("dropout_seed", {"dropout_seed": 1}),
    ("dropout_seed", {"dropout": 0.5, "dropout_seed": 2**64}),
    ("scale", {"scale": 10**400}),
    ("soft_cap", {"soft_cap": 1e39}),
    ("window", {"window": [2**31, 0]}),
    ("lengths", {"lengths": [[0, 0]] * 5000}),
    ("q_len", {"q_len": 2**24, "kv_len": 2**24, "mask": "11"}),
    *((name, {name: largest + 1}) for name, largest in LIMITS.items()),
]


@pytest.mark.parametrize(("named", "data"), MALFORMED)
def test_a_malformed_case_is_refused_by_name(named: str, data: object) -> None:
    expected = "JSON object" if named == "a list" else named
    with pytest.raises(ValueError, match=expected):
        case_from_json(data)


def test_values_are_the_same_on_every_machine() -> None:
    """The bytes of every family's arrays, as they were first made."""
    digest = hashlib.sha256()
    for family in FAMILIES:
        case = Case(q_len=3, kv_len=4, head_dim=5, family=family, soft_cap=2.0, seed=7, bias="11q", mask="11")
        built = build(case)
        for array in (
            built.problem.query,
            built.problem.key,
            built.problem.value,
            built.problem.bias,
            built.problem.attention_mask,
            built.cotangents.out,
            built.cotangents.lse,
        ):
            assert array is not None
            digest.update(np.ascontiguousarray(array).tobytes())
    assert digest.hexdigest() == "febc53c6dd81470df0341deb2e0dc1bbe5d268954600cb20af874f52ce81f256"


def test_low_lse_is_below_the_underflow_of_exp() -> None:
    for head_dim in (1, 16, 256):
        problem = build(Case(q_len=4, kv_len=4, head_dim=head_dim, family="low_lse")).problem
        logits = problem.query[0, :, 0] @ problem.key[0, :, 0].T * head_dim**-0.5
        assert logits.max() < -88


# The numbered list of public bugs that the corpus follows; the ones left out need what no case can say
# yet: 16 arrays of more than 2^31 elements, 24 several devices.
EXPRESSIBLE = sorted(set(range(1, 28)) - {16, 24})


def test_every_known_bug_that_can_be_expressed_has_a_case() -> None:
    numbers = {int(entry.name.split("_")[0]) for entry in load_corpus()}
    assert sorted(numbers) == EXPRESSIBLE


@pytest.mark.parametrize("entry", load_corpus(), ids=lambda entry: entry.name)
def test_a_corpus_entry_says_what_it_is_about(entry) -> None:
    assert entry.sources
    assert entry.symptom
    assert entry.clause.startswith("S")
    assert build(entry.case).problem.query.shape[1] == entry.case.q_len
