"""Where the command runs may be odd: no current folder, a terminal of no width, a disk with little room."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from attest.conformance.cli.commands import app
from attest.conformance.records.journal import journal_path
from attest.conformance.records.record_file import read_record, write_record
from attest.conformance.tuning import judge as judging
from tests.conformance.cli.processes import ROOT, SCRIPT
from tests.reports.records import example_head

TUNE = ("--q-len", "16", "--q-heads", "1", "--head-dim", "8")


@pytest.fixture
def record(tmp_path) -> Path:
    path = tmp_path / "record.json"
    write_record(example_head(), path)
    return path


@pytest.mark.found_outside
@pytest.mark.parametrize("command", ["report", "list", "--help", ""])
def test_a_current_folder_that_was_removed_is_one_sentence(tmp_path, record, command):
    """A relative path means nothing there, and libraries cannot be imported."""
    folder = tmp_path / "gone"
    folder.mkdir()
    words = [command, *([str(record)] if command == "report" else [])]
    done = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", sys.executable, "-m", "attest", *filter(None, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "attest: the current folder cannot be read: No such file or directory: change to another\n"
    )


@pytest.mark.found_outside
@pytest.mark.parametrize("columns", ["0", "1", "²", "٣", "-1", "", "9" * 20, "9" * 5000])
def test_a_width_that_shows_nothing_does_not_count(attest, monkeypatch, record, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    usual = attest("report", record)
    assert usual.out
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)
    assert attest("report", record) == usual
    monkeypatch.setenv("COLUMNS", "30")
    assert attest("report", record).out != usual.out


@pytest.mark.found_outside
def test_without_a_command_the_help_is_printed(attest):
    bare, asked = attest(), attest("--help")
    assert (bare.out, bare.err) == (asked.out, "")
    assert (bare.status, asked.status) == (2, 0)
    assert len(bare.out.splitlines()) > 10


def outputs() -> list[tuple[str, str]]:
    """Every option of every command that names a file to write."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    names = {"--json", "--junit", "--markdown", "--html", "--sarif", "--kills"}
    return [
        (name, option)
        for name, command in commands.items()
        for parameter in command.params
        for option in sorted(names & set(parameter.opts))
    ]


@pytest.mark.found_outside
@pytest.mark.parametrize(("command", "option"), outputs())
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    attest, monkeypatch, tmp_path, record, command, option
):
    def work(*_arguments, **_options):
        raise AssertionError("it works already")

    for place in ("running.runner.run", "compiling.matrix.compile_matrix", "records.record_file.read_record"):
        monkeypatch.setattr(f"attest.conformance.{place}", work)
    monkeypatch.setattr(judging, "judge", work)
    monkeypatch.setattr("attest.kernels.operations.executor.Executor.tune", work)
    arguments = {
        "check": ("tests.toys:right",),
        "compare": (record, record),
        "history": (record, record),
        "report": (record,),
        "matrix": (record,),
        "merge": (record,),
        "tune": TUNE,
    }.get(command, ())
    for path, why in ((tmp_path, "is a folder"), (tmp_path / "no" / "file", "does not exist")):
        done = attest(command, *arguments, option, path)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith(f"attest: {option} {path}: ")
        assert why in done.err


def test_every_command_that_writes_is_among_them():
    assert {command for command, _ in outputs()} == {
        "gate", "check", "compare", "history", "report", "matrix", "merge", "compile", "tune",
        "mutants",
    }  # fmt: skip


@pytest.mark.found_outside
def test_a_journal_that_was_cut_says_how_many_results_it_has(tmp_path):
    """On a disk that fills up, neither the record nor its journal fits: each file may have 1,536 bytes."""

    path = tmp_path / "run.json"
    (tmp_path / "mine.py").write_text(SCRIPT)
    command = (
        sys.executable,
        "-m",
        "attest",
        "check",
        "mine:right",
        "--check",
        "purity",
        "-n",
        "0",
        "--json",
        path,
    )
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 3 && exec "$@"', "sh", *command],  # in blocks of 512 bytes
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    journal = journal_path(path)
    said = re.fullmatch(
        rf"attest: {path}: cannot be written: File too large; {journal} has only the first (\d+) of (\d+)"
        r" results",
        done.stderr.splitlines()[-1],  # a slow machine also says how far the run is
    )
    assert said is not None, done.stderr
    kept, given = int(said[1]), int(said[2])
    assert 0 < kept < given
    assert len(read_record(journal).results) == kept
