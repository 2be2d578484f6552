"""The numbers of the README are those of the evidence that is committed."""

import json
import re
from typing import Any

import pytest

from benchmarks.record import OURS, read_report
from tests.meta.processes import ROOT

README = (ROOT / "README.md").read_text()
BENCHMARKS = "reports/data/benchmarks"
# The rows of a report that the columns of the README show, in order.
COLUMNS = [
    ("8k d128 full", "forward"),
    ("8k d128 causal", "forward"),
    ("8k d128 full", "forward_backward"),
    ("8k d128 causal", "forward_backward"),
]


def evidence(name: str) -> Any:
    """Return a measurement of docs/evidence."""
    return json.loads((ROOT / "docs" / "evidence" / f"{name}.json").read_text())


def row(text: str) -> str:
    """Return the one line of the README's tables that holds a text."""
    (line,) = (line for line in README.splitlines() if line.startswith("|") and text in line)
    return line


def test_the_defects_that_are_found() -> None:
    kills = json.loads((ROOT / "conformance" / "mutants" / "kills.json").read_text())
    line = row("conformance/mutants/groups/clean_kernel.toml")
    assert line.startswith(f"| {len(kills)} [defects]")
    assert all(len(profiles["standard"]) >= 3 for profiles in kills.values())


def test_what_other_rules_pass() -> None:
    measured = evidence("defects")["result"]
    assert all(any(output["caught_by"] for output in each["defective"].values()) for each in measured)
    line = row("losses of precision")
    assert line.startswith(f"| {len(measured)} [losses")
    for rule, shown in (("allclose", r"passes (\d+) of"), ("twice_baseline", r'baseline" (\d+) \|')):
        # As in the log, these rules look at out and the gradients.
        passed = [
            all(output[rule] for name, output in each["defective"].items() if name != "lse")
            for each in measured
        ]
        found = re.search(shown, line)
        assert found is not None
        assert int(found[1]) == sum(passed)


def test_the_results_without_a_false_alarm() -> None:
    runs = evidence("alarms")["runs"]
    last = max(index for index, run in enumerate(runs) if run["red"])
    counted = sum(run["results"] for run in runs[last + 1 :])
    assert row("results of correct kernels").startswith(f"| {counted:,} ")


def test_each_kind_of_fault_in_jax_nn_has_a_section() -> None:
    page = (ROOT / "docs" / "reference" / "jax-nn.md").read_text()
    sections = re.findall(r"^## (.*)$", page, re.M)
    assert sections[0] == "Its dialect"
    assert len(sections) - 1 == 6
    assert "[six kinds of faults]" in row("jax-nn.md")


def ratio(report: str, name: str, direction: str) -> float:
    """Return cuDNN's time divided by ours, from a report of `benchmarks.gpu_speed`."""
    results = read_report(ROOT / report).results
    (found,) = (it for it in results if (it.row.name, it.row.direction) == (name, direction))
    ours, theirs = found.value(OURS), found.value("cudnn")
    assert ours is not None
    assert theirs is not None
    return theirs / ours


@pytest.mark.parametrize(
    "report", re.findall(rf"\(({BENCHMARKS}/\S+)\.md\)", README), ids=lambda x: x.partition("nvidia-")[2]
)
def test_the_speeds_are_those_of_the_reports(report: str) -> None:
    shown = [cell.strip() for cell in row(f"{report}.md").split("|")[2:-1]]
    assert shown == [f"{ratio(f'{report}.jsonl', *column):.2f}" for column in COLUMNS]
