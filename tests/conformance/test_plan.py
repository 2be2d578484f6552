"""The cases of a plan follow from profile, seed and subject, and from nothing that happens to be loaded."""

import hashlib
import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from hypothesis import Phase
from hypothesis import strategies as st

from conformance.case import Case
from conformance.chance import try_values
from conformance.corpus import load_corpus
from conformance.features import FEATURES
from conformance.plan import Profile, draw, tasks
from conformance.strategies import cases
from conformance.subject import Subject, Tiling

ROOT = Path(__file__).parents[2]

# When strategies, families or the oracle's judgement of a case change on purpose, the failure says what to
# write here. Records of before then have other cases: baselines are to be made anew.
DIGEST = "0528f8ea1d08e89f"


def _not_called(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("planning calls no kernel")


SUBJECT = Subject(
    name="planned",
    call=_not_called,
    features=frozenset(FEATURES),
    dtypes=("float32", "bfloat16"),
    head_dims=(1, 16),
    tilings=(Tiling({}, 16, 16), Tiling({}, 32, 32)),
)
NUMBERS = {"alone": 1, "in_turn": True, "combined": 6, "long": 0, "corpus": False}
SMALL = Profile("small", 0, {"drawn": NUMBERS})


@cache
def planned_ids(seed: int = 0) -> tuple[str, ...]:
    return tuple(task.case.id for task in tasks(SUBJECT, SMALL, seed))


def test_literals_in_loaded_modules_change_no_case(tmp_path: Path) -> None:
    odd = random.Random(0)
    literals = [odd.randrange(100, 2**32) for _ in range(900)]
    (tmp_path / "full_of_literals.py").write_text(f"LITERALS = {literals}\n")
    plans = "from tests.conformance.test_plan import planned_ids; print(*planned_ids())"
    done = subprocess.run(
        [sys.executable, "-c", f"import full_of_literals; {plans}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert tuple(done.stdout.split()) == planned_ids()


def test_the_ids_of_a_plan_are_those_of_other_days_and_of_other_versions_of_hypothesis() -> None:
    assert hashlib.sha256("\n".join(planned_ids()).encode()).hexdigest()[:16] == DIGEST


def test_another_seed_gives_other_cases() -> None:
    assert not set(planned_ids(0)) & set(planned_ids(1))


def test_more_cases_begin_with_the_fewer() -> None:
    strategy = cases(SUBJECT, "float32")
    few, many = (draw(strategy, count, 3, lambda _: True) for count in (5, 9))
    assert many[:5] == few


def test_numbers_are_drawn_from_the_whole_of_their_range() -> None:
    drawn: list[tuple[int, int, bool]] = []
    strategy = st.tuples(st.integers(-2, 2), st.integers(0, 2**32 - 1), st.booleans())
    try_values(drawn.append, strategy, 500, 0, [Phase.generate])
    short, wide, flags = zip(*drawn, strict=True)
    assert set(short) == set(range(-2, 3))
    assert {0, 1, 2**32 - 2, 2**32 - 1} < set(wide)
    assert sum(n > 2**31 for n in wide) > 150
    assert 150 < sum(flags) < 350


def posed(subject: Subject, kind: str, numbers: dict[str, Any]) -> list[Case]:
    profile = Profile("known", 0, {kind: numbers})
    return [task.case for task in tasks(subject, profile, 0)]


def test_known_bugs_are_posed_to_the_checks_that_see_them() -> None:
    subject = replace(SUBJECT, dtypes=("float32", "bfloat16", "float16"), head_dims=(1, 128))
    nothing_drawn = {"alone": 0, "combined": 0, "long": 0, "examples": 0, "corpus": True}
    for kind in ("drawn", "transformed"):
        given = posed(subject, kind, nothing_drawn)
        assert given
        assert set(given) <= {entry.case for entry in load_corpus() if entry.kind == kind}


def test_known_bugs_are_posed_in_a_dtype_that_the_subject_takes() -> None:
    subject = replace(SUBJECT, dtypes=("float16",))
    cases_posed = posed(subject, "drawn", {"alone": 0, "combined": 0, "long": 0, "corpus": True})
    assert {case.dtype for case in cases_posed} == {"float16"}
    assert len(cases_posed) > len([entry for entry in load_corpus() if entry.case.dtype == "float16"])
