"""However a run ends, what it had found is there, and what went wrong is one sentence."""

import json
import os
import signal

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.cli import catalogue
from attest.conformance.cli import commands as cli
from attest.conformance.record import Verdict
from attest.conformance.records.journal import journal_path
from attest.conformance.records.record_file import read_record
from attest.conformance.running.plan import Restriction, load_profile, tasks
from attest.conformance.subject import Subject
from tests import toys
from tests.conformance.cli.processes import started, until

# Cases of several shapes, the second of which hangs.
CHECK = ("check", "mine:slow", "--examples", "12", "--check", "forward")


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_a_partial_record(tmp_path, stop):
    """From the folder of the user's own module, with workers, and without an installed command."""
    path = tmp_path / "run.json"
    process = started(tmp_path, *CHECK, "-n", "1", "--json", path)
    until((tmp_path / "stuck").exists, process)
    process.send_signal(stop)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert stderr.startswith("attest: interrupted, judging")
    assert stderr.count("\n") == 1
    assert str(path) in stderr
    record = read_record(path)
    assert not record.complete
    assert record.note.startswith("interrupted")
    assert record.status == "fail"
    assert all(result.verdict is not Verdict.ERROR for result in record.results)
    assert stderr.endswith(f", and --resume {path} judges the rest\n")
    assert read_record(journal_path(path)).results == record.results


def test_a_run_in_the_background_hears_an_interrupt(tmp_path):
    """A shell that is not interactive starts it with SIGINT ignored."""
    number = tmp_path / "number"
    shell = started(
        tmp_path, *CHECK, "-n", "0", "--json", "run.json", shell=f"& echo $! > {number}; wait $!; echo $?"
    )
    until((tmp_path / "stuck").exists, shell)
    os.kill(int(number.read_text()), signal.SIGINT)
    stdout, stderr = shell.communicate(timeout=120)
    assert stdout.splitlines()[-1] == "1"
    assert "attest: interrupted, judging" in stderr
    assert "Traceback" not in stderr


def test_an_interrupt_before_there_is_a_run_ends_with_the_same_status(attest, monkeypatch):
    def interrupted(_arguments):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli, "_attempt", interrupted)
    done = attest("list")
    assert (done.status, done.out, done.err) == (1, "", "attest: interrupted\n")


def test_an_interrupt_in_a_command_ends_with_the_same_status(attest, monkeypatch):
    monkeypatch.setattr(catalogue, "short_catalogue", lambda _backend: signal.raise_signal(signal.SIGINT))
    done = attest("list")
    assert (done.status, done.out, done.err) == (1, "", "attest: interrupted\n")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_killed_run_loses_only_what_was_in_flight(attest, tmp_path, workers):
    path = tmp_path / "run.json"
    process = started(tmp_path, *CHECK, "-n", workers, "--json", path)
    until((tmp_path / "stuck").exists, process)
    process.kill()
    process.communicate(timeout=120)
    assert not path.exists()
    journal = journal_path(path)
    record = read_record(journal)
    planned = planned_by_check()
    found = len(record.results)
    assert found > 0
    assert {result.case for result in record.results} == set(planned[:found])
    last = (tmp_path / "calls").read_text().splitlines()[-1].split()
    assert [int(size) for size in last[:2]] == [planned[found].batch, planned[found].q_len]
    done = attest("report", journal)
    assert done.status == 0
    assert "cut short (the run was killed" in done.out
    assert attest("compare", journal, journal).status == 1
    assert "its run has not finished" in attest("report", path).err
    assert attest("merge", journal, "--json", tmp_path / "merged.json").status == 1
    assert len(read_record(tmp_path / "merged.json").results) == len(record.results)


