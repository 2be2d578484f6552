"""The planted defects: each can be planted, and is killed again by the cases that killed it."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from attest.conformance.cases.build import build
from attest.conformance.cases.case import Case, case_from_json
from attest.conformance.judging.execute import execute
from attest.conformance.mutants.catalogue import Mutant, load, source_of
from attest.conformance.mutants.clean_kernel import planted_kernel
from attest.conformance.mutants.clean_score import Judge, clean_mutant, drawn, read_kills

DEFECTS, NULLS = load("clean_kernel"), load("nulls")
KILLED = read_kills()
SEEDS = ("0", "1", "2")
# Cases of the kills on which correct kernels are judged: one in so many.
SAMPLED = 40
JUDGE = Judge()


def wanted_profiles(name: str) -> list[str]:
    """The profiles that must kill a defect."""
    return ["standard", "quick"] if DEFECTS[name].quick else ["standard"]


def kills(name: str) -> list[tuple[str, int, str, Case]]:
    """(profile, seed, check, case) of each kill of a defect."""
    return [
        (profile, int(seed), kill["check"], case_from_json(kill["case"]))
        for profile, seeds in sorted(KILLED[name].items())
        for seed, kill in sorted(seeds.items())
    ]


@cache
def planned(lacks: tuple[str, ...], variant: str, profile: str, seed: int) -> frozenset[tuple[str, str]]:
    """(case, check) of everything that a profile plans for a mutant."""
    cases = drawn(clean_mutant(lacks, variant), profile, seed)
    return frozenset((case.id, check) for case, checks in cases for check in checks)


def judged(mutant: Mutant, case: Case, check: str) -> str:
    """What is red, if anything."""
    with planted_kernel(mutant) as kernel:
        red = JUDGE.first_red(kernel, case, [check])
    return "" if red is None else red.message


@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_a_defect_changes_the_kernel_s_source(name: str) -> None:
    defect = DEFECTS[name]
    assert defect.edits
    for file in {edit.file for edit in defect.edits}:
        assert source_of(defect, file) != source_of(clean_mutant(), file)


def test_each_defect_was_killed_with_each_seed() -> None:
    assert set(KILLED) == set(DEFECTS)
    for name in DEFECTS:
        for profile in wanted_profiles(name):
            assert set(SEEDS) <= set(KILLED[name].get(profile, {})), (name, profile)


# What the quick profile must kill is judged again in every test run, by its cases; all others every night.
QUICK = [(name, "quick") for name in sorted(KILLED) if DEFECTS[name].quick]
AT_NIGHT = [
    pytest.param(name, profile, marks=pytest.mark.nightly)
    for name in sorted(KILLED)
    for profile in sorted(KILLED[name])
    if (name, profile) not in QUICK
]


@pytest.mark.parametrize(("name", "profile"), [*QUICK, *AT_NIGHT])
def test_a_defect_is_killed_by_the_cases_that_killed_it(name: str, profile: str) -> None:
    found = [kill for kill in kills(name) if kill[0] == profile]
    assert found
    for _profile, seed, check, case in found:
        message = judged(DEFECTS[name], case, check)
        assert message, (name, seed, check, case.to_json())
        assert not message.startswith("raised"), message


@pytest.mark.parametrize("name", sorted(KILLED))
def test_the_profile_still_plans_the_cases_that_killed(name: str) -> None:
    defect = DEFECTS[name]
    for profile, seed, check, case in kills(name):
        assert (case.id, check) in planned(defect.lacks, defect.variant, profile, seed), (profile, seed, case)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(NULLS))
def test_a_correct_kernel_passes_the_cases_that_kill_others(name: str) -> None:
    every = [kill for defect in sorted(KILLED) for kill in kills(defect) if not DEFECTS[defect].lacks]
    for _profile, _seed, check, case in every[::SAMPLED]:
        assert judged(NULLS[name], case, check) == "", case.to_json()


@pytest.mark.parametrize(
    "case",
    [
        Case(batch=2, q_len=70, kv_len=90, q_heads=2, kv_heads=1, head_dim=8, causal=True, mask="bh", seed=3),
        Case(dtype="bfloat16", q_len=20, kv_len=70, head_dim=16, soft_cap=2.0, dropout=0.5, sinks=2, seed=4),
    ],
    ids=["float32", "bfloat16"],
)
def test_the_kernel_in_numpy_is_the_one_in_jax(case: Case) -> None:
    answers: list[dict[str, Any]] = []
    for jax in (False, True):
        with planted_kernel(NULLS["nothing"], jax=jax) as kernel:
            answers.append(execute(kernel.subject, build(case), 0))
    for name, array in answers[0].items():
        other = answers[1][name]
        assert array.dtype == other.dtype
        size = np.abs(other.astype(np.float64)).max()
        unit = 2.0**-8 if array.dtype.name == "bfloat16" else 2.0**-20
        difference = np.abs(array.astype(np.float64) - other.astype(np.float64)).max()
        assert difference <= 4 * unit * size, name
