"""The command `attest matrix`: which records it reads, and what it writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from attest.conformance.cli import matrix as command
from attest.conformance.cli.matrix import COMMITTED, known_subjects
from attest.conformance.record import RunRecord
from attest.conformance.records.record_file import write_record
from attest.conformance.subject import find
from tests.reports.matrix_records import PASSING, record


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    """The record of a kernel."""
    path = tmp_path / "toys.jsonl.gz"
    lines = record(*PASSING)
    write_record(RunRecord("quick", 0, PASSING, environment=lines.header.environment), path)
    return path


def test_a_record_is_printed_or_written_as_json_and_as_a_page(
    attest: Any, toys: Path, tmp_path: Path
) -> None:
    printed = attest("matrix", toys)
    assert (printed.status, printed.err) == (0, "")
    assert "toys.attention, toys 1.0, CPU, 2026-11-27\n  passes: S1, S16\n" in printed.out
    page, data = tmp_path / "m.html", tmp_path / "m.json"
    done = attest("matrix", toys, "--json", data, "--html", page)
    assert (done.status, done.out, done.err) == (0, "", "")
    (column,) = json.loads(data.read_text())["columns"]
    assert (column["record"], column["results"]) == ("toys.jsonl.gz", len(PASSING))
    assert page.read_text().startswith("<!doctype html>")


def test_without_records_it_reads_those_of_the_project(
    attest: Any, toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "COMMITTED", toys.parent)
    assert "toys.attention, toys 1.0" in attest("matrix").out


def test_where_there_are_no_records_it_says_what_to_give(
    attest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "COMMITTED", tmp_path)
    done = attest("matrix")
    assert done.status == 2
    advice = "give some that `attest check --json RECORD.jsonl.gz` wrote"
    assert done.err == f"attest: there are no records in {tmp_path}: {advice}\n"


def test_a_record_is_not_overwritten_nor_given_twice(attest: Any, toys: Path) -> None:
    before = toys.read_bytes()
    assert "is an input, too" in attest("matrix", toys, "--json", toys).err
    twice = attest("matrix", toys, toys)
    assert twice.status == 2
    assert "toys.jsonl.gz, too: give one of them" in twice.err
    assert toys.read_bytes() == before


def test_the_folder_of_the_records_is_that_of_the_project() -> None:
    assert COMMITTED.parent.joinpath("README.md").is_file()


def test_each_known_subject_is_found_by_its_name_and_is_of_the_project() -> None:
    known = known_subjects()
    assert len(known) > 60
    names = [subject.name for subject in known]
    assert names == sorted(set(names))
    assert {"xla.attention", "jax.nn.dot_product_attention", "attest.conformance.peers.keras:JAX"} <= set(
        names
    )
    for subject in known:
        assert find(subject.name).name == subject.title
