"""The matrix: what a cell's state is, which clauses a failure breaks, and which columns there are."""

import re
from dataclasses import replace
from typing import Any

import pytest

from attest.conformance.clauses import CLAUSES as ALL
from attest.conformance.record import Verdict
from attest.conformance.records.lines import lines_of
from attest.reports.matrix import matrix_of
from attest.reports.matrix_cells import State
from tests.reports.matrix_records import (
    CLAUSES,
    LINK,
    OTHER,
    PASSING,
    SUBJECT,
    WRONG,
    example,
    expected,
    judged,
    only,
    record,
)
from tests.reports.records import case, measurement, result, run

INCONCLUSIVE, TIMEOUT, ERROR = Verdict.INCONCLUSIVE, Verdict.TIMEOUT, Verdict.ERROR
BIAS: dict[str, Any] = {"bias": "bhq"}


def states(*results: Any, **others: Any) -> dict[str, State]:
    return {clause: cell.whole.state for clause, cell in only(*results, **others).cells.items()}


@pytest.mark.parametrize(
    ("results", "state"),
    [
        ((judged(**BIAS),), State.PASSES),
        ((judged(Verdict.XPASS, **BIAS),), State.PASSES),
        ((judged(INCONCLUSIVE, **BIAS), judged(seed=1, **BIAS)), State.PASSES),
        ((judged(INCONCLUSIVE, **BIAS),), State.INCONCLUSIVE),
        ((judged(TIMEOUT, **BIAS),), State.INCONCLUSIVE),
        ((judged(ERROR, **BIAS),), State.INCONCLUSIVE),
        ((judged(Verdict.UNSUPPORTED, **BIAS),), State.NOT_SUPPORTED),
        ((judged(Verdict.FAIL, **BIAS), judged(seed=1, **BIAS)), State.FAILS),
        ((expected(0, **BIAS),), State.FAILS),
        ((judged(),), State.NOT_RUN),
    ],
)
def test_the_state_of_a_cell_is_that_of_the_first_rule_that_holds(results: Any, state: State) -> None:
    assert states(*results, *PASSING)["S2"] == state


def test_what_is_not_declared_is_not_supported_even_if_cases_exercise_it() -> None:
    found = states(judged(window=(3, 0)), *PASSING)
    assert found["S7"] == State.NOT_SUPPORTED
    assert found["S29"] == State.NOT_SUPPORTED


def test_a_record_without_declarations_says_nothing_of_clauses_without_results() -> None:
    found = states(*PASSING, clauses=None)
    assert (found["S16"], found["S29"]) == (State.PASSES, State.NOT_RUN)


def test_refusals_show_that_arguments_are_refused_and_that_a_feature_is_not_supported() -> None:
    refused = [
        replace(judged(Verdict.UNSUPPORTED, check=f"refusal.undeclared_{name}"), clauses=("S20",))
        for name in ("window", "sinks", "padded", "packed")
    ]
    cells = only(*refused, *PASSING).cells
    assert cells["S20"].whole.state == State.PASSES
    assert cells["S9"].whole.state == State.NOT_SUPPORTED
    assert [cells[clause].refused for clause in ("S7", "S11", "S9", "S2")] == [1, 1, 2, 0]


def test_a_dtype_has_a_state_of_its_own() -> None:
    failing = [judged(Verdict.FAIL, seed, dtype="float32", bias="bhq") for seed in range(30, 34)]
    plain = [judged(seed=seed, dtype="float32") for seed in range(20)]
    cell = only(*failing, *plain, judged(seed=2, **BIAS), *PASSING).cells["S2"]
    assert {name: part.state for name, part in cell.dtypes.items()} == {
        "float32": State.FAILS,
        "bfloat16": State.PASSES,
    }
    undeclared = only(judged(dtype="float16"), *PASSING).cells["S1"]
    assert undeclared.dtypes["float16"].state == State.NOT_SUPPORTED
    assert undeclared.dtypes["float32"].state == State.NOT_RUN


