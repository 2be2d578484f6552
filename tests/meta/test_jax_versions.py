"""The page of JAX versions shows its data, and pyproject.toml allows what was green there."""

import json
import tomllib

from packaging.requirements import Requirement

from tests import jax_versions

DATA = json.loads(jax_versions.DATA.read_text())
RECORD = {
    "environment": {"versions": {"jax": "0.7.2"}},
    "counts": {"PASS": 3, "FAIL": 0},
    "results": [{"subject": "xla.attention"}],
}


def test_the_page_shows_the_data() -> None:
    page = jax_versions.PAGE.read_text()
    assert jax_versions.with_table(page, DATA) == page
    changed = {**DATA, "0.7.2": {"counts": {"xla.attention": {"PASS": 3}}, "corpus": "PASS"}}
    other = jax_versions.with_table(page, changed)
    assert "| 0.7.2 | not run | 3 PASS | PASS |  |\n" in other
    assert jax_versions.with_table(other, DATA) == page


def test_a_row_is_what_the_records_count() -> None:
    flash = {**RECORD, "counts": {"PASS": 5, "TIMEOUT": 1}, "results": [{"subject": "xla.flash_attention"}]}
    version, entry = jax_versions.row([RECORD, flash], "PASS")
    assert version == "0.7.2"
    assert entry["counts"] == {"xla.attention": {"PASS": 3}, "xla.flash_attention": {"PASS": 5, "TIMEOUT": 1}}
    assert jax_versions.red(entry)


def test_what_is_red() -> None:
    green = {name: {"PASS": 3, "INCONCLUSIVE": 1} for name in jax_versions.SUBJECTS}
    assert not jax_versions.red({"counts": green, "corpus": "PASS"})
    assert jax_versions.red({"counts": green, "corpus": "FAIL"})
    assert jax_versions.red({"counts": {"xla.attention": {"PASS": 1}}, "corpus": "PASS"})


def test_the_bounds_are_what_was_tried() -> None:
    project = tomllib.loads((jax_versions.ROOT / "pyproject.toml").read_text())["project"]
    for name in ("jax", "jaxlib"):
        (allowed,) = (
            each.specifier for each in map(Requirement, project["dependencies"]) if each.name == name
        )
        assert {version for version in DATA if version not in allowed} == {"0.11.0"}
        assert min(DATA, key=lambda version: [*map(int, version.split("."))]) in allowed
        assert "0.5.3" not in allowed
    assert DATA["0.11.0"]["corpus"] == "FAIL"
