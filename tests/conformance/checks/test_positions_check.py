"""The check positions.shard, and cases with coordinates: a right kernel passes, and each wrong one fails."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attest.conformance.cases.build import build
from attest.conformance.cases.case import POSITION_PATTERNS, Case
from attest.conformance.cases.features import COORDINATES, FEATURES, NEEDS
from attest.conformance.cases.shapes import shapes_of
from attest.conformance.checks import all_checks
from attest.conformance.drawing.coordinates import COORDINATES as DRAWN
from attest.conformance.drawing.covering import covering_rows
from attest.conformance.drawing.dice import Deck, Dice
from attest.conformance.drawing.poison import poisoned
from attest.conformance.drawing.recipes import fillings, model
from attest.conformance.drawing.shapes import Blocks, Offer
from attest.conformance.judging.contrast import neighbours
from attest.conformance.judging.execute import call_of
from attest.conformance.judging.trial import Trial
from attest.conformance.mutants.kernels.callback import DIFFERENTIATED, Arrays, Passes, _attend
from attest.conformance.record import Verdict
from attest.conformance.running.plan import Restriction, load_profile, tasks
from attest.conformance.subject import Limits, Subject
from attest.reference.oracle import Cotangents, attention
from attest.reference.problem import make_problem
from attest.reference.semantics import STANDARD, Semantics

CHECK = all_checks()["positions.shard"]
OF_TOKENS = {"q_offset", "positions"}
Options = tuple[tuple[str, Any], ...]
Spoil = Callable[[dict[str, Any]], dict[str, Any]]


def _call(spoil: Spoil, query: Any, key: Any, value: Any, **options: Any) -> tuple[Any, Any]:
    """The oracle as a kernel, with its arguments spoilt."""
    given = {"query": query, "key": key, "value": value} | options
    arrays = {name: jnp.asarray(x) for name, x in given.items() if hasattr(x, "shape")}
    static = tuple(sorted((name, x) for name, x in given.items() if name not in arrays))
    varied = {name: arrays.pop(name) for name in DIFFERENTIATED if name in arrays}
    return _attend((_passes(spoil), static), varied, arrays)


def _passes(spoil: Spoil) -> Passes:
    def forward(options: Options, arrays: Arrays) -> tuple[Any, Any]:
        answer = attention(make_problem(**spoil(dict(options) | dict(arrays))))
        return answer.out.astype(arrays["query"].dtype), answer.lse.astype(np.float32)

    def gradients(options: Options, arrays: Arrays, d_out: Any, d_lse: Any) -> Arrays:
        problem = make_problem(**spoil(dict(options) | dict(arrays)))
        answer = attention(problem, STANDARD, Cotangents(d_out, d_lse)).items()
        return {name: answer[f"d{name}"] for name in DIFFERENTIATED if f"d{name}" in answer}

    return Passes(forward, gradients)


def subject(spoil: Spoil = lambda given: given, **declared: Any) -> Subject:
    features = frozenset(FEATURES) | set(COORDINATES)
    options: dict[str, Any] = {"features": features, "returns_lse": True} | declared
    return Subject("placed", partial(_call, spoil), **options)


def without(*names: str) -> Spoil:
    return lambda given: {name: value for name, value in given.items() if name not in names}


def only(axis: int) -> Spoil:
    """Keeps one number of the origin."""

    def spoil(given: dict[str, Any]) -> dict[str, Any]:
        origin = given.get("origin", (0, 0, 0, 0))
        return given | {"origin": tuple(start if at == axis else 0 for at, start in enumerate(origin))}

    return spoil


def by_position(given: dict[str, Any]) -> dict[str, Any]:
    """Dropout counts rows from the first position, as a kernel does that has no array coordinates."""
    if "q_positions" not in given or given["q_positions"].size == 0:
        return given
    batch, head, _, key = given.get("origin", (0, 0, 0, 0))
    return given | {"origin": (batch, head, max(int(given["q_positions"].min()), 0), key)}


WIDE = Case(
    batch=3,
    q_len=6,
    kv_len=9,
    q_heads=4,
    kv_heads=2,
    head_dim=4,
    causal=True,
    dropout=0.5,
    seed=1,
    family="uniform",
)
CASES = {
    "plain": WIDE,
    "one key head": replace(WIDE, kv_heads=1),
    "arrays": replace(WIDE, mask="bh", bias="1hq", segments=2, sinks=4, soft_cap=3.0),
    "broadcast": replace(WIDE, mask="11", bias="b11", sinks=2, sinks_per_head=True, window=(4, 2)),
    "padded": replace(WIDE, lengths=((6, 9), (2, 5), (4, 3))),
    "packed": replace(WIDE, batch=1, lengths=((2, 3), (3, 5))),
    "two entries": replace(WIDE, batch=2, lengths=((6, 9), (5, 8))),
    "elsewhere": replace(WIDE, positions="shuffled", origin=(2, 3, 70, 81)),
    "offset": replace(WIDE, q_offset=1),
    "offsets": replace(WIDE, q_offset=(1, -2, 4)),
    "packed offsets": replace(WIDE, batch=1, lengths=((2, 3), (3, 5)), q_offset=(1, -1)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_right_kernel_passes(case: Case) -> None:
    finding = CHECK.run(Trial(subject(), case))
    assert finding.verdict is Verdict.PASS, finding.message
    assert len(finding.measurements) >= 5 * (3 if case.batch > 1 else 2)


WRONG = {
    "no positions": (without("q_positions"), "rows 2 to 4 alone: outside the error model"),
    "no origin": (without("origin"), "alone: outside the error model"),
    "the origin of heads alone": (only(1), "batch 1 to 2 alone"),
    "the origin of batch entries alone": (only(0), "heads 2 to 4 alone"),
    "no origin of rows": (
        lambda given: only(0)(given) if _of_batch(given) else only(1)(given),
        "rows 2 to 4",
    ),
    "dropout by position": (by_position, "alone"),
}


def _of_batch(given: dict[str, Any]) -> bool:
    return given.get("origin", (0,))[0] > 0


@pytest.mark.parametrize(("spoil", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_kernel_fails(spoil: Spoil, message: str) -> None:
    finding = CHECK.run(Trial(subject(spoil), WIDE))
    assert finding.verdict is Verdict.FAIL
    assert message in finding.message


OFFSETS = (frozenset(FEATURES) | set(COORDINATES)) - {"positions"}
WITHOUT_POSITIONS = {name: case for name, case in CASES.items() if case.positions is None}


@pytest.mark.parametrize("case", WITHOUT_POSITIONS.values(), ids=WITHOUT_POSITIONS)
def test_a_right_kernel_without_positions_gets_offsets(case: Case) -> None:
    planned: list[dict[str, Any]] = []

    def spoil(given: dict[str, Any]) -> dict[str, Any]:
        planned.append(given)
        return given

    finding = CHECK.run(Trial(subject(spoil, features=OFFSETS), case))
    assert finding.verdict is Verdict.PASS, finding.message
    assert len(finding.measurements) >= 5 * (3 if case.batch > 1 else 2)
    assert not any("positions" in name for given in planned for name in given)
    assert any(np.ndim(given.get("q_offset")) == 1 for given in planned)


@pytest.mark.parametrize("name", ["offsets", "packed offsets", "padded"])
@pytest.mark.parametrize(
    "spoil",
    [
        without("q_offset"),
        lambda given: given | ({"q_offset": given["q_offset"] + 1} if "q_offset" in given else {}),
        lambda given: (
            given | ({"q_offset": given["q_offset"][:1].repeat(_sequences(given))} if _each(given) else {})
        ),
    ],
    ids=["no offset", "one further", "the first for all"],
)
def test_a_wrong_offset_fails(name: str, spoil: Spoil) -> None:
    finding = CHECK.run(Trial(subject(spoil, features=OFFSETS), CASES[name]))
    assert finding.verdict is Verdict.FAIL


def _each(given: dict[str, Any]) -> bool:
    return np.ndim(given.get("q_offset")) == 1


def _sequences(given: dict[str, Any]) -> int:
    return len(given["q_offset"])


def test_a_kernel_without_dropout_needs_no_origin() -> None:
    features = frozenset({"causal", "window", "gqa", "q_offset"})
    for case in (replace(WIDE, dropout=0.0), replace(WIDE, dropout=0.0, q_offset=(1, -2, 4))):
        finding = CHECK.run(Trial(subject(without_origin, features=features), case))
        assert finding.verdict is Verdict.PASS, finding.message


def without_origin(given: dict[str, Any]) -> dict[str, Any]:
    assert "origin" not in given
    return given


def test_the_pattern_alone_gives_dropout_away() -> None:
    """Values that are all equal show no error where as many weights are kept; the pattern does."""

    def spoil(given: dict[str, Any]) -> dict[str, Any]:
        one_hot = (given["value"] == 0).any() and (given["query"] == 0).all()
        return only(0)(given) if one_hot else given

    finding = CHECK.run(Trial(subject(spoil), WIDE))
    assert finding.verdict is Verdict.FAIL
    assert finding.message == "heads 2 to 4 alone: dropout keeps other weights"
    assert finding.clauses == ("S12",)


def test_a_whole_that_is_wrong_is_not_the_parts_fault() -> None:
    finding = CHECK.run(Trial(subject(without("causal")), WIDE))
    assert finding.verdict is Verdict.FAIL
    assert finding.message.startswith("the whole is outside the error model")


def test_nothing_to_cut() -> None:
    finding = CHECK.run(Trial(subject(), Case(kv_len=3)))
    assert finding.verdict is Verdict.INCONCLUSIVE


def test_rows_are_cut_where_lengths_may_end() -> None:
    finding = CHECK.run(
        Trial(
            subject(without("q_positions"), limits=Limits(length_multiple=4)),
            replace(WIDE, q_len=12, kv_len=16),
        )
    )
    assert "rows 4 to 8 alone" in finding.message


def test_a_padded_call_of_one_entry_is_not_planned_to_those_who_take_none() -> None:
    features = (frozenset(FEATURES) | set(COORDINATES)) - {"packed"}
    trial = Trial(subject(features=features), CASES["two entries"])
    measured = CHECK.run(trial).measurements
    assert len(measured) == len(CHECK.run(Trial(subject(), CASES["two entries"])).measurements) - 5


def test_who_is_asked() -> None:
    assert CHECK.applies(subject()) is None
    lacks = CHECK.applies(subject(features=frozenset(FEATURES)))
    assert lacks == "does not declare origin and q_offset or positions"
    assert CHECK.applies(subject(features=OFFSETS - {"origin"})) == "does not declare origin"
    assert CHECK.applies(subject(features=OFFSETS - {"q_offset"})) == "does not declare q_offset or positions"
    assert CHECK.applies(subject(features=OFFSETS - {"origin", "dropout"})) is None
    apart = CHECK.applies(subject(semantics=Semantics(causal="top_left")))
    assert apart is not None
    assert "aligns" in apart
    assert CHECK.clauses(Trial(subject(), WIDE)) == ("S23", "S12")
    assert CHECK.clauses(Trial(subject(), replace(WIDE, dropout=0.0))) == ("S23",)


def test_coordinates_are_drawn_for_those_who_declare_them() -> None:
    declared = frozenset(FEATURES) | set(COORDINATES)
    rows = list(covering_rows(model(declared), 1, seed=0))
    assert frozenset().union(*rows) >= set(COORDINATES)
    assert not any({"q_offset", "positions"} <= row for row in rows)
    offer = Offer("float32", blocks=Blocks(4, 8))
    drawn = [fillings(row, offer, seed, 1)[0] for row in rows for seed in range(40)]
    assert all(row & set(COORDINATES) <= fillings(row, offer, 0, 1)[0].features for row in rows)
    assert {case.positions for case in drawn} == {None, *POSITION_PATTERNS}
    assert all(case.features & set(NEEDS["q_offset"]) for case in drawn if case.features & OF_TOKENS)
    assert all(case.dropout for case in drawn if case.origin is not None)
    assert all(case.q_offset != case.kv_len - case.q_len for case in drawn)
    quick = load_profile("quick")
    narrowed = Restriction(features=frozenset({"origin"}), examples=2, checks=("forward",))
    planned = [case for task in tasks(subject(), quick, 0, narrowed) for case, _ in task.cases]
    assert all("origin" in case.features for case in planned)
    others = tasks(
        subject(features=frozenset(FEATURES)), quick, 0, Restriction(examples=2, checks=("forward",))
    )
    assert not any(case.features & set(COORDINATES) for task in others for case, _ in task.cases)
    assert model(frozenset(FEATURES)) == model()
    with pytest.raises(ValueError, match="expected some of"):
        subject(features=frozenset({"rotations"}))


def offset_of(case: Case, seed: int) -> Any:
    return DRAWN["q_offset"](case, frozenset(), Offer("float32"), Deck(0), Dice(seed, "row"))["q_offset"]


@pytest.mark.parametrize("name", ["plain", "padded", "packed"])
def test_offsets_are_drawn_for_each_sequence(name: str) -> None:
    case = CASES[name]
    drawn = [offset_of(case, seed) for seed in range(40)]
    each = [offsets for offsets in drawn if isinstance(offsets, tuple)]
    assert 10 < len(each) < 30
    usual = case.kv_len - case.q_len
    for offsets in each:
        assert len(offsets) == case.sequences
        assert usual not in offsets
        assert all(first != second for first, second in pairwise(offsets))
    one = replace(case, batch=1, lengths=None)
    assert all(isinstance(offset_of(one, seed), int) for seed in range(40))


def test_one_offset_for_all_sequences_is_a_neighbour() -> None:
    """A kernel that reads the first offset alone must be told from a right one."""
    for case in (CASES["offsets"], CASES["packed offsets"]):
        near = [
            other.q_offset for name, other in neighbours(build(case).problem, STANDARD) if name == "q_offset"
        ]
        assert near == [None, 1]
    same = replace(WIDE, q_offset=(2, 2, 2))
    near = [other.q_offset for name, other in neighbours(build(same).problem, STANDARD) if name == "q_offset"]
    assert near == [None]


def test_no_window_is_taken_to_hide_keys_that_positions_may_show() -> None:
    window = Case(q_len=2, kv_len=9, causal=True, window=(1, None))
    assert poisoned(window, 0) is not None
    for change in ({"q_offset": 0}, {"positions": "shuffled"}):
        assert poisoned(replace(window, **change), 0) is None


SHARD = replace(WIDE, positions="shard")


@pytest.mark.parametrize("case", [CASES["elsewhere"], CASES["offset"], CASES["packed offsets"], SHARD])
def test_shapes_and_neighbours_know_coordinates(case: Case) -> None:
    built = build(case)
    call = call_of(built)
    arrays, options = shapes_of(case)
    assert {name: (x.shape, x.dtype) for name, x in arrays.items()} == {
        name: (x.shape, x.dtype) for name, x in call.arrays.items()
    }
    assert {name: x for name, x in options.items() if name != "dropout_seed"} == {
        name: x for name, x in call.options if name != "dropout_seed"
    }
    named = {name for name, _ in neighbours(built.problem, STANDARD)}
    assert named >= case.features & set(COORDINATES)