def test_a_failure_breaks_the_clause_that_tells_its_cases_from_passing_ones() -> None:
    both = [judged(Verdict.FAIL, seed, causal=True, **BIAS) for seed in range(30, 34)]
    causal = [judged(seed=seed, causal=True) for seed in range(40, 60)]
    cells = only(*both, *causal, *PASSING).cells
    assert cells["S2"].whole.counts == {Verdict.FAIL: 4}
    assert cells["S6"].whole.state == State.PASSES
    assert cells["S6"].whole.elsewhere == 4
    assert cells["S1"].whole.state == cells["S16"].whole.state == State.PASSES


def test_a_clause_whose_cases_all_fail_for_another_one_is_inconclusive() -> None:
    both = [judged(Verdict.FAIL, seed, causal=True, **BIAS) for seed in range(30, 34)]
    bias = [judged(Verdict.FAIL, seed, **BIAS) for seed in range(40, 48)]
    assert states(*both, *bias, *PASSING)["S6"] == State.INCONCLUSIVE


def test_a_minimal_case_breaks_the_clauses_of_its_features() -> None:
    minimal = replace(judged(Verdict.FAIL, causal=True), minimal=True, shrunk_from="drawn")
    failing = judged(Verdict.FAIL, 1, causal=True, **BIAS)
    found = states(minimal, failing, PASSING[0])
    assert (found["S6"], found["S2"]) == (State.FAILS, State.INCONCLUSIVE)


def test_of_what_all_failing_cases_share_the_clauses_count_that_fewest_passing_cases_exercise() -> None:
    failing = judged(Verdict.FAIL, causal=True, segments=2, **BIAS)
    pairs: list[dict[str, Any]] = [
        {"causal": True, **BIAS},
        {"causal": True, "segments": 2},
        {"segments": 2, **BIAS},
    ]
    passing = [judged(seed=seed, **pair) for seed in range(3) for pair in pairs]
    cells = only(failing, *passing, *(judged(seed=seed, causal=True) for seed in range(8))).cells
    assert [clause for clause, cell in cells.items() if cell.whole.state == State.FAILS] == ["S2", "S8"]


def test_failures_without_a_feature_break_the_clauses_of_the_check() -> None:
    found = states(*(judged(Verdict.FAIL, seed) for seed in range(4)))
    assert [clause for clause, state in found.items() if state == State.FAILS] == ["S1", "S16"]


def test_wrong_gradients_alone_break_the_clause_of_gradients_too() -> None:
    wrong = replace(WRONG, output="dbias")
    failing = [
        replace(judged(Verdict.FAIL, seed, "gradients", ("S14",), **BIAS), measurements=(wrong,))
        for seed in range(30, 34)
    ]
    passing = [judged(seed=seed, **BIAS) for seed in range(30, 34)]
    right = [judged(seed=seed, check="gradients", own=("S14",)) for seed in range(20)]
    cells = only(*failing, *passing, *right, *PASSING).cells
    assert cells["S14"].whole.state == cells["S2"].whole.state == State.FAILS
    assert cells["S16"].whole.state == State.PASSES


def test_a_failure_of_a_check_of_one_property_breaks_its_clauses() -> None:
    failing = result(
        Verdict.FAIL, asked=case(causal=True), subject=SUBJECT, check="determinism", message="no"
    )
    found = states(replace(failing, clauses=("S17",)), *PASSING, clauses=(*CLAUSES, "S17"))
    assert [clause for clause, state in found.items() if state == State.FAILS] == ["S17"]


def test_a_failure_breaks_no_clause_that_is_not_declared() -> None:
    failing = [judged(Verdict.FAIL, seed, own=("S1", "S16", "S10"), q_len=2000) for seed in range(30, 34)]
    found = states(*failing, *PASSING)
    assert [clause for clause, state in found.items() if state == State.FAILS] == ["S1", "S16"]
    declared = states(*failing, *PASSING, clauses=(*CLAUSES, "S10"))
    assert [clause for clause, state in declared.items() if state == State.FAILS] == ["S10"]
    alone = replace(judged(Verdict.FAIL, check="law.any"), clauses=("S29",))
    assert len(only(alone, *PASSING).unattributed) == 1


