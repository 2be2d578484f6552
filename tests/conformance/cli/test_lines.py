"""The command with records as lines: written, shown, compared, and resumed like any other record."""

import gzip
from dataclasses import replace

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.files import FileError
from attest.conformance.process.signals import Interrupted
from attest.conformance.records import record_file
from attest.conformance.records.journal import journal_path
from attest.conformance.records.lines import open_lines
from attest.conformance.records.record_file import read_record, record_text
from attest.conformance.running import runner
from attest.conformance.running.plan import Task

CHECK = ("check", "tests.toys:right", "-n", 0)
NAMES = ("run.jsonl", "run.jsonl.gz")


@pytest.fixture(autouse=True)
def _small_plan(monkeypatch):
    planned = [Task("", Case(q_len=length, kv_len=length), ("purity",)) for length in (2, 3)]
    monkeypatch.setattr(runner, "tasks", lambda subject, profile, seed, only: iter(planned))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_written_as_lines_and_shown(attest, tmp_path, name):
    path = tmp_path / name
    assert attest(*CHECK, "--json", path).status == 0
    assert (path.read_bytes()[:2] == b"\x1f\x8b") is name.endswith(".gz")
    found = open_lines(path)
    assert found.count == len([*found]) == 2
    done = attest("report", path)
    assert (done.status, done.err) == (0, "")
    assert "PASS: 2 results" in done.out
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_of_records_has_all_forms(attest, tmp_path):
    for name in ("1.json", "2.jsonl", "3.jsonl.gz"):
        assert attest(*CHECK, "--json", tmp_path / name).status == 0
    done = attest("history", tmp_path)
    assert done.status == 0
    assert all(f"{number}.json" in done.out for number in (1, 2, 3))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_cut_short_goes_on_to_lines(attest, tmp_path, monkeypatch, name):
    path = tmp_path / name
    judge = runner.judge

    def interrupted(subject, case, checks):
        if case.q_len == 3:
            raise Interrupted
        return judge(subject, case, checks)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "judge", interrupted)
        assert attest(*CHECK, "--json", path).status == 1
    assert journal_path(path).exists()
    assert attest(*CHECK, "--json", path, "--resume", path).status == 0
    whole = tmp_path / "whole.json"
    assert attest(*CHECK, "--json", whole).status == 0
    first, second = (replace(read_record(each), seconds=0.0) for each in (path, whole))
    first, second = (
        replace(each, results=tuple(replace(result, seconds=0.0) for result in each.results))
        for each in (first, second)
    )
    assert record_text(first) == record_text(second)


def test_lines_that_cannot_be_written_leave_the_journal(attest, tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl.gz"

    def full(_path, _parts):
        raise FileError("no space left")

    monkeypatch.setattr(record_file, "write_parts", full)
    done = attest(*CHECK, "--json", path)
    assert done.status == 1
    assert done.err == f"attest: no space left; the results are in {journal_path(path)}\n"
    assert len(read_record(journal_path(path)).results) == 2


def test_lines_are_compared_under_any_name(attest, tmp_path):
    path = tmp_path / "run.jsonl.gz"
    assert attest(*CHECK, "--json", path).status == 0
    plain = tmp_path / "plain"
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    assert attest("compare", path, plain).status == 0
