"""What counts as a regression: each rule by a pair of runs that differ in nothing else."""

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attest.conformance.record import RunRecord, Verdict
from attest.reports import comparison as compared
from attest.reports.compare import compare_records
from attest.reports.pairing import Fate
from attest.reports.rows import ALL
from attest.reports.spread import STATISTICS
from attest.reports.thresholds import SCOPES, limits
from tests.reports.records import (
    GOOD,
    KERNEL,
    SMALL,
    case,
    changed,
    example_base,
    example_head,
    measurement,
    one,
    result,
    run,
)

PASS, FAIL, ERROR, XFAIL, XPASS = Verdict.PASS, Verdict.FAIL, Verdict.ERROR, Verdict.XFAIL, Verdict.XPASS
INCONCLUSIVE, UNSUPPORTED = Verdict.INCONCLUSIVE, Verdict.UNSUPPORTED

# (rule, base, head, what its only regression says)
REGRESSIONS = {
    "a pass fails": ("_verdicts", GOOD, one(FAIL), "1 case PASS -> FAIL"),
    "a pass errs": ("_verdicts", GOOD, one(ERROR), "1 case PASS -> ERROR"),
    "a known failure is one no more": ("_verdicts", one(XFAIL), one(XPASS), "1 case XFAIL -> XPASS"),
    "an unexpected pass fails": ("_verdicts", one(XPASS), one(FAIL), "1 case XPASS -> FAIL"),
    "an unexpected pass runs out of time": (
        "_timeouts",
        one(XPASS),
        one(Verdict.TIMEOUT, phase="compiling"),
        "1 case timed out in compiling",
    ),
    "refused before, fails now": ("_verdicts", one(UNSUPPORTED), one(FAIL), "1 case UNSUPPORTED -> FAIL"),
    "a new case fails": (
        "_verdicts",
        GOOD,
        run(*GOOD.results, result(FAIL, asked=case(99))),
        "1 case FAIL and new",
    ),
    "a pass is inconclusive": ("_verdicts", GOOD, one(INCONCLUSIVE), "1 case PASS -> INCONCLUSIVE"),
    "a pass is refused": (
        "_verdicts",
        GOOD,
        one(UNSUPPORTED, measurements=()),
        "1 case PASS -> UNSUPPORTED",
    ),
    "a pass is excused": ("_verdicts", GOOD, one(XFAIL), "1 case PASS -> XFAIL"),
    "a pass runs out of time": (
        "_timeouts",
        GOOD,
        one(Verdict.TIMEOUT, phase="compiling"),
        "1 case timed out in compiling",
    ),
    "a new case runs out of time": (
        "_timeouts",
        GOOD,
        run(*GOOD.results, result(Verdict.TIMEOUT, asked=case(99), phase="running")),
        "1 case timed out in running",
    ),
    "passes are gone": ("_verdicts", GOOD, run(*GOOD.results[2:]), "2 cases PASS before and gone"),
    "a feature is no longer covered": (
        "_coverage",
        run(*GOOD.results, result(PASS, asked=case(50, causal=True))),
        replace(GOOD, seed=1),
        "our.kernel forward causal: 1 case passed, none is left",
    ),
    "a feature is only inconclusive now": (
        "_coverage",
        run(*GOOD.results, result(PASS, asked=case(50, causal=True))),
        run(*GOOD.results, result(INCONCLUSIVE, asked=case(51, causal=True)), seed=1),
        "our.kernel forward causal: 1 case passed, none is left",
    ),
    "other cases are drawn, without a feature": (
        "_coverage",
        run(*GOOD.results, result(PASS, asked=case(50, causal=True))),
        run(*GOOD.results, result(PASS, asked=case(51))),
        "our.kernel forward causal: 1 case passed, none is left",
    ),
    "fewer other cases are drawn": (
        "_verdicts",
        GOOD,
        run(*GOOD.results[:7], *(result(PASS, measurement(), asked=case(seed)) for seed in (50, 51))),
        "3 cases PASS before and gone",
    ),
    "an output of a failing case is wrong, too": (
        "_outputs",
        run(result(FAIL, SMALL, replace(SMALL, output="dkey", broken=()), check="gradients")),
        run(result(FAIL, SMALL, replace(SMALL, output="dkey"), check="gradients")),
        "our.kernel gradients bfloat16 dkey: wrong now, too, on 1 case that failed before",
    ),
    "err/bound": ("_numbers", GOOD, changed(worst_ratio=0.95), "max err/bound 0.4 -> 0.95"),
    "rms ratio": ("_numbers", GOOD, changed(rms_ratio=1.4), "max rms ratio 0.7 -> 1.4"),
    "median of the rms ratio, of short cases": (
        "_numbers",
        run(*(result(PASS, measurement(), asked=case(seed, kv_len=64)) for seed in range(8))),
        run(*(result(PASS, measurement(rms_ratio=1.2), asked=case(seed, kv_len=64)) for seed in range(8))),
        "median rms ratio 0.7 -> 1.2",
    ),
    "z": ("_numbers", GOOD, changed(largest_z=7.5), "largest z 3 -> 7.5"),
    "bias": ("_numbers", GOOD, changed(bias_t=30.0), "bias t 1 -> 30"),
    "bias the other way": ("_numbers", GOOD, changed(bias_t=-30.0), "bias t 1 -> 30"),
    "not a number": ("_numbers", GOOD, changed(worst_ratio=math.nan), "max err/bound 0.4 -> inf"),
    "infinite in few elements": (
        "_numbers",
        run(result(PASS, measurement(elements=1))),
        run(result(PASS, measurement(elements=0, worst_ratio=math.inf))),
        "max err/bound 0.4 -> inf",
    ),
    "one case among others": (
        "_numbers",
        run(*GOOD.results, result(PASS, measurement(rms_ratio=1.2), asked=case(50))),
        run(
            result(PASS, measurement(rms_ratio=1.25), asked=case(0)),
            *GOOD.results[1:],
            result(PASS, measurement(rms_ratio=1.2), asked=case(50)),
        ),
        "1 case got worse, most rms ratio 0.7 -> 1.25",
    ),
    "one feature among others": (
        "_numbers",
        run(
            *(result(PASS, measurement(rms_ratio=1.2), asked=case(seed)) for seed in range(10)),
            *(result(PASS, measurement(), asked=case(seed, causal=True, kv_len=64)) for seed in range(8)),
        ),
        run(
            *(result(PASS, measurement(rms_ratio=1.2), asked=case(seed)) for seed in range(10)),
            *(
                result(PASS, measurement(rms_ratio=1.3), asked=case(seed, causal=True, kv_len=64))
                for seed in range(8)
            ),
        ),
        "with causal, median rms ratio 0.7 -> 1.3",
    ),
    "other cases": (
        "_numbers",
        run(*(result(PASS, measurement(), asked=case(seed)) for seed in range(10)), seed=1),
        run(*(result(PASS, measurement(rms_ratio=1.4), asked=case(100 + seed)) for seed in range(10))),
        "max rms ratio 0.7 -> 1.4",
    ),
    "an output is gone": (
        "_unmeasured",
        run(result(PASS, measurement(), measurement("lse"))),
        run(result(PASS, measurement())),
        "our.kernel forward bfloat16 lse: no longer measured on 1 case",
    ),
    "a new problem": (
        "_problems",
        GOOD,
        replace(GOOD, problems=("stale expectation",)),
        "new problem: stale expectation",
    ),
    "head cut short": (
        "_unusable",
        GOOD,
        replace(GOOD, complete=False, note="interrupted", results=GOOD.results[:5]),
        "head record: incomplete: interrupted",
    ),
    "base cut short": (
        "_unusable",
        replace(GOOD, complete=False, results=GOOD.results[:5]),
        GOOD,
        "base record: incomplete",
    ),
    "nothing compared": ("_unusable", run(), run(), "head record: holds no results"),
}


