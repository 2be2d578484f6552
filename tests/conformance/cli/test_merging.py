"""`attest merge` and `attest report` of more results than a report shows whole."""

from dataclasses import replace

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.cli import merging, reporting
from attest.conformance.record import merge_records
from attest.conformance.records.record_file import read_record, record_text
from attest.conformance.running.gate import with_policy
from attest.conformance.sizes import sizes
from tests.conformance.records.test_merging import CASES, failure, passes, run_of, shards, written


@pytest.fixture
def few_shown(monkeypatch):
    """Reports show three results at most."""
    show_three(monkeypatch)


def show_three(monkeypatch):
    for module in (merging, reporting):
        monkeypatch.setattr(module, "sizes", lambda: replace(sizes(), shown_results=3))


@pytest.mark.parametrize("name", ["all.jsonl", "all.jsonl.gz"])
def test_many_results_are_merged_as_few_are(attest, tmp_path, monkeypatch, name):
    parts = shards(run_of(failure(), *passes(0, 3)), run_of(failure(CASES[1], minimal=True), *passes(9, 3)))
    paths = written(tmp_path, *parts)
    few = attest("merge", *paths, "--json", tmp_path / "few.jsonl", "--markdown", tmp_path / "few.md")
    show_three(monkeypatch)
    many = attest("merge", *reversed(paths), "--json", tmp_path / name, "--markdown", tmp_path / "many.md")
    assert few == many
    assert "CAUSE 1 of 1, 2 failures" in many.out
    assert (tmp_path / "many.md").read_text() == (tmp_path / "few.md").read_text()
    assert record_text(read_record(tmp_path / name)) == record_text(with_policy(merge_records(parts), ()))


def test_the_problems_of_many_results_are_shown(attest, tmp_path, few_shown):
    paths = written(tmp_path, run_of(*(failure(Case(seed=seed)) for seed in range(5))))
    done = attest("merge", *paths, "--json", tmp_path / "all.jsonl")
    assert done.status == 1
    assert "problem: a: no check passed, so nothing was tested" in done.out
    assert done.out.endswith("FAIL: 5 results, 5 FAIL, 1 problem (profile quick, seed 0)\n")


def test_many_results_pass_or_are_incomplete(attest, tmp_path, few_shown):
    whole = run_of(*passes(0, 5))
    out = tmp_path / "all.jsonl"
    done = attest("merge", *written(tmp_path, whole), "--json", out)
    assert (done.status, done.err) == (0, "")
    assert "PASS: 5 results, 5 PASS" in done.out
    cut = replace(whole, complete=False, note="interrupted")
    done = attest("merge", *written(tmp_path, cut), "--json", out)
    assert done.status == 1
    assert "INCOMPLETE: 5 results, 5 PASS" in done.out
    assert done.err == f"attest: shard 1/1: interrupted; the results so far are in {out}\n"


def test_reports_of_many_results_are_refused_before_anything_is_written(attest, tmp_path, few_shown):
    paths = written(tmp_path, run_of(*passes(0, 5)))
    out, page = tmp_path / "all.jsonl", tmp_path / "all.html"
    done = attest("merge", *paths, "--json", out, "--html", page)
    assert done.status == 2
    message = f"--html {page}: there are 5 results, and such a report shows 3 at most"
    assert done.err == f"attest: {message}: give only --json or --markdown\n"
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


def test_many_results_are_reported_as_few_are(attest, tmp_path, monkeypatch):
    (path,) = written(tmp_path, run_of(failure(), *passes(0, 5)))
    few = attest("report", path), attest("report", path, "--markdown", tmp_path / "few.md")
    show_three(monkeypatch)
    assert few == (attest("report", path), attest("report", path, "--markdown", tmp_path / "many.md"))
    assert "CAUSE 1 of 1, 1 failure" in few[0].out
    assert (tmp_path / "many.md").read_text() == (tmp_path / "few.md").read_text()
    done = attest("report", path, "--junit", tmp_path / "many.xml")
    assert done.status == 2
    assert "there are 6 results, and such a report shows 3 at most" in done.err
