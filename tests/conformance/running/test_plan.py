"""The cases of a plan follow from profile and seed, and from no name, tile or import."""

import hashlib
import os
import pickle
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import Phase
from hypothesis import strategies as st

from attest.conformance.cases.build import build
from attest.conformance.cases.case import Case
from attest.conformance.cases.features import DTYPES, FEATURES
from attest.conformance.checks import all_checks
from attest.conformance.drawing.corpus import load_corpus
from attest.conformance.drawing.covering import wanted_sets
from attest.conformance.drawing.recipes import drawing, model
from attest.conformance.drawing.seeded_draws import try_values
from attest.conformance.judging import trial
from attest.conformance.judging.execute import call_of
from attest.conformance.judging.trial import Trial
from attest.conformance.running import choice
from attest.conformance.running.plan import Profile, Restriction, load_profile, profile_names, tasks
from attest.conformance.running.runner import in_shard
from attest.conformance.subject import Limits, Subject, Tiling, Way

ROOT = Path(__file__).parents[3]

# When recipes, families or the oracle's judgement of a case change on purpose, the failure says what to
# write here. Records of before then have other cases: baselines are to be made anew.
DIGEST = "5784e50b561dc900"


def _not_called(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("planning calls no kernel")


SUBJECT = Subject(
    name="posed",
    call=_not_called,
    features=frozenset(FEATURES),
    dtypes=DTYPES,
    tilings=(Tiling({"blocks": 16}, 16, 16), Tiling({}, 256, 256)),
)
NUMBERS = {"strength": 1, "arrays": 1, "alone": 0, "fillings": 2, "corpus": False, "edges": "none"}
SMALL = Profile("small", 0, {"drawn": NUMBERS})
PAIRS = replace(SMALL, kinds={"drawn": {**NUMBERS, "strength": 2, "fillings": 1}})


def drawn(subject: Subject, profile: Profile = SMALL, seed: int = 0, only: Any = None) -> list[Case]:
    """Every case of a plan that is held to the oracle."""
    found = tasks(subject, profile, seed, only or Restriction())
    return [case for task in found for case, checks in task.cases if "gradients" in checks]


@cache
def planned_ids(seed: int = 0) -> tuple[str, ...]:
    return tuple(case.id for case in drawn(SUBJECT, seed=seed))


def test_literals_in_loaded_modules_change_no_case(tmp_path: Path) -> None:
    odd = random.Random(0)
    literals = [odd.randrange(100, 2**32) for _ in range(900)]
    (tmp_path / "full_of_literals.py").write_text(f"LITERALS = {literals}\n")
    plans = "from tests.conformance.running.test_plan import planned_ids; print(*planned_ids())"
    done = subprocess.run(
        [sys.executable, "-c", f"import full_of_literals; {plans}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert tuple(done.stdout.split()) == planned_ids()


def test_the_ids_of_a_plan_are_those_of_other_days_and_of_other_machines() -> None:
    assert hashlib.sha256("\n".join(planned_ids()).encode()).hexdigest()[:16] == DIGEST


def test_another_seed_gives_other_cases() -> None:
    assert not set(planned_ids(0)) & set(planned_ids(1))


def test_a_plan_takes_no_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: Any) -> NoReturn:
        raise AssertionError("the process that judges a case chooses it")

    monkeypatch.setattr(choice, "is_sensitive", called)
    monkeypatch.setattr(trial, "build", called)
    for subject in (SUBJECT, replace(SUBJECT, dtypes=("float16",))):
        planned = [*tasks(subject, replace(SMALL, kinds={"drawn": {**NUMBERS, "corpus": True}}), 0)]
        assert planned
        for task in planned:
            assert pickle.loads(pickle.dumps(task)) == task
            assert sum(in_shard(subject.name, task, (number, 3)) for number in (1, 2, 3)) == 1


def test_a_case_is_judged_with_the_exact_answers_that_it_was_chosen_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[Any] = []
    exact = trial.neighbourhood
    monkeypatch.setattr(trial, "neighbourhood", lambda *given: computed.append(given) or exact(*given))
    draw, _ = next(tasks(SUBJECT, SMALL, 3)).draws[0]
    case = choice.chosen(draw)
    assert case is not None
    tried = len(computed)
    assert tried > 0
    assert not Trial(SUBJECT, case).blind_spots
    assert len(computed) == tried


def test_a_name_changes_no_case() -> None:
    assert drawn(replace(SUBJECT, name="renamed")) == drawn(SUBJECT)


def test_a_new_production_tile_changes_no_case() -> None:
    small, _ = SUBJECT.tilings
    assert drawn(replace(SUBJECT, tilings=(small, Tiling({}, 64, 512)))) == drawn(SUBJECT)


def test_subjects_share_cases_wherever_both_support_them() -> None:
    less = replace(SUBJECT, features=SUBJECT.features - {"dropout", "sinks"})
    whole, part = drawn(SUBJECT, PAIRS), drawn(less, PAIRS)
    shared = [case for case in whole if not case.features & {"dropout", "sinks"}]
    assert shared
    assert set(shared) <= set(part)


def facts_of(case: Case) -> frozenset[str]:
    """What a case holds together; of its lengths only whether they are long."""
    groups = {family: group for group, names in drawing()["families"].items() for family in names}
    long = {"long"} if case.kv_len >= 1024 and case.q_len >= 128 else set[str]()
    return frozenset({*case.features, case.dtype, groups.get(case.family, "capped"), *long})


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_the_quick_profile_plans_every_pair_of_features_and_each_with_each_dtype(seed: int) -> None:
    planned = drawn(SUBJECT, load_profile("quick"), seed)
    held = {facts_of(case) for case in planned}
    told = {*FEATURES, *DTYPES, "long"}
    for wanted in wanted_sets(model(), 2):
        if wanted <= told and wanted & {*FEATURES}:
            assert any(wanted <= facts for facts in held), sorted(wanted)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_profile_plans_what_kernels_count_beyond_their_small_numbers(seed: int) -> None:
    planned = drawn(SUBJECT, load_profile("quick"), seed)
    assert any(case.q_heads == case.kv_heads > 1 for case in planned)
    assert any(case.kv_heads > 1 for case in planned if "gqa" in case.features)
    assert any(case.batch > 4 for case in planned)
    assert any(case.sinks > 4 for case in planned)
    assert any(case.q_len > 64 and case.family == "huge" for case in planned)
    for feature in ("window", "padded", "packed"):
        assert any(case.kv_len > 4 * 64 and feature in case.features for case in planned)
    assert any(case.q_len > case.kv_len for case in planned)
    assert any(0 in pair for case in planned for pair in case.lengths or ())


def test_a_row_takes_what_a_subject_declares() -> None:
    narrow = replace(SUBJECT, dtypes=("bfloat16",), head_dims=(64, 128), limits=Limits(longest=512))
    planned = drawn(narrow, PAIRS)
    assert {case.dtype for case in planned} == {"bfloat16"}
    assert all(min(case.head_dim, case.value_width) >= 64 for case in planned)
    assert all(max(case.head_dim, case.value_width) <= 128 for case in planned)
    assert max(max(case.q_len, case.kv_len) for case in planned) <= 512
    assert frozenset().union(*(case.features for case in planned)) == narrow.features


def test_features_on_the_command_line_are_in_every_case() -> None:
    planned = drawn(SUBJECT, only=Restriction(features=frozenset({"sinks", "window"}), examples=7))
    assert len(planned) == 7
    assert all({"sinks", "window"} <= case.features for case in planned)


def test_poison_is_planned_where_it_hides_something() -> None:
    profile = replace(PAIRS, kinds={**PAIRS.kinds, "poisoned": {}})
    planned = [
        case for task in tasks(SUBJECT, profile, 0) for case, checks in task.cases if "poison" in checks
    ]
    assert len(planned) > 5
    for case in planned:
        arrays, others = (call_of(build(replace(case, poison=poison))).arrays for poison in (True, False))
        assert any(arrays[name].tobytes() != others[name].tobytes() for name in arrays), case.to_json()


def test_the_cases_of_a_task_share_what_is_compiled() -> None:
    for task in tasks(SUBJECT, load_profile("quick"), 0):
        programs = {
            (
                case.tiling,
                call_of(build(case)).options,
                tuple(
                    (name, array.shape, array.dtype) for name, array in call_of(build(case)).arrays.items()
                ),
            )
            for case, _ in task.cases
        }
        assert len(programs) == 1


def test_numbers_are_drawn_from_the_whole_of_their_range() -> None:
    drawn: list[tuple[int, int, bool]] = []
    strategy = st.tuples(st.integers(-2, 2), st.integers(0, 2**32 - 1), st.booleans())
    try_values(drawn.append, strategy, 500, 0, [Phase.generate])
    short, wide, flags = zip(*drawn, strict=True)
    assert set(short) == set(range(-2, 3))
    assert {0, 1, 2**32 - 2, 2**32 - 1} < set(wide)
    assert sum(n > 2**31 for n in wide) > 150
    assert 150 < sum(flags) < 350


def planned(subject: Subject, kind: str, numbers: dict[str, Any]) -> list[Case]:
    profile = Profile("known", 0, {kind: numbers})
    return [case for task in tasks(subject, profile, 0) for case, _ in task.cases]


def test_every_table_of_a_profile_and_every_known_bug_has_a_kind_of_check() -> None:
    tables = {check.kind.table for check in all_checks().values()}
    for name in profile_names():
        kinds = load_profile(name).kinds
        fewer = {"delegated", "configured", "spread"}
        assert {*kinds, *(table for name in fewer for table in kinds.get(name, {}))} - fewer <= tables
    assert {entry.kind for entry in load_corpus()} <= tables


def test_a_subject_with_ways_gets_the_fewest_cases_of_those_that_pass_their_calls_on() -> None:
    delegated = replace(SUBJECT, implementation=lambda _: "xla")
    configured = replace(delegated, ways=(Way("alike", _not_called, _not_called, {}),))
    counts: dict[str, list[int]] = {}
    for name in ("quick", "standard"):
        subjects = (SUBJECT, delegated, configured)
        counts[name] = [
            sum(len(task.draws) for task in tasks(each, load_profile(name), 0)) for each in subjects
        ]
        assert counts[name] == sorted(counts[name], reverse=True)
    # In the profile quick: the last row, which has the fewest features, and one call of several blocks.
    row, call = tasks(configured, load_profile("quick"), 0)
    assert (counts["quick"][2], len(row.draws), call.checks) == (2, 1, ("configuration",))
    rows = [
        len(task.case.features)
        for task in tasks(delegated, load_profile("quick"), 0)
        if "forward" in task.checks
    ]
    assert len(row.case.features) == min(rows) < max(rows)


def test_known_bugs_are_given_to_the_checks_that_see_them() -> None:
    subject = replace(SUBJECT, dtypes=("float32", "bfloat16", "float16"), head_dims=(1, 128))
    nothing_drawn = {
        "arrays": 0,
        "strength": 1,
        "fillings": 1,
        "alone": 0,
        "examples": 0,
        "corpus": True,
        "edges": "none",
    }
    for kind in ("drawn", "transformed"):
        given = planned(subject, kind, nothing_drawn)
        assert given
        assert set(given) <= {entry.case for entry in load_corpus() if entry.kind == kind}


def test_cases_at_the_ends_of_arguments_are_given_to_who_promises_something_of_them() -> None:
    nothing_drawn = {"arrays": 0, "strength": 1, "fillings": 1, "alone": 0, "corpus": False, "edges": "all"}
    standard = planned(SUBJECT, "drawn", nothing_drawn)
    assert {0} <= {case.q_len for case in standard} & {case.kv_len for case in standard}
    assert len(standard) == len(drawing()["edges"])
    assert (None, 0) in {case.window for case in standard}
    quick = planned(SUBJECT, "drawn", {**nothing_drawn, "edges": "quick"})
    assert set(quick) < set(standard)
    assert len(quick) == sum(table.get("quick", False) for table in drawing()["edges"].values())
    dialect = replace(SUBJECT, semantics=replace(SUBJECT.semantics, empty_rows="nan"))
    assert all(case.kv_len for case in planned(dialect, "drawn", nothing_drawn))


def test_a_dialect_that_leaves_empty_rows_open_gets_no_case_with_some() -> None:
    """All others do; and a count of examples is one of cases that are planned."""
    subject = replace(SUBJECT, semantics=replace(SUBJECT.semantics, empty_rows="unspecified"))
    only = Restriction(features=frozenset({"mask"}), examples=9)
    planned = drawn(subject, only=only)
    assert len(planned) == 9
    assert not any(Trial(subject, case).has_empty_rows for case in planned)
    assert any(Trial(SUBJECT, case).has_empty_rows for case in drawn(SUBJECT, only=only))


def test_known_bugs_are_planned_in_a_dtype_that_the_subject_takes() -> None:
    subject = replace(SUBJECT, dtypes=("float16",))
    nothing_drawn = {"arrays": 0, "strength": 1, "fillings": 1, "alone": 0, "corpus": True, "edges": "none"}
    cases_planned = planned(subject, "drawn", nothing_drawn)
    assert {case.dtype for case in cases_planned} == {"float16"}
    assert len(cases_planned) > len([entry for entry in load_corpus() if entry.case.dtype == "float16"])
