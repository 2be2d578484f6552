"""The benchmark of clusters: its model is that of its measurements, and its page has what its file has."""

import os
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from distributed.scheduler import heartbeat_interval
from hypothesis import given
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

from attest.conformance.cases.case import Case
from attest.conformance.process.pool import Job
from attest.conformance.record import Verdict
from benchmarks import cluster, cluster_processes
from benchmarks.cluster_figure import figure
from benchmarks.cluster_model import LINK_BYTES_PER_SECOND, MOST_HEARTBEATS, model_of, predicted
from benchmarks.cluster_record import (
    PACED,
    REAL,
    SHORT,
    Host,
    Resting,
    Row,
    Run,
    Scheduled,
    Spent,
    merged,
    read_hosts,
    write_hosts,
)
from benchmarks.cluster_report import tables

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs" / "evidence" / "cluster.json"
HEARTBEAT = 1e-3
ENVIRONMENT = {"cores": 2, "processor": "Some CPU"}
MICROSECONDS = st.integers(1, 10_000).map(lambda number: number * 1e-6)
BYTES = st.integers(1, 100_000)


def run_of(kind: str, workers: int, results: int, batches: int, costs: dict[str, tuple[float, float]]) -> Run:
    """A run of 100 seconds whose processes spend what batches and results cost, and heartbeats."""
    spent = {name: batches * batch + results * result for name, (batch, result) in costs.items()}
    resting = Resting(HEARTBEAT * workers / heartbeat_interval(workers), 10.0)
    scheduler = Spent(
        spent["scheduler"] + 100 * resting.seconds, 0, round(spent["scheduler_bytes"] + 100 * resting.bytes)
    )
    caller = Spent(spent["caller"], 0, round(spent["caller_bytes"]))
    return Run(
        kind, workers, results, 100.0, 100.0, Scheduled(batches, 4 * batches, scheduler), caller, resting
    )


def host_of(costs: dict[str, tuple[float, float]], **changes: object) -> Host:
    counted = run_of(REAL, 1, 200, 40, costs)
    row = Row(1, 2.1, 2.0, 0.95, {"processes": [2.1], "cluster": [2.0]}, counted)
    idle = (run_of(PACED, 50, 10_000, 2_000, costs), run_of(SHORT, 8, 40_000, 500, costs))
    return replace(Host(ENVIRONMENT, "toys.right", 6.0, (row,), idle), **changes)


COSTS = {
    "scheduler": (2e-3, 1e-4),
    "caller": (1e-3, 2e-3),
    "scheduler_bytes": (12_000.0, 3_000.0),
    "caller_bytes": (6_000.0, 1_500.0),
}


@given(
    st.fixed_dictionaries(
        {
            "scheduler": st.tuples(MICROSECONDS, MICROSECONDS),
            "caller": st.tuples(MICROSECONDS, MICROSECONDS),
            "scheduler_bytes": st.tuples(BYTES, BYTES),
            "caller_bytes": st.tuples(BYTES, BYTES),
        }
    )
)
def test_the_model_finds_the_costs_of_what_was_measured(costs):
    model = model_of(host_of(costs))
    for name, (batch, result) in costs.items():
        found = getattr(model, name)
        assert found.batch == pytest.approx(batch, rel=1e-3, abs=1e-3 * result)
        assert found.result == pytest.approx(result, rel=1e-3, abs=1e-3 * batch)
    assert model.heartbeat == pytest.approx(HEARTBEAT)
    assert model.transitions == 4


def test_the_limit_of_many_workers_is_what_spends_most_on_a_result():
    model = model_of(host_of(COSTS))
    assert model.results_of_a_batch == pytest.approx(2.0 * 4.0)  # four seconds of two results
    expected = {
        "processor of the caller": 1 / (1e-3 / 8 + 2e-3),
        "processor of the scheduler": (1 - HEARTBEAT * MOST_HEARTBEATS) / (2e-3 / 8 + 1e-4),
        "1 Gbit/s at the caller": LINK_BYTES_PER_SECOND / (6_000 / 8 + 1_500),
        "1 Gbit/s at the scheduler": LINK_BYTES_PER_SECOND / (12_000 / 8 + 3_000),
    }
    assert {limit.what: limit.rate for limit in model.limits} == pytest.approx(expected, rel=1e-3)
    lowest = model.limits[0]
    assert lowest.what == "processor of the caller"
    assert lowest.workers == pytest.approx(lowest.rate / 2.0)
    assert model.rate(10) == pytest.approx(20.0)
    assert model.rate(1000) == lowest.rate


def test_a_batch_holds_a_job_at_least():
    assert model_of(host_of(COSTS, results_of_a_job=60.0)).results_of_a_batch == 60.0


def test_runs_at_the_pace_of_real_workers_are_compared_with_the_model():
    found = [(run.kind, run.workers, rate) for run, rate in predicted(host_of(COSTS))]
    assert found == [(REAL, 1, pytest.approx(2.0)), (PACED, 50, pytest.approx(100.0))]


def test_the_model_needs_batches_of_two_sizes():
    with pytest.raises(ValueError, match="give --workers and --idle"):
        model_of(host_of(COSTS, idle=(run_of(PACED, 50, 10_000, 2_000, COSTS),)))


