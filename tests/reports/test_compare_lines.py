"""Comparisons of records that are read line by line: what they say is what the records in memory say."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.conformance.cases.case import Case, case_from_json
from attest.conformance.record import Measurement, Result, RunRecord, Verdict
from attest.conformance.records.lines import open_lines
from attest.conformance.records.record_file import write_record
from attest.reports.compare import compare_lines, compare_records
from attest.reports.comparison import Comparison
from attest.reports.found import facts_of, of_lines, of_results
from attest.reports.pairing import Fate
from attest.reports.render.comparison_html import render_html
from attest.reports.render.comparison_json import render_json
from attest.reports.render.comparison_junit import render_junit
from attest.reports.render.markdown import render_comparison
from tests.reports.records import GOOD, case, example_base, example_head, measurement, result, run

RENDERERS = (render_json, render_junit, render_comparison, render_html)

CASES = tuple(
    case(seed, **fields)
    for seed, fields in enumerate(
        (
            {},
            {"causal": True},
            {"dtype": "float16", "soft_cap": 30.0, "family": "cap_scaled"},
            {"batch": 2, "q_heads": 4, "kv_heads": 2, "lengths": ((64, 1000), (3, 1024))},
            {"mask": "bh1k", "bias": "11q1", "value_dim": 16, "family": "integers"},
        )
    )
)
NUMBERS = st.sampled_from((0.1, 0.4, 0.9, 1.7, 40.0, math.inf, math.nan))
MEASUREMENTS = st.builds(
    measurement,
    output=st.sampled_from(("out", "dquery")),
    worst_ratio=NUMBERS,
    rms_ratio=NUMBERS,
    largest_z=NUMBERS,
    elements=st.sampled_from((0, 9, 4096)),
    broken=st.sampled_from(((), ("bound",), ("bound", "semantics"))),
)
RESULTS = st.builds(
    lambda verdict, asked, subject, check, measurements, minimal, cut, message: result(
        verdict,
        *measurements,
        asked=asked,
        subject=subject,
        check=check,
        minimal=minimal,
        cut=minimal and cut,
        message=message,
        shrunk_from=CASES[0].id if minimal else "",
    ),
    st.sampled_from(Verdict),
    st.sampled_from(CASES),
    st.sampled_from(("one.kernel", "other.kernel")),
    st.sampled_from(("forward", "gradients", "purity")),
    st.lists(MEASUREMENTS, max_size=3),
    st.booleans(),
    st.booleans(),
    st.sampled_from(("", "raised 0x12")),
)
RUNS = st.builds(
    lambda results, seed, complete: run(*results, seed=seed, complete=complete),
    st.lists(RESULTS, max_size=12),
    st.sampled_from((0, 1)),
    st.booleans(),
)


def streamed(base: RunRecord, head: RunRecord, folder: Path) -> Comparison:
    """Return the comparison of two records that were written as lines."""
    paths = [folder / name for name in ("base.jsonl", "head.jsonl.gz")]
    for record, path in zip((base, head), paths, strict=True):
        write_record(record, path)
    return compare_lines(*map(open_lines, paths))


@given(base=RUNS, head=RUNS)
def test_lines_are_compared_as_records_are(
    base: RunRecord, head: RunRecord, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = streamed(base, head, tmp_path_factory.mktemp("lines"))
    for render in RENDERERS:
        assert render(found) == render(compare_records(base, head))


def test_the_example_is_compared_as_records_are(tmp_path: Path) -> None:
    found = streamed(example_base(), example_head(), tmp_path)
    assert found.regressed
    for render in RENDERERS:
        assert render(found) == render(compare_records(example_base(), example_head()))


@pytest.mark.parametrize("render", RENDERERS)
def test_a_new_failure_without_a_number_is_explained_once(render: Any, tmp_path: Path) -> None:
    """Read anew, it does not equal itself: its err/bound is NaN."""
    base = run(result(Verdict.PASS, measurement(worst_ratio=0.1), asked=CASES[1]))
    head = run(result(Verdict.FAIL, measurement(worst_ratio=math.nan, broken=("bound",)), asked=CASES[1]))
    assert render(streamed(base, head, tmp_path)) == render(compare_records(base, head))


def test_only_what_changed_or_fails_is_kept() -> None:
    failing = result(Verdict.FAIL, measurement(broken=("bound",)), asked=case(50))
    comparison = compare_records(run(*GOOD.results, failing), run(*GOOD.results[1:], failing))
    assert comparison.both == len(GOOD.results)
    assert {(pair.case_id, pair.fate) for pair in comparison.pairs} == {
        (GOOD.results[0].case.id, Fate.LOST),
        (failing.case.id, Fate.SAME),
    }


@pytest.mark.parametrize("asked", CASES)
def test_a_line_tells_of_a_case_what_the_case_does(asked: Case, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_record(run(result(asked=asked)), path)
    (found,) = of_lines(open_lines(path), "here")
    assert found.facts == facts_of(asked)
    assert found.result == result(asked=asked)


def test_a_value_dim_that_is_the_head_dim_is_no_feature() -> None:
    data = case(3).to_json() | {"value_dim": 64}
    line = run(result(asked=case_from_json(data)))
    assert facts_of(line.results[0].case).features == ()
    (found,) = of_lines([_line(data)], "here")
    assert found.facts.features == ()


def test_an_older_name_of_a_verdict_is_read() -> None:
    (found,) = of_lines([_line(case().to_json(), verdict="MISTRUSTED")], "here")
    assert found.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"subject": 1}, ", subject: "),
        ({"verdict": "GOOD"}, ".verdict: got 'GOOD', expected one of"),
        ({"case": {"dtype": "f8"}}, ": case field dtype: got 'f8'"),
        ({"case": {"sinks": []}}, ": case field sinks"),
        ({"case": []}, ", case: "),
    ],
)
def test_a_broken_line_is_one_sentence(change: dict[str, object], says: str) -> None:
    data = {"subject": "a", "check": "b", "case": {}, "verdict": "PASS", "case_id": "c", **change}
    with pytest.raises(ValueError, match=f"^here: result 1{re.escape(says)}"):
        [*of_lines([json.dumps(data).encode()], "here")]


def test_every_measurement_of_an_output_counts() -> None:
    """Some checks call a kernel several times on a case: the last call must not hide the others."""
    good = measurement(worst_ratio=0.2)

    def with_first(first: Measurement) -> RunRecord:
        several = [result(Verdict.PASS, first, good, asked=case(seed)) for seed in range(8)]
        return run(*several)

    comparison = compare_records(with_first(good), with_first(measurement(worst_ratio=0.95)))
    assert [regression.what for regression in comparison.regressions] == [
        "max err/bound 0.2 -> 0.95; 8 cases got worse, most err/bound 0.2 -> 0.95"
    ]
    (row,) = (row for row in comparison.rows if row.feature == "all")
    assert row.head is not None
    assert row.head.results == 16


def test_results_are_found_in_the_order_of_a_record() -> None:
    results = (result(check="purity"), result(asked=case(2)), result(Verdict.FAIL), result())
    assert [found.result for found in of_results(results)] == sorted(results, key=_sort_key)


def _sort_key(found: Result) -> tuple[str, str, str, str]:
    return found.sort_key


def _line(data: object, verdict: str = "PASS") -> bytes:
    name = case_from_json(data).id
    fields = {"subject": "a", "check": "forward", "case": data, "case_id": name, "verdict": verdict}
    return json.dumps(fields).encode()
