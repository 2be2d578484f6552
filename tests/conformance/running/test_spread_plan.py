"""Cases of subjects that spread the sequence over devices: every tiling, and orders of the keys alone."""

from dataclasses import replace
from typing import Any

from attest.conformance.cases.case import Case
from attest.conformance.cases.features import DTYPES, FEATURES
from attest.conformance.running.plan import Restriction, load_profile, tasks
from attest.conformance.subject import Sharding, Subject, Tiling

STRATEGIES = ("ring", "zigzag", "ring", "ulysses", "zigzag")


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("planning calls no kernel")


SPREAD = Subject(
    name="spread",
    call=_never,
    features=frozenset(FEATURES),
    dtypes=DTYPES,
    tilings=tuple(Tiling({"devices": 2, "strategy": each}, 8, 8) for each in STRATEGIES),
    sharding=Sharding(sequence=True),
)


def planned(subject: Subject, *features: str) -> list[Any]:
    """Every draw whose gradients are judged in the quick profile."""
    found = tasks(subject, load_profile("quick"), 0, Restriction(features=frozenset(features)))
    return [draw for task in found for draw, checks in task.draws if "gradients" in checks]


def test_each_strategy_gets_an_order_of_the_keys_and_nothing_else() -> None:
    listed = [draw for draw in planned(SPREAD) if isinstance(draw, Case)]
    of = {(case.tiling, *sorted(case.features)) for case in listed}
    assert of == {(tiling, feature) for tiling in (0, 1, 3) for feature in ("causal", "window")}
    assert {case.dtype for case in listed} == set(DTYPES)


def test_each_tiling_has_its_turn() -> None:
    drawn = [draw.offer.tiling for draw in planned(SPREAD) if not isinstance(draw, Case)]
    assert set(drawn) >= set(range(len(STRATEGIES)))


def test_a_subject_on_one_device_or_a_narrowed_run_gets_none() -> None:
    apart = replace(SPREAD, sharding=Sharding())
    windows = {draw.window for draw in planned(apart) if isinstance(draw, Case)}
    assert (3, 3) not in windows
    narrowed = planned(SPREAD, "sinks")
    assert narrowed
    assert not any(isinstance(draw, Case) for draw in narrowed)