def test_a_file_gets_more_hosts_and_more_rows_and_what_is_measured_again_replaces(tmp_path):
    path = tmp_path / "cluster.json"
    assert read_hosts(path) == []
    first = host_of(COSTS)
    write_hosts([first], path)
    again = replace(first.rows[0], cluster=3.0)
    more = replace(first, rows=(replace(again, workers=4), again), idle=())
    other = replace(first, environment={**ENVIRONMENT, "cores": 16})
    here, there = merged(read_hosts(path), [more, other])
    assert [(row.workers, row.cluster) for row in here.rows] == [(1, 3.0), (4, 3.0)]
    assert here.idle == first.idle
    assert there.name == "16 cores of Some CPU"
    assert there.rows == first.rows


def test_what_a_run_of_one_case_takes_is_left_out():
    one, many = run_of(REAL, 1, 2, 1, COSTS), run_of(REAL, 1, 202, 41, COSTS)
    left = many.since(one)
    assert (left.results, left.seconds, left.lasted) == (202, 100.0, 0.0)
    assert (left.scheduler.batches, left.scheduler.transitions) == (40, 160)
    assert left.caller.seconds == pytest.approx(40 * 1e-3 + 200 * 2e-3)


def test_the_figure_has_a_panel_for_each_host_and_no_date():
    hosts = [host_of(COSTS), host_of(COSTS, environment={**ENVIRONMENT, "cores": 16})]
    drawn = figure(hosts)
    assert drawn == figure(hosts)
    assert len(set(re.findall(r'id="(axes_\d+)"', drawn))) == 2
    assert "dc:date" not in drawn


def test_without_idle_workers_there_is_no_model():
    host = host_of(COSTS, idle=())
    assert [line[:4] for line in tables(host).splitlines()].count("|---") == 1
    assert "model" not in figure([host])


def test_the_page_has_the_tables_of_the_file():
    page = (ROOT / "docs" / "how-to" / "cluster.md").read_text()
    hosts = read_hosts(MEASURED)
    assert hosts
    assert [host.name for host in hosts if tables(host) not in page] == []
    assert all(host.can_be_modelled for host in hosts)


def test_an_idle_worker_answers_with_a_result_of_each_check():
    calls = (Case(q_len=3, kv_len=5), ("forward", "gradients")), (Case(q_len=4, kv_len=5), ("forward",))
    job = Job("toys.right", lambda *_: None, calls[0], (calls[1],))
    found = cluster_processes._answers(0.0, (job,), 1.0)
    assert [outcome.job for outcome in found] == [*job.calls]
    results = [result for outcome in found for result in outcome.value]
    assert [(result.case, result.check) for result in results] == [
        (case, check) for case, checks in calls for check in checks
    ]
    assert {(result.subject, result.verdict) for result in results} == {("toys.right", Verdict.PASS)}
    assert all(result.measurements for result in results)


@patch.dict(os.environ)
def test_what_is_measured_is_kept_though_the_rest_fails(tmp_path, monkeypatch):
    file = tmp_path / "cluster.json"
    (row,), (paced, short) = host_of(COSTS).rows, host_of(COSTS).idle
    left = {PACED: [replace(paced, workers=4)], SHORT: [short]}

    def measured(_subject, kind, workers, seconds):
        assert seconds == (len(cluster._CHECKS) / row.cluster if kind == PACED else cluster._SHORT_SECONDS)
        return left[kind].pop()

    monkeypatch.setattr(cluster, "_row", lambda *_: row)
    monkeypatch.setattr(cluster, "_idle_run", measured)
    monkeypatch.setattr(cluster, "_results_of_a_job", lambda *_: 6.0)
    app = Typer()
    app.command()(cluster.main)
    found = CliRunner().invoke(app, ["--workers", "1", "--idle", "4", "--idle", "5", "--json", str(file)])
    assert isinstance(found.exception, IndexError)
    (host,) = read_hosts(file)
    assert host.rows == (row,)
    assert {run.kind for run in host.idle} == {PACED, SHORT}
    drawn = tmp_path / "cluster.svg"
    found = CliRunner().invoke(app, ["--other", str(file), "--figure", str(drawn)])
    assert found.exit_code == 0
    assert tables(host) in found.output
    assert drawn.read_text() == figure([host])


@patch.dict(os.environ)
def test_idle_workers_need_the_pace_of_a_real_one():
    app = Typer()
    app.command()(cluster.main)
    found = CliRunner().invoke(app, ["--idle", "2", "--examples", "2"])
    assert found.exit_code == 1
    assert found.output == "--idle: expected with --workers, or with a file that has a row of this host\n"


@patch.dict(os.environ)
def test_a_measurement_counts_what_the_scheduler_and_the_caller_do(tmp_path):
    app = Typer()
    app.command()(cluster.main)
    file, drawn = tmp_path / "cluster.json", tmp_path / "cluster.svg"
    options = ["--workers", "1", "--repeats", "1", "--examples", "6", "--idle", "4"]
    found = CliRunner().invoke(app, [*options, "--json", str(file), "--figure", str(drawn)])
    assert found.exit_code == 0, found.output
    (host,) = read_hosts(file)
    (row,) = host.rows
    assert row.workers == row.counted.workers == 1
    assert {run.kind for run in host.idle} == {PACED, SHORT}
    for run in (row.counted, *host.idle):
        assert run.results > 0
        assert run.scheduler.transitions >= 4 * run.scheduler.batches > 0
        # Whatever the caller receives or sends goes through the scheduler.
        assert run.scheduler.spent.bytes > run.caller.bytes > 0
        assert run.scheduler.spent.messages > run.caller.messages > 0
    assert tables(host) in found.output
    assert drawn.read_text().startswith("<?xml")
