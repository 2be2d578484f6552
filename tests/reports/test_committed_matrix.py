"""The committed matrix is what `attest matrix` makes of the committed records."""

import json
from pathlib import Path
from typing import Any

import pytest

from attest.conformance.cli.matrix import COMMITTED, known_subjects, matrix_of_files
from attest.reports.render.matrix_html import render_html
from attest.reports.render.matrix_json import SCHEMA, render_json
from tests.meta.processes import ROOT

DATA, PAGE = ROOT / "docs" / "matrix.json", ROOT / "docs" / "matrix.html"
RECORDS = sorted(COMMITTED.glob("*.jsonl.gz"))
ADVICE = "run attest matrix --json docs/matrix.json --html docs/matrix.html"


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    return json.loads(DATA.read_text())


def test_each_record_has_a_column_on_the_page(committed: dict[str, Any]) -> None:
    assert committed["schema"] == SCHEMA
    assert RECORDS
    assert sorted(column["record"] for column in committed["columns"]) == [path.name for path in RECORDS], (
        ADVICE
    )
    page = PAGE.read_text()
    assert [
        c["id"] for c in committed["columns"] if f'<details class="column" id="{c["id"]}"' not in page
    ] == []


def test_every_subject_has_a_column_or_is_not_run(committed: dict[str, Any]) -> None:
    judged = {name for each in committed["columns"] for name in (each["subject"], each["implementation"])}
    expected = [each.name for each in known_subjects() if not {each.name, each.title} & judged]
    assert [each["subject"] for each in committed["not_run"]] == expected, ADVICE


def test_each_column_is_of_a_whole_run_with_a_version_and_a_date(committed: dict[str, Any]) -> None:
    for column in committed["columns"]:
        assert column["complete"], column["id"]
        assert column["version"], column["id"]
        assert column["date"], column["id"]
        assert "+dirty" not in committed["suites"][column["suite"]]["commit"], column["id"]
        assert not committed["suites"][column["suite"]]["narrowed"], column["id"]


def test_links_of_known_faults_lead_to_pages(committed: dict[str, Any]) -> None:
    links = {
        k["link"] for column in committed["columns"] for c in column["cells"].values() for k in c["known"]
    }
    pages = {Path(link.partition("#")[0]) for link in links if not link.startswith("http")}
    assert links
    assert [page for page in pages if not (ROOT / page).is_file()] == []


def test_the_command_makes_the_same_bytes() -> None:
    found = matrix_of_files(RECORDS)
    assert render_json(found) == DATA.read_text(), ADVICE
    assert render_html(found) == PAGE.read_text(), ADVICE