def in_blocks(*keys: int) -> dict[str, Any]:
    """Return the environment of a record whose subject declares blocks of 16 queries and so many keys."""
    return {"block_sizes": {KERNEL: ", ".join(f"16x{size}" for size in keys)}}


NARROW = run(result(PASS, measurement(rms_ratio=0.415, bias_t=1.64)), environment=in_blocks(32))
WIDE = run(result(PASS, measurement(rms_ratio=0.775, bias_t=17.5)), environment=in_blocks(256))

FINE = {
    "nothing changed": (GOOD, GOOD),
    "still red": (one(FAIL), one(ERROR)),
    "red, then out of time": (one(FAIL), one(Verdict.TIMEOUT)),
    "out of time before": (one(Verdict.TIMEOUT), GOOD),
    "fixed": (one(FAIL), GOOD),
    "mended": (one(XFAIL), GOOD),
    "refused, then inconclusive": (one(UNSUPPORTED), one(INCONCLUSIVE)),
    "a red case is gone": (one(FAIL), run(*GOOD.results[1:])),
    "a new case passes": (run(*GOOD.results[1:]), GOOD),
    "first record": (run(), GOOD),
    "better numbers": (changed(rms_ratio=1.4, worst_ratio=0.9, bias_t=30.0, largest_z=9.0), GOOD),
    "another throw": (GOOD, changed(worst_ratio=0.5, rms_ratio=0.75, largest_z=3.6, bias_t=6.0)),
    "noise of few elements": (
        run(result(PASS, measurement(elements=2))),
        run(result(PASS, measurement(elements=2, rms_ratio=2.0, bias_t=20.0))),
    ),
    "noise of few keys": (
        run(result(PASS, measurement(), asked=case(kv_len=64))),
        run(result(PASS, measurement(rms_ratio=2.0, bias_t=20.0), asked=case(kv_len=64))),
    ),
    "as infinite as before": (changed(worst_ratio=math.inf), changed(worst_ratio=math.nan)),
    "an old problem": (replace(GOOD, problems=("a",)), replace(GOOD, problems=("a",))),
    "other cases, alike": (
        GOOD,
        run(*(result(PASS, measurement(rms_ratio=0.8), asked=case(60 + s)) for s in range(10)), seed=1),
    ),
    # What xla.flash_attention in float32 measured with key blocks of 32, then of 128 or 256.
    "a new default tile": (NARROW, WIDE),
    "a new default tile, the lse": (
        run(result(PASS, measurement("lse", rms_ratio=0.817)), environment=in_blocks(32)),
        run(result(PASS, measurement("lse", rms_ratio=1.2)), environment=in_blocks(256)),
    ),
    "another list of tiles, whose cases differ": (
        run(
            *(result(PASS, measurement(rms_ratio=0.275), asked=case(s, tiling=1)) for s in range(9)),
            environment=in_blocks(32, 64),
        ),
        run(
            *(
                result(PASS, measurement(rms_ratio=0.67, largest_z=6.7), asked=case(s, tiling=2))
                for s in range(9)
            ),
            environment=in_blocks(32, 128),
        ),
    ),
    "another list of tiles, so that other cases are drawn": (
        run(*(result(PASS, measurement(), asked=case(seed, tiling=seed % 3)) for seed in range(9))),
        run(*(result(PASS, measurement(), asked=case(seed, tiling=seed % 2)) for seed in range(9))),
    ),
    "a failure with another message": (one(FAIL, message="a 1"), one(FAIL, message="b 1")),
    "asked for less": (GOOD, run(*GOOD.results[:3], narrowed="--feature window")),
    "another shard": (GOOD, run(*GOOD.results[:3], shard=(1, 2))),
    "a lattice is judged by the bound alone": (
        run(result(PASS, measurement(), asked=case(family="integers"))),
        run(result(PASS, measurement(rms_ratio=9.0, largest_z=9.0), asked=case(family="integers"))),
    ),
    "a known failure fails harder": (
        run(*GOOD.results, result(XFAIL, measurement(worst_ratio=5.0), asked=case(50))),
        run(*GOOD.results, result(XFAIL, measurement(worst_ratio=900.0), asked=case(50))),
    ),
}


