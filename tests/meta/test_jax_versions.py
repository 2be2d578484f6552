"""The page of JAX versions shows its data, and pyproject.toml allows what was green there."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests import jax_versions

DATA = json.loads(jax_versions.DATA.read_text())
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SUBJECTS = jax_versions.SUBJECTS


def record(subject: str, **counts: int) -> dict[str, Any]:
    return {
        "environment": {
            "platform": "Linux x86_64",
            "processor": "A processor",
            "python": "3.12.9",
            "versions": {"jax": "0.7.2", "numpy": "2.1.0"},
        },
        "profile": "quick",
        "seed": 0,
        "counts": {"PASS": 0, "FAIL": 0, **counts},
        "results": [
            {"subject": subject, "case_id": "a", "check": "forward", "shrunk_from": ""},
            {"subject": subject, "case_id": "b", "check": "gradients", "shrunk_from": ""},
        ],
    }


def found(corpus: str = "PASS", **counts: int) -> dict[str, Any]:
    records = [record(subject, **(counts or {"PASS": 2})) for subject in SUBJECTS]
    return jax_versions.summary(records, corpus, COMMIT, "2026-01-31")


@pytest.mark.found_outside
def test_the_page_shows_the_records_and_their_commits() -> None:
    page = jax_versions.PAGE.read_text()
    assert jax_versions.with_table(page, DATA) == page
    for version, entry in DATA.items():
        # A record of files that no commit has could not be made again.
        assert re.fullmatch(r"[0-9a-f]{40}", entry["commit"]), version
        assert entry["versions"]["jax"] == version
        assert f"| `{entry['commit'][:10]}` | {entry['date']} | {entry['processor']}," in page


def test_the_table_is_replaced_alone() -> None:
    page = jax_versions.PAGE.read_text()
    other = jax_versions.with_table(page, {**DATA, "0.7.2": found()})
    source = "`0123456789` | 2026-01-31 | A processor, Linux x86_64, Python 3.12.9"
    assert f"| 0.7.2 | 2 PASS | 2 PASS | PASS | {source} |\n" in other
    assert jax_versions.with_table(other, DATA) == page


def test_a_summary_is_what_the_records_count() -> None:
    entry = found(PASS=5, TIMEOUT=1)
    assert entry["counts"] == {subject: {"PASS": 5, "TIMEOUT": 1} for subject in SUBJECTS}
    assert jax_versions.red(entry)


def test_records_of_other_versions_are_no_summary() -> None:
    one, other = (record(subject) for subject in SUBJECTS)
    other["environment"] = {**one["environment"], "versions": {"jax": "0.8.0"}}
    with pytest.raises(ValueError, match="one version of each package"):
        jax_versions.summary([one, other], "PASS", COMMIT, "2026-01-31")


def test_what_is_red() -> None:
    green = found(PASS=3, INCONCLUSIVE=1)
    assert not jax_versions.red(green)
    assert jax_versions.red({**green, "corpus": "FAIL"})
    assert jax_versions.red({**green, "counts": {"xla.attention": {"PASS": 1}}})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    data, page = tmp_path / "data.json", tmp_path / "page.md"
    data.write_text(json.dumps({"0.7.2": found()}))
    page.write_text(f"Before.\n\n{jax_versions.table({})}\nAfter.\n")
    return data, page


def test_findings_as_recorded_leave_the_record_and_the_page(files: tuple[Path, Path]) -> None:
    before = [file.read_text() for file in files]
    assert jax_versions.update({**found(), "commit": "f" * 40, "date": "2026-03-01"}, *files) == 0
    assert [file.read_text() for file in files] == before


def test_a_red_version_that_is_recorded_so_is_red_and_not_stale(files: tuple[Path, Path]) -> None:
    assert jax_versions.update(found(FAIL=1, PASS=1), *files) == jax_versions.STALE
    assert jax_versions.update(found(FAIL=1, PASS=1), *files) == 1


@pytest.mark.found_outside
@pytest.mark.parametrize("changed", ["corpus", "counts", "judged", "a version without a record"])
def test_a_stale_record_is_written_anew_and_fails(changed: str, files: tuple[Path, Path]) -> None:
    now = {**found(), "commit": "f" * 40}
    if changed == "corpus":
        now["corpus"] = "INCONCLUSIVE"
    elif changed == "counts":
        now["counts"] = {subject: {"PASS": 1, "INCONCLUSIVE": 1} for subject in SUBJECTS}
    elif changed == "judged":
        other = record(SUBJECTS[0], PASS=2)
        other["results"][0]["case_id"] = "c"
        now = jax_versions.summary([other, record(SUBJECTS[1], PASS=2)], "PASS", "f" * 40, "2026-01-31")
    else:
        now["versions"] = {"jax": "0.7.3"}
    assert jax_versions.update(now, *files) == jax_versions.STALE
    assert "| `ffffffffff` | 2026-01-31 |" in files[1].read_text()
    assert jax_versions.update(now, *files) == 0


def test_a_shrunk_failure_counts_as_the_case_that_was_drawn(files: tuple[Path, Path]) -> None:
    failing = [record(subject, FAIL=1, PASS=1) for subject in SUBJECTS]
    shrunk = [record(subject, FAIL=1, PASS=1) for subject in SUBJECTS]
    for each in shrunk:
        each["results"][0].update(case_id="simpler", shrunk_from="a")
    drawn, minimal = (jax_versions.summary(x, "PASS", COMMIT, "2026-01-31") for x in (failing, shrunk))
    assert jax_versions.differences(drawn, minimal) == []


def test_the_bounds_are_what_was_tried() -> None:
    project = tomllib.loads((jax_versions.ROOT / "pyproject.toml").read_text())["project"]
    for name in ("jax", "jaxlib"):
        (allowed,) = (
            each.specifier for each in map(Requirement, project["dependencies"]) if each.name == name
        )
        assert {version for version in DATA if version not in allowed} == {"0.11.0"}
        assert min(DATA, key=lambda version: [*map(int, version.split("."))]) in allowed
        assert not [*allowed.filter(["0.5.3", "0.6.0", "0.7.0", "0.7.1"])]
    assert DATA["0.11.0"]["corpus"] == "FAIL"
