"""Each finding in a peer has a page, a script that shows it, and a row in the table of all findings."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "findings"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.stem != "index")


def header(script: str) -> dict[str, object]:
    """The metadata of a script, by PEP 723."""
    lines = script.splitlines()
    first = lines.index("# /// script") + 1
    return tomllib.loads("\n".join(line[2:] for line in lines[first : lines.index("# ///")]))


def test_there_are_findings() -> None:
    """So that the test below cannot pass because it finds nothing to look at."""
    assert len(PAGES) > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_finding_is_listed_and_shown_by_a_script_with_its_versions(page: Path) -> None:
    script = page.with_suffix(".py")
    assert f"({script.name})" in page.read_text(encoding="utf-8")
    assert f"({page.name})" in (FOLDER / "index.md").read_text(encoding="utf-8")
    text = script.read_text(encoding="utf-8")
    dependencies = header(text)["dependencies"]
    assert isinstance(dependencies, list)
    assert any("==" in str(each) for each in dependencies)
    assert "sys.exit" in text or "SystemExit" in text


def test_every_script_has_a_page() -> None:
    assert {script.stem for script in FOLDER.glob("*.py")} == {page.stem for page in PAGES}
