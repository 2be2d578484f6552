"""`attest merge` of more results than are shown: they are written as lines, and only failures are printed."""

from dataclasses import replace

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.cli import merging
from attest.conformance.record import merge_records
from attest.conformance.records.record_file import read_record, record_text
from attest.conformance.running.gate import with_policy
from attest.conformance.sizes import sizes
from tests.conformance.records.test_merging import CASES, failure, passes, run_of, shards, written


@pytest.fixture
def few_shown(monkeypatch):
    """Reports show three results at most."""
    monkeypatch.setattr(merging, "sizes", lambda: replace(sizes(), shown_results=3))


@pytest.mark.parametrize("name", ["all.jsonl", "all.jsonl.gz"])
def test_the_command_writes_many_results_as_lines(attest, tmp_path, few_shown, name):
    parts = shards(run_of(failure(), *passes(0, 3)), run_of(failure(CASES[1], minimal=True), *passes(9, 3)))
    paths = written(tmp_path, *parts)
    done = attest("merge", *reversed(paths), "--json", tmp_path / name)
    assert (done.status, done.err) == (1, "")
    assert done.out.splitlines()[-1] == "FAIL: 8 results, 6 PASS, 2 FAIL"
    assert done.out.index(CASES[1].id) < done.out.index(CASES[0].id)
    assert "attest replay" in done.out
    assert record_text(read_record(tmp_path / name)) == record_text(with_policy(merge_records(parts), ()))


def test_the_command_shows_problems_and_the_first_failures(attest, tmp_path, few_shown):
    paths = written(tmp_path, run_of(*(failure(Case(seed=seed)) for seed in range(23))))
    done = attest("merge", *paths, "--json", tmp_path / "all.jsonl")
    assert done.status == 1
    assert done.out.endswith(
        "... and 3 more\n\nproblem: a: no check passed, so nothing was tested\n\n"
        "FAIL: 23 results, 23 FAIL, 1 problem\n"
    )
    assert done.out.count("attest replay") == 20


def test_the_command_passes_or_is_incomplete(attest, tmp_path, few_shown):
    whole = run_of(*passes(0, 5))
    out = tmp_path / "all.jsonl"
    done = attest("merge", *written(tmp_path, whole), "--json", out)
    assert (done.status, done.out, done.err) == (0, "PASS: 5 results, 5 PASS\n", "")
    cut = replace(whole, complete=False, note="interrupted")
    done = attest("merge", *written(tmp_path, cut), "--json", out)
    assert (done.status, done.out) == (1, "INCOMPLETE: 5 results, 5 PASS\n")
    assert done.err == f"attest: shard 1/1: interrupted; the results so far are in {out}\n"


def test_reports_of_many_results_are_refused_before_anything_is_written(attest, tmp_path, few_shown):
    paths = written(tmp_path, run_of(*passes(0, 5)))
    out, page = tmp_path / "all.jsonl", tmp_path / "all.html"
    done = attest("merge", *paths, "--json", out, "--html", page)
    assert done.status == 2
    message = f"--html {page}: there are 5 results, a report shows 3 at most: give only --json"
    assert done.err == f"attest: {message}\n"
    assert not out.exists()
    assert attest("merge", *paths, "--html", page).status == 0, "without lines, all is as for few results"


def test_a_damaged_shard_leaves_the_record_of_before(attest, tmp_path, few_shown):
    paths = written(tmp_path, *shards(run_of(*passes(0, 5)), run_of(*passes(5, 5))))
    data = paths[1].read_bytes()
    paths[1].write_bytes(data[:-30])
    out = tmp_path / "all.jsonl"
    out.write_text("before")
    done = attest("merge", *paths, "--json", out)
    assert done.status == 2
    assert done.err.startswith(f"attest: {paths[1]}: broken record, line 6: not valid JSON")
    assert out.read_text() == "before"
