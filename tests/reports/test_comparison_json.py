"""What a program reads of a comparison: strict JSON with what the other forms say."""

import json
from dataclasses import replace
from typing import Any

from attest.conformance.record import Verdict
from attest.reports.compare import compare_records
from attest.reports.pairing import Fate
from attest.reports.render.comparison_json import SCHEMA, render_json
from tests.reports.records import KERNEL, case, example_base, example_head, measurement, result, run


def strict(text: str) -> dict[str, Any]:
    """Return JSON without NaN and Infinity, which are not JSON."""

    def refused(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refused)


def test_it_says_what_the_comparison_says() -> None:
    comparison = compare_records(example_base(), example_head())
    data = strict(render_json(comparison))
    assert (data["schema"], data["regressed"]) == (SCHEMA, True)
    assert data["headline"] == comparison.headline
    assert [f"{r['where']}: {r['what']}" for r in data["regressions"]] == list(
        map(str, comparison.regressions)
    )
    assert data["notes"] == list(comparison.notes)
    assert data["head"]["status"] == "fail"
    assert data["head"]["counts"]["FAIL"] == 1
    assert len(data["numbers"]) == len(comparison.rows)
    fates = [entry["fate"] for entry in data["verdicts"]]
    assert len(fates) == sum(pair.fate is not Fate.SAME for pair in comparison.pairs)
    assert "same" not in fates


def test_a_changed_verdict_and_its_numbers() -> None:
    wrong = measurement(worst_ratio=float("nan"), largest_z=float("inf"), broken=("bound",))
    base, head = run(result(Verdict.PASS)), run(result(Verdict.FAIL, wrong, message="bad \x00"))
    data = strict(render_json(compare_records(base, head)))
    assert data["verdicts"] == [
        {
            "subject": KERNEL,
            "check": "forward",
            "case": case().id,
            "fate": "broken",
            "base": "PASS",
            "head": "FAIL",
            "message": r"bad \x00",
        }
    ]
    (row,) = data["numbers"]
    assert (row["feature"], row["output"], row["base"]) == ("all", "out", None)
    assert (row["head"]["results"], row["head"]["worst_ratio"], row["head"]["largest_z"]) == (1, "inf", "inf")


def test_the_causes_of_new_failures() -> None:
    wrong = measurement(worst_ratio=40.0, broken=("bound", "semantics"))
    base, head = run(result(Verdict.PASS, measurement())), run(result(Verdict.FAIL, wrong))
    (cause,) = strict(render_json(compare_records(base, head)))["causes"]
    assert (cause["subject"], cause["failures"], cause["new"]) == (KERNEL, 1, 1)
    assert cause["headline"].startswith("out is wrong")
    assert cause["outputs"] == {"out": True}
    assert cause["replay"].startswith("attest replay ")
    assert cause["numbers"] == [
        {"output": "out", "wrong": True, "worst_ratio": [0.4, 40.0], "rms_ratio": [0.7, 0.7]}
    ]
    assert strict(render_json(compare_records(head, head)))["causes"] == []


def test_the_order_of_results_does_not_matter() -> None:
    base, head = example_base(), example_head()
    turned = compare_records(
        replace(base, results=base.results[::-1]), replace(head, results=head.results[::-1])
    )
    assert render_json(turned) == render_json(compare_records(base, head))