def test_a_killed_run_goes_on_and_makes_the_record_of_a_whole_run(attest, tmp_path):
    check = ("check", "tests.toys:right", "--check", "purity", "--check", "forward", "--examples", 4)
    whole, path = tmp_path / "whole.json", tmp_path / "run.json"
    assert attest(*check, "-n", 0, "--json", whole).status == 0
    stopped = attest(*check, "-n", 0, "--budget", 1e-9, "--json", path)
    assert stopped.status == 1
    assert f"; the results so far are in {path}, and --resume {path} judges the rest" in stopped.err
    other = attest(*check, "--seed", 1, "-n", 0, "--json", path, "--resume", path)
    assert (other.status, other.out) == (2, "")
    assert f"{journal_path(path)}: it is of another run: seed: got 0, expected 1" in other.err
    assert attest(*check, "-n", 0, "--json", path, "--resume", path).status == 0
    assert read_record(path) == read_record(whole)
    assert not journal_path(path).exists()
    ended = attest(*check, "-n", 0, "--json", path, "--resume", path)
    assert (ended.status, ended.out) == (2, "")
    assert "which a run with --json leaves if it is cut short" in ended.err


def planned_by_check() -> list[Case]:
    """The cases of CHECK, in their order."""
    only = Restriction(checks=("forward",), examples=12)
    slow = Subject("mine.slow", toys.right.call)
    return [case for task in tasks(slow, load_profile("quick"), 0, only) for case, _ in task.cases]


def test_the_last_line_of_a_journal_may_be_cut(attest, tmp_path):
    path = tmp_path / "run.json"
    check = ("check", "tests.toys:right", "-n", 0, "--check", "purity", "--examples", 4, "--json", path)
    assert attest(*check).status == 0
    record = json.loads(path.read_text())
    header = {name: record[name] for name in ("profile", "seed", "shard", "narrowed", "environment")}
    lines = [json.dumps({**header, "schema": "attest.journal/2"})]
    lines += [json.dumps({"result": result}) for result in record["results"]]
    whole = "\n".join(lines) + "\n"
    journal = tmp_path / "other.journal"
    last = len(lines[-1]) + 1
    for cut, left in ((0, 0), (1, 1), (last // 2, 1), (last, 1)):
        journal.write_text(whole[: len(whole) - cut])
        assert len(read_record(journal).results) == len(record["results"]) - left
    journal.write_text("\n".join([lines[0], '{"results": 3}', *lines[1:], ""]))
    done = attest("report", journal)
    assert done.status == 2
    assert "broken journal, line 2, results: expected `array`, got `int`" in done.err


def test_two_runs_do_not_write_one_journal(attest, tmp_path):
    path = tmp_path / "run.json"
    process = started(tmp_path, *CHECK, "-n", "0", "--json", path)
    until((tmp_path / "stuck").exists, process)
    done = attest("check", "tests.toys:right", "-n", 0, "--json", path)
    process.kill()
    process.communicate(timeout=120)
    assert done.status == 1
    assert done.err == f"attest: {journal_path(path)}: cannot be written: another run is writing it\n"
    assert len(read_record(journal_path(path)).results) > 0


STREAMS = {
    "a full disk": ("> /dev/full; echo $? >&2", "stdout: cannot be written: No space left on device"),
    "closed": (">&-; echo $? >&2", "stdout is closed: nothing could be printed"),
}


@pytest.mark.parametrize("title", STREAMS)
def test_stdout_that_takes_nothing_is_one_sentence_and_the_record_is_kept(tmp_path, title):
    shell, sentence = STREAMS[title]
    check = ("check", "mine:right", "--check", "purity", "--examples", 4, "-n", "0", "--json", "run.json")
    process = started(tmp_path, *check, shell=shell)
    _, stderr = process.communicate(timeout=300)
    assert stderr.splitlines() == [f"attest: {sentence}", "1"]
    assert read_record(tmp_path / "run.json").complete


def test_a_reader_that_has_gone_is_one_sentence(tmp_path):
    process = started(tmp_path, "list", shell="2> errors | true")
    process.communicate(timeout=300)
    assert (tmp_path / "errors").read_text() == "attest: stdout: cannot be written: Broken pipe\n"


def test_help_on_a_full_disk_is_one_sentence(tmp_path):
    process = started(tmp_path, "--help", shell="> /dev/full; echo $? >&2")
    _, stderr = process.communicate(timeout=300)
    assert stderr.splitlines() == ["attest: stdout: No space left on device", "1"]
