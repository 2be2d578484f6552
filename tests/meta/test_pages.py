"""The pages name files that exist, say which kind they are, and list every field and option."""

import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest
import typer

from attest.conformance.cases.case import Case
from attest.conformance.cases.families import FAMILIES
from attest.conformance.checks import Check, all_checks
from attest.conformance.cli.commands import app
from attest.conformance.process.phases import PHASES
from attest.conformance.record import Verdict
from attest.conformance.running.expectations import load_expectations
from attest.conformance.running.plan import profile_names
from attest.conformance.subject import Tiling
from attest.reference.numerics import Numerics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted(DOCS.rglob("*.md"))
KINDS = {
    "tutorial": "Tutorial",
    "how-to": "How-to",
    "reference": "Reference",
    "explanation": "Explanation",
    "log": "Log",
}
FOLDERS = ("attest", "benchmarks", "conformance", "docs", "kernels", "reference", "reports", "tests")
# What a page shows as the name of a file: a path from the root, in backticks.
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`")


def rows(page: str) -> dict[str, list[str]]:
    """The cells of each row of the tables of a page of docs/reference, by each name in its first cell."""
    found: dict[str, list[str]] = {}
    for line in (DOCS / "reference" / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `"):
            found |= {name.split()[0]: cells for name in re.findall(r"`([^`]+)`", cells[0])}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = PATH.findall(page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def anchors(page: Path) -> list[str]:
    """The anchors of the headings of a page, as MkDocs and forges make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return [re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).lower()) for heading in headings]


@pytest.mark.parametrize("link", sorted({entry.link for entry in load_expectations()}))
def test_a_known_failure_links_to_a_section_that_is_there(link: str) -> None:
    if link.startswith("docs/"):
        page, _, anchor = link.partition("#")
        assert anchor in anchors(ROOT / page)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_a_link_of_a_page_outside_of_docs_leads_somewhere(name: str) -> None:
    """MkDocs checks the links of docs alone."""
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()):
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        assert not anchor or anchor in anchors(ROOT / path), link


def test_pages_name_files() -> None:
    """So that the test above cannot pass because it finds nothing to look for."""
    assert sum(len(PATH.findall(page.read_text())) for page in PAGES) > 50


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("folder", KINDS)
def test_a_page_says_which_kind_it_is(folder: str) -> None:
    pages = sorted((DOCS / folder).glob("*.md"))
    assert pages
    for page in pages:
        title, _, kind, *_ = page.read_text().splitlines()
        assert title.startswith("# "), page
        assert kind.startswith(f"*{KINDS[folder]}. "), page


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_every_page_has_its_place_in_the_navigation(page: Path) -> None:
    assert f": {page.relative_to(DOCS)}\n" in (ROOT / "mkdocs.yml").read_text()


def written(declared: Field[Any]) -> str:
    """The default of a field as a page writes it."""
    if declared.default is MISSING:
        return "`{}`" if declared.default_factory is not MISSING else "required"
    powers = {2.0**-power: f"`2**-{power}`" for power in (20, 22, 24)}
    return powers.get(declared.default, f"`{declared.default!r}`")


@pytest.mark.parametrize("declared", fields(Numerics) + fields(Tiling), ids=lambda field: field.name)
def test_the_reference_has_every_field_of_numerics_and_tiling(declared: Field[Any]) -> None:
    assert rows("numerics.md")[declared.name][1] == written(declared)


@pytest.mark.parametrize("declared", fields(Case), ids=lambda field: field.name)
def test_the_reference_has_every_field_of_a_case(declared: Field[Any]) -> None:
    json = {"None": "null", "True": "true", "False": "false"}
    default = repr(declared.default).replace("'", '"')
    assert rows("case.md")[declared.name][2] == f"`{json.get(default, default)}`"


def test_the_reference_has_every_family_verdict_phase_and_profile() -> None:
    assert set(FAMILIES) <= set(rows("case.md"))
    assert {*Verdict, *PHASES} <= set(rows("verdicts.md"))
    assert set(profile_names()) <= set(rows("command-line.md"))


def test_the_reference_has_every_check_and_no_other() -> None:
    cells = re.findall(r"^\| (`[a-z].*?) \|", (DOCS / "reference" / "checks.md").read_text(), re.MULTILINE)
    listed = {name for cell in cells for name in re.findall("`(.+?)`", cell)}
    families = {
        "refusal.undeclared_": "refusal.undeclared_NAME",
        "refusal.": "refusal.NAME",
        "law.": "law.NAME",
    }
    known = {
        next((family for start, family in families.items() if name.startswith(start)), name)
        for name in all_checks()
    }
    assert listed == known


def test_the_page_of_checks_has_every_field_of_a_check() -> None:
    page = (DOCS / "how-to" / "add-a-check.md").read_text()
    assert [field.name for field in fields(Check) if f"| `{field.name}` |" not in page] == []


def test_the_reference_has_every_command_and_option() -> None:
    page = (DOCS / "reference" / "command-line.md").read_text()
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        assert f"| `attest {name}" in page
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                assert not option.startswith("-") or f"`{option}`" in page, (name, option)