@pytest.mark.parametrize("blocks", [in_blocks(32), {}])
def test_only_other_block_sizes_excuse_what_they_change(blocks: dict[str, Any]) -> None:
    """The numbers are worse where the subject declares the same blocks, or a record says nothing of them."""
    comparison = compare_records(NARROW, replace(WIDE, environment=blocks))
    assert comparison.regressed
    assert {shift.statistic for shift in comparison.shifts} == {"rms_ratio", "bias_t"}


def test_other_block_sizes_excuse_no_more_than_they_change() -> None:
    worse = run(result(PASS, measurement(rms_ratio=1.3, bias_t=19.0)), environment=in_blocks(256))
    comparison = compare_records(NARROW, worse)
    assert {shift.statistic for shift in comparison.shifts} == {"rms_ratio", "bias_t"}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_each_rule_finds_its_regression(name: str) -> None:
    _, base, head, says = REGRESSIONS[name]
    comparison = compare_records(base, head)
    assert comparison.regressed
    assert [says in str(regression) for regression in comparison.regressions] == [True], (
        comparison.regressions
    )
    assert says in comparison.headline


@pytest.mark.parametrize("name", REGRESSIONS)
def test_no_other_rule_finds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, base, head, _ = REGRESSIONS[name]
    others = tuple(r for r in compared._RULES if r.__name__ != rule)
    assert len(others) == len(compared._RULES) - 1
    monkeypatch.setattr(compared, "_RULES", others)
    assert not compare_records(base, head).regressed


def test_every_rule_has_a_case() -> None:
    assert {rule.__name__ for rule in compared._RULES} == {rule for rule, *_ in REGRESSIONS.values()}


@pytest.mark.parametrize("name", FINE)
def test_no_false_alarm(name: str) -> None:
    comparison = compare_records(*FINE[name])
    assert not comparison.regressed, comparison.regressions
    assert comparison.headline.startswith("No regression")


