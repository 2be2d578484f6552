"""The matrix as JSON, as text and as a page: the same bytes for the same records, and nothing is loaded."""

import io
import json
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from rich.console import Console

from attest.conformance import json_schemas
from attest.conformance.clauses import CLAUSES
from attest.conformance.record import Verdict
from attest.reports.matrix import Matrix, matrix_of
from attest.reports.matrix_cells import State
from attest.reports.render import matrix_html
from attest.reports.render.matrix_html import address, render_html
from attest.reports.render.matrix_json import render_json
from attest.reports.render.matrix_text import print_matrix
from attest.reports.render.template import SIZE_LIMIT
from tests.reports.matrix_records import PASSING, WRONG, example, judged, record
from tests.reports.test_html import Page

SCHEMA = json_schemas.schemas()["matrix"]
HOSTILE = "<b>&\"'</script>\x1b[31m"


def data(matrix: Matrix) -> dict[str, Any]:
    return json.loads(render_json(matrix))


def text(matrix: Matrix) -> str:
    printed = io.StringIO()
    print_matrix(matrix, Console(file=printed, width=200))
    return printed.getvalue()


def test_the_json_is_valid_and_has_each_cell() -> None:
    found = data(example())
    Draft202012Validator(SCHEMA).validate(found)
    older, old, new = found["columns"]
    assert [len(column["cells"]) for column in found["columns"]] == [len(CLAUSES)] * 3
    assert (older["aligned"], old["aligned"], new["previous"]) == (False, True, old["id"])
    cell = new["cells"]["S2"]
    assert (cell["state"], cell["counts"]) == ("fails", {"XFAIL": 4})
    assert cell["known"] == [
        {"link": "docs/findings/toys.md#a-bias", "reason": "a bias is lost", "results": 4}
    ]
    assert cell["evidence"]["replay"].startswith('attest replay \'{"case":{')
    assert cell["evidence"]["message"] == "outside the error model: out (bound)"
    assert new["cells"]["S6"]["worse"] == ["", "float32"]
    assert old["cells"]["S6"]["worst"]["ratio"] == 0.43
    (missing,) = found["not_run"]
    assert (missing["cells"]["S1"], missing["cells"]["S2"]) == ("not run", "not supported")
    assert found["suites"][1]["narrowed"] == "--examples 3"
    assert new["dialect"] == {"causal": "top_left"}


@pytest.mark.parametrize("ratio", [float("inf"), float("nan")])
def test_numbers_that_json_lacks_are_spelled(ratio: float) -> None:
    wrong = replace(judged(Verdict.FAIL), measurements=(replace(WRONG, worst_ratio=ratio),))
    found = data(matrix_of([record(wrong)]))
    Draft202012Validator(SCHEMA).validate(found)
    assert found["columns"][0]["cells"]["S1"]["worst"]["ratio"] == str(ratio)


@pytest.mark.parametrize(
    "change", [{"schema": "attest.matrix/2"}, {"columns": [{}]}, {"more": 1}, {"clauses": None}]
)
def test_a_wrong_matrix_is_not_valid(change: dict[str, Any]) -> None:
    assert [*Draft202012Validator(SCHEMA).iter_errors({**data(example()), **change})]


def test_the_text_names_states_suites_regressions_and_what_is_not_run() -> None:
    said = text(example())
    assert "toys.attention, toys 1.1, CPU, 2026-11-27\n  fails: S2 (known), S6\n" in said
    assert "toys.attention, toys 0.9, CPU, 2026-11-27 [commit c0ffeec0ffee, profile quick, seed 0" in said
    assert "  worse than 1.0: S6\n" in said
    assert "  largest err/bound: 50, of S6\n" in said
    assert "not run: toys.other\n" in said
    lost = replace(judged(Verdict.FAIL, check="purity"), clauses=())
    assert "  of no clause: 1 FAIL\n" in text(matrix_of([record(lost, *PASSING)]))


def test_the_page_and_the_json_have_the_same_bytes_for_the_same_records() -> None:
    assert render_html(example()) == render_html(example())
    assert render_json(example()) == render_json(example())