def test_failures_of_no_clause_are_counted_beside_the_cells() -> None:
    lost = replace(judged(Verdict.FAIL, check="purity"), clauses=())
    column = only(lost, *PASSING)
    assert [each.key for each in column.unattributed] == [lost.key]
    assert not any(cell.whole.state == State.FAILS for cell in column.cells.values())


def test_an_expected_failure_is_a_failure_with_its_link() -> None:
    other = expected(9, "another fault", causal=True)
    cell = only(*(expected(seed, **BIAS) for seed in range(30, 33)), other, *PASSING).cells["S2"]
    assert [(fault.link, fault.reason, fault.results) for fault in cell.known] == [
        (LINK, "a bias is lost", 3)
    ]
    assert cell.whole.known
    new = [judged(Verdict.FAIL, seed, **BIAS) for seed in range(40, 44)]
    assert not only(expected(9, **BIAS), *new, *PASSING).cells["S2"].whole.known


def test_an_expected_failure_breaks_the_clauses_that_its_expectation_names() -> None:
    known = [replace(expected(seed, **BIAS), breaks=("S10", "S6")) for seed in range(30, 33)]
    cells = only(*known, *PASSING).cells
    assert [clause for clause, cell in cells.items() if cell.whole.state is State.FAILS] == ["S6"]
    assert cells["S2"].whole.state is State.INCONCLUSIVE


def test_the_evidence_is_the_simplest_failure_or_the_largest_error_that_passes() -> None:
    long = judged(Verdict.FAIL, 1, q_len=999, **BIAS)
    short = judged(Verdict.FAIL, 2, q_len=3, **BIAS)
    cells = only(long, short, judged(seed=90, ratio=0.7), *PASSING).cells
    assert cells["S2"].evidence == short
    assert cells["S2"].worst is not None
    assert cells["S2"].worst.ratio == 50.0
    assert cells["S1"].evidence is not None
    assert cells["S1"].evidence.case.seed == 90
    assert cells["S1"].worst is not None
    assert (cells["S1"].worst.ratio, cells["S1"].worst.output) == (0.7, "out")
    assert cells["S6"].evidence is None


def test_nan_is_the_worst_error() -> None:
    nan = replace(judged(Verdict.FAIL, **BIAS), measurements=(replace(WRONG, worst_ratio=float("nan")),))
    more = judged(Verdict.FAIL, 1, **BIAS)
    worst = only(nan, more, *PASSING).cells["S2"].worst
    assert worst is not None
    assert worst.result.key == nan.key


def test_an_unsupported_clause_has_no_evidence() -> None:
    cell = only(judged(window=(3, 0)), *PASSING).cells["S7"]
    assert (cell.evidence, cell.worst) == (None, None)


def test_a_column_is_an_implementation_in_a_version_on_a_device() -> None:
    gpu = {"backend": "gpu", "device": "NVIDIA H200"}
    records = [
        record(*PASSING),
        record(*PASSING, version="1.10"),
        record(*PASSING, version="1.9"),
        record(*PASSING, version="1.9rc1"),
        record(*PASSING, environment=gpu),
    ]
    columns = matrix_of(records).columns
    assert [(column.of.version, column.of.place) for column in columns] == [
        ("1.0", "CPU"),
        ("1.9rc1", "CPU"),
        ("1.9", "CPU"),
        ("1.10", "CPU"),
        ("1.0", "NVIDIA H200"),
    ]
    assert [column.id for column in columns] == [
        "toys.attention-1.0-cpu",
        "toys.attention-1.9rc1-cpu",
        "toys.attention-1.9-cpu",
        "toys.attention-1.10-cpu",
        "toys.attention-1.0-nvidia-h200",
    ]
    assert all(list(column.cells) == list(ALL) for column in columns)


