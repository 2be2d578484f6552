"""What is written: only where it was meant to go, whole or not at all, and not over anything by surprise."""

import os
import stat
from datetime import date
from pathlib import Path

import pytest

from attest.conformance import files
from attest.conformance.cases.case import Case
from attest.conformance.files import FileError, write_text
from attest.conformance.records.journal import journal_path
from attest.conformance.records.record_file import read_record
from attest.conformance.running import runner
from attest.conformance.running.plan import Task

CHECK = ("check", "tests.toys:right", "-n", 0)


@pytest.fixture(autouse=True)
def _small_plan(monkeypatch):
    planned = [Task("", Case(q_len=length, kv_len=length), ("purity",)) for length in (2, 3)]
    monkeypatch.setattr(runner, "tasks", lambda subject, profile, seed, only: iter(planned))


@pytest.fixture
def full_disk(monkeypatch):
    """No file can be created any more; those that are open take nothing."""

    def full(*_arguments, **_options):
        raise OSError(28, os.strerror(28))

    return lambda: monkeypatch.setattr(files, "_create", full)


def test_a_device_is_written_into_and_never_replaced(attest, tmp_path):
    device = tmp_path / "device"
    os.mkfifo(device)
    reader = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert attest(*CHECK, "--json", device).status == 0
        assert os.read(reader, 100).startswith(b'{\n "complete": true')
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(device.stat().st_mode)
    assert list(tmp_path.iterdir()) == [device]
    assert attest(*CHECK, "--json", "/dev/null").status == 0
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_device_that_is_full_is_one_sentence(attest):
    done = attest(*CHECK, "--json", "/dev/full")
    assert done.status == 1
    assert done.err == "attest: /dev/full: cannot be written: No space left on device\n"
    assert "PASS: 2 results" in done.out


@pytest.mark.parametrize("option", ["--json", "--junit", "--markdown", "--html", "--sarif"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_is_refused(attest, tmp_path, option, exists):
    target, link = tmp_path / "target", tmp_path / "link"
    if exists:
        target.write_text("mine")
    link.symlink_to(target)
    done = attest(*CHECK, option, link)
    assert done.status == 2
    assert f"{option} {link}: is a symbolic link to {target}: name the file itself" in done.err
    assert link.is_symlink()
    assert target.exists() is exists


@pytest.mark.parametrize(
    ("first", "second"), [("same", "same"), ("same", "./same"), ("same.journal", "same"), ("hard", "link")]
)
def test_two_outputs_to_one_file_are_refused(attest, tmp_path, first, second):
    (tmp_path / "hard").write_text("")
    (tmp_path / "link").hardlink_to(tmp_path / "hard")
    done = attest(*CHECK, "--junit", f"{tmp_path}/{first}", "--json", f"{tmp_path}/{second}")
    assert done.status == 2
    assert "are the same file: name two" in done.err


def test_what_is_read_is_not_written_over(attest, tmp_path):
    path = tmp_path / "run.json"
    assert attest(*CHECK, "--json", path).status == 0
    before = path.read_bytes()
    for command in (
        ("report", path, "--html", path),
        ("merge", path, "--json", path),
        ("compare", path, path, "--markdown", path),
        ("compare", path, path, "--json", path),
        ("gate", "--baseline", path, "--json", path),
    ):
        done = attest(*command)
        assert done.status == 2
        assert "is an input, too, and would be lost" in done.err
    assert path.read_bytes() == before


def test_names_that_are_too_long_are_one_sentence(attest):
    for command in (
        (*CHECK, "--json", "/tmp/" + "x" * 300),
        (*CHECK, "--html", "/tmp/" + "x" * 5000),
        ("report", "x" * 5000),
        ("replay", "x" * 5000),
        (*CHECK, "--expectations", "x" * 5000),
        ("gate", "--baseline", "x" * 5000),
    ):
        done = attest(*command)
        assert (done.status, done.out) == (2, "")
        assert done.err.count("\n") == 1
        assert len(done.err) < 1000


def test_a_record_names_the_day_and_the_distributions_and_declarations_of_its_subjects(attest, tmp_path):
    path, name = tmp_path / "run.json", "attest.conformance.peers.jax_nn:XLA"
    asked = ("--check", "purity", "--examples", "1", "--dtype", "float32", "-n", "0", "--json", path)
    assert attest("check", name, *asked).status == 0
    found = read_record(path).environment
    assert date.fromisoformat(found["date"])
    assert found["distributions"] == {name: {"name": "jax", "version": found["versions"]["jax"]}}
    assert found["declarations"][name]["name"] == "jax.nn.dot_product_attention"


def test_a_disk_that_fills_up_keeps_the_record_of_before_and_the_journal(attest, tmp_path, full_disk):
    path = tmp_path / "run.json"
    assert attest(*CHECK, "--json", path).status == 0
    before = path.read_bytes()
    monkeyed = runner.judge

    def judge(*arguments):
        full_disk()
        return monkeyed(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "judge", judge)
        done = attest(*CHECK, "--json", path)
    assert done.status == 1
    journal = journal_path(path)
    assert done.err == (
        f"attest: {path}: cannot be written: No space left on device; the results are in {journal}\n"
    )
    assert path.read_bytes() == before
    assert {r.case for r in read_record(journal).results} == {r.case for r in read_record(path).results}
    assert sorted(tmp_path.iterdir()) == [path, journal]


def test_a_journal_that_cannot_go_on_ends_no_run(attest, tmp_path, monkeypatch):
    path = tmp_path / "run.json"

    def full(*_arguments):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("attest.conformance.records.journal.result_to_json", full)
    done = attest(*CHECK, "--json", path)
    assert done.status == 0
    assert done.err == (
        f"attest: {journal_path(path)}: cannot be written: No space left on device,"
        " so the run continued without a journal\n"
    )
    assert len(read_record(path).results) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_one_report_that_cannot_be_written_spoils_no_other(attest, tmp_path):
    done = attest(*CHECK, "--junit", "/dev/full", "--markdown", tmp_path / "run.md")
    assert done.status == 1
    assert done.err == "attest: /dev/full: cannot be written: No space left on device\n"
    assert (tmp_path / "run.md").stat().st_size > 0


def test_what_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("before")

    def fails(_descriptor):
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(FileError, match="file: cannot be written: Input/output error"):
        write_text(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_place_of_the_scratch_file_is_not_followed(tmp_path):
    path, other = tmp_path / "file", tmp_path / "other"
    other.write_text("somebody else's")
    (tmp_path / f"file.{os.getpid()}.partial").symlink_to(other)
    write_text(path, "mine")
    assert (path.read_text(), other.read_text()) == ("mine", "somebody else's")


@pytest.mark.found_outside
def test_a_pipe_in_the_place_of_a_journal_does_not_block_a_run(attest, tmp_path):
    path = tmp_path / "r.json"
    os.mkfifo(journal_path(path))
    refused = f"attest: {journal_path(path)}: cannot be written: it is no regular file\n"
    assert attest(*CHECK, "--json", path).err == refused
    reader = os.open(journal_path(path), os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert attest(*CHECK, "--json", path).err == refused
        assert not os.read(reader, 1)
    finally:
        os.close(reader)