def test_the_page_loads_nothing_and_its_links_lead_somewhere() -> None:
    page = Page(render_html(example()))
    names = {tag for tag, _ in page.tags}
    assert not names & {"link", "img", "iframe", "object", "base"}
    assert not [a for _, a in page.tags if "src" in a]
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = [str(a["href"]) for tag, a in page.tags if tag == "a"]
    inward = {link[1:] for link in links if link.startswith("#")}
    assert len(inward) > 3 * len(CLAUSES)
    assert inward <= set(ids)
    outward = {link for link in links if not link.startswith("#")}
    assert outward == {"reference/semantics/", "reference/matrix/", "findings/", "findings/toys/#a-bias"}


def test_the_table_can_be_read_aloud_and_works_without_the_script() -> None:
    page = Page(render_html(example()))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(a.get("scope") in ("col", "row") for tag, a in page.tags if tag == "th")
    assert [a.get("id") for _, a in page.tags if "hidden" in a] == ["filters"]
    for place, (tag, _) in enumerate(page.tags):
        if tag == "table":
            box = page.tags[place - 1][1]
            assert (box.get("tabindex"), box.get("role")) == ("0", "region")


def test_states_are_words_and_each_dtype_has_its_own_in_its_cell() -> None:
    page = render_html(example())
    assert "</span> fails 4 of 4, known</a>" in page
    cell = re.search(r'<td class="fails"[^>]*><a href="#toys.attention-1.1-cpu-S6">', page)
    assert cell is not None
    assert 'data-float32="✗ fails 4 of 4"' in cell[0]
    assert 'data-bfloat16="○ not run"' in cell[0]
    assert "▼ worse than 1.0 in float32" in page
    assert page.count("not aligned") == 1
    assert page.count("Its own rules: causal top_left.") == 3


def test_every_state_has_a_mark_and_a_meaning_on_the_page() -> None:
    page = render_html(example())
    for state in State:
        assert f"</span> {state.value}</dt><dd>{matrix_html.MEANINGS[state]}" in page


def test_hostile_words_of_a_record_are_text() -> None:
    declared = {
        "name": HOSTILE,
        "interpreter": HOSTILE,
        "dtypes": [HOSTILE],
        "clauses": [],
        "features": [HOSTILE],
    }
    hostile = {
        "declarations": {"toys:KERNEL": declared},
        "distributions": {"toys:KERNEL": {"name": HOSTILE, "version": HOSTILE}},
        "commit": HOSTILE,
        "date": HOSTILE,
        "versions": {"jax": HOSTILE},
    }
    failing = judged(Verdict.XFAIL, message=HOSTILE, link="javascript:alert(1)")
    found = matrix_of([record(failing, environment=hostile, problems=(HOSTILE,))])
    page = render_html(found)
    assert "<b>" not in page
    assert page.count("</script>") == 1
    assert "\x1b" not in page + text(found)
    assert 'href="javascript' not in page
    Page(page)


@pytest.mark.parametrize(
    ("link", "leads"),
    [
        ("https://example.org/1", "https://example.org/1"),
        ("docs/findings/toys.md#a-bias", "findings/toys/#a-bias"),
        ("docs/reference/jax-nn.md", "reference/jax-nn/"),
        ("docs/findings/index.md", "findings/"),
        ("docs/../secret.md", ""),
        ("javascript:alert(1)", ""),
        ("", ""),
    ],
)
def test_links_of_expectations_lead_to_the_pages(link: str, leads: str) -> None:
    assert address(link) == leads


def test_a_page_that_would_be_too_large_has_only_the_commands_of_failures() -> None:
    matrix = example()
    passing = "attest replay &#39;{&#34;case&#34;:{&#34;causal&#34;:true,&#34;dtype&#34;:&#34;float32&#34;"
    whole = render_html(matrix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_html, "SIZE_LIMIT", len(whole.encode()))
        small = render_html(matrix)
    assert len(small) < len(whole) < SIZE_LIMIT
    assert small.count("attest replay") < whole.count("attest replay")
    assert "attest replay" in small
    assert whole.count(passing) >= small.count(passing)