@pytest.mark.found_outside
def test_two_runs_that_fail_alike_do_not_read_as_if_all_were_well() -> None:
    wrong = measurement(broken=("bound", "semantics"))
    record = run(
        *(result(FAIL, wrong, asked=case(seed, causal=True)) for seed in range(9)),
        *(result(PASS, measurement(), asked=case(seed)) for seed in range(9)),
        result(Verdict.ERROR, message="bad", check="lse"),
        result(Verdict.TIMEOUT, message="late", check="purity"),
    )
    comparison = compare_records(record, record)
    assert not comparison.regressed
    assert comparison.headline == (
        "No regression; head fails with 11 failing results (2 causes): 20 results compared"
    )


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (run(result(PASS)), ""),
        (run(result(XFAIL)), ""),
        (run(result(FAIL, message="bad")), "1 failing result (1 cause)"),
        (run(result(Verdict.TIMEOUT)), "1 failing result"),
        (run(result(PASS), problems=("stale", "old")), "2 problems"),
        (run(result(FAIL, message="bad"), problems=("stale",)), "1 failing result (1 cause) and 1 problem"),
    ],
)
def test_what_fails_head_is_named(head: RunRecord, says: str) -> None:
    comparison = compare_records(head, head)
    assert comparison.head_failures == says
    assert comparison.headline.startswith(f"No regression{f'; head fails with {says}' if says else ''}: ")


def test_the_other_checks_of_a_case_that_ran_out_of_time_are_not_lost() -> None:
    """The task is one result: which checks it would have passed nobody knows."""
    base = run(*(result(PASS, asked=case(1), check=check) for check in ("forward", "lse", "purity")))
    head = run(result(Verdict.TIMEOUT, asked=case(1), phase="compiling"))
    comparison = compare_records(base, head)
    assert [str(regression) for regression in comparison.regressions] == [
        "our.kernel forward bfloat16: 1 case timed out in compiling"
    ]
    assert len(comparison.of_fate(Fate.UNREACHED)) == 2
    assert "2 results of base not reached in head: their cases timed out" in comparison.notes


def test_two_regressions_are_counted_the_gravest_first() -> None:
    comparison = compare_records(example_base(), example_head())
    assert comparison.headline.startswith(
        "6 regressions: our.kernel forward bfloat16: 1 case PASS -> FAIL, 1 case PASS -> INCONCLUSIVE; their."
    )
    assert len(comparison.of_fate(Fate.FIXED)) == 1


def test_another_profile_or_seed_is_noted_and_no_loss() -> None:
    other = run(
        *(result(PASS, measurement(), asked=case(60 + s)) for s in range(10)), profile="nightly", seed=3
    )
    comparison = compare_records(GOOD, other)
    notes = " ".join(comparison.notes)
    assert "profile: base quick, head nightly" in notes
    assert "seed: base 0, head 3" in notes
    assert "1 of 1 row of numbers compare different cases" in notes
    assert not comparison.regressed


def test_what_is_new_and_what_is_gone_is_noted() -> None:
    base = run(result(PASS, measurement()), result(FAIL, subject="old"))
    head = run(
        result(PASS, measurement(), measurement("lse")),
        result(PASS, check="purity"),
        result(PASS, subject="new"),
    )
    notes = compare_records(base, head).notes
    assert "new in head: subject new" in notes
    assert "only in base: subject old" in notes
    assert "new in head: check our.kernel purity" in notes
    assert "new in head: output our.kernel forward lse" in notes


def test_a_question_answered_twice_counts_with_its_worst_answer() -> None:
    assert compare_records(GOOD, run(*GOOD.results, *one(FAIL).results)).regressed


def test_rows_are_by_feature_and_hold_the_extremes() -> None:
    record = run(
        result(PASS, measurement(rms_ratio=0.5, bias_t=-5.0), asked=case(0)),
        result(PASS, measurement(rms_ratio=0.6), asked=case(1)),
        result(PASS, measurement(rms_ratio=1.0, worst_ratio=0.9), asked=case(2, causal=True)),
    )
    rows = {row.feature: row.head for row in compare_records(record, record).rows}
    whole, causal = rows[ALL], rows["causal"]
    assert whole is not None
    assert causal is not None
    assert (whole.results, whole.worst_ratio, whole.rms_ratio, whole.rms_median) == (3, 0.9, 1.0, 0.6)
    assert (whole.bias_t, causal.results, causal.rms_median) == (5.0, 1, 1.0)


def test_the_order_of_results_does_not_matter() -> None:
    base, head = example_base(), example_head()
    turned = compare_records(
        replace(base, results=base.results[::-1]), replace(head, results=head.results[::-1])
    )
    assert turned.regressions == compare_records(base, head).regressions
    assert turned.rows == compare_records(base, head).rows


def test_every_threshold_has_a_reason() -> None:
    text = (Path(compared.__file__).parent / "compare.toml").read_text()
    assert set(tomllib.loads(text)) == set(SCOPES)
    for scope in SCOPES:
        assert set(limits(scope)) == set(STATISTICS) - ({"rms_median"} if scope == "case" else set())
        assert all(len(limit.reason) > 20 for limit in limits(scope).values())