def test_a_kernel_of_attest_has_its_version_and_commit_and_an_interpreter_is_named() -> None:
    declared = {"name": "toys.attention", "interpreter": "Triton", "dtypes": [], "clauses": list(CLAUSES)}
    ours = {"distributions": {}, "declarations": {SUBJECT: declared}}
    of = only(*PASSING, environment=ours).of
    assert (of.release, of.place) == ("attest-attention 0.1.0 at c0ffeec0ffee", "CPU, Triton interpreter")


def test_every_subject_of_a_record_has_a_column() -> None:
    other = replace(PASSING[0], subject="toys:OTHER")
    columns = matrix_of([record(*PASSING, other)]).columns
    assert [(column.subject, column.results) for column in columns] == [(SUBJECT, 20), ("toys:OTHER", 1)]


def test_columns_of_the_suite_of_most_are_aligned() -> None:
    found = example()
    assert [(column.of.version, found.aligned(column)) for column in found.columns] == [
        ("0.9", False),
        ("1.0", True),
        ("1.1", True),
    ]
    assert found.suites[1].words == "commit c0ffeec0ffee, profile quick, seed 0, --examples 3"
    shard = only(*PASSING, shard=(1, 4))
    assert shard.suite.narrowed == "shard 1/4"


def test_two_records_of_one_column_and_suite_are_refused() -> None:
    one, two = record(*PASSING, file="a.jsonl"), record(*PASSING[:3], file="b.jsonl")
    words = "toys.attention of toys 1.0 on CPU by commit c0ffeec0ffee, profile quick, seed 0"
    said = f"folder/b.jsonl: {words} is in folder/a.jsonl, too: give one of them"
    with pytest.raises(ValueError, match=re.escape(said)):
        matrix_of([one, two])
    assert len(matrix_of([one, record(*PASSING, seed=1)]).columns) == 2


def test_a_cell_that_is_worse_than_in_the_version_before_is_named_with_its_dtypes() -> None:
    older, old, new = example().columns
    assert (older.previous, old.previous, new.previous) == (None, older, old)
    assert new.worse == {"S6": ("", "float32")}
    assert old.worse == {}


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        ((judged(**BIAS),), (judged(Verdict.FAIL, **BIAS),), True),
        ((judged(**BIAS),), (judged(INCONCLUSIVE, **BIAS),), True),
        ((judged(INCONCLUSIVE, **BIAS),), (judged(Verdict.FAIL, **BIAS),), True),
        ((judged(Verdict.FAIL, **BIAS),), (judged(**BIAS),), False),
        ((judged(**BIAS),), (judged(),), False),
        ((judged(**BIAS),), (judged(seed=3, **BIAS),), False),
    ],
)
def test_worse_is_to_fail_or_to_show_less_than_before(before: Any, after: Any, worse: bool) -> None:
    records = [record(*before, *PASSING), record(*after, *PASSING, version="2.0")]
    _, column = matrix_of(records).columns
    assert ("S2" in column.worse) is worse


def test_the_same_version_by_another_suite_is_no_version_before() -> None:
    _, column = matrix_of([record(*PASSING), record(*PASSING, seed=1)]).columns
    assert column.previous is None


def test_a_subject_with_a_record_is_not_listed_as_not_run() -> None:
    run_by_name = replace(OTHER, name=SUBJECT)
    run_by_title = replace(OTHER, title="toys.attention")
    assert matrix_of([record(*PASSING)], [OTHER, run_by_name, run_by_title]).not_run == (OTHER,)


def test_older_spellings_are_read_and_broken_lines_named() -> None:
    broken = replace(lines_of(run(PASSING[0]), "file"), placed=lambda: iter([(None, b'{"subject": 3}')]))  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="file: result 1"):
        matrix_of([broken])


def test_the_order_of_the_records_does_not_matter() -> None:
    records = [record(*PASSING, version=version) for version in ("1.0", "2.0")]
    assert matrix_of(records) == matrix_of(records[::-1])


def test_measurements_of_passing_cases_do_not_hide_that_a_case_measured_nothing() -> None:
    plain = replace(judged(causal=True), measurements=())
    cell = only(plain, *PASSING).cells["S6"]
    assert cell.worst is None
    assert cell.evidence == plain
    assert measurement().worst_ratio == 0.4
