"""The pages name files that exist, and the README stays one page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
FOLDERS = ("attest", "benchmarks", "conformance", "docs", "kernels", "reference", "reports", "tests")
# What a page shows as the name of a file: a path from the root, in backticks.
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = PATH.findall(page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_pages_name_files() -> None:
    """So that the test above cannot pass because it finds nothing to look for."""
    assert sum(len(PATH.findall(page.read_text())) for page in PAGES) > 50


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
