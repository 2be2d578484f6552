"""The instrument counts what it judged, keeps every alarm with its case, and stops in time."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.process.pool import Outcome
from attest.conformance.process.settings import LostError
from attest.conformance.record import Measurement, Result, Verdict
from tests.alarms import run
from tests.alarms.run import main
from tests.alarms.tally import Tally
from tests.conformance.cli.processes import ROOT

PASSED = Result("xla.attention", "forward", (), Case(seed=3, kv_len=5), Verdict.PASS)
MEASURED = Measurement("out", 40, worst_ratio=0.5, rms_ratio=0.8, largest_z=2.0, bias_t=-3.0)


def test_an_alarm_is_kept_with_its_case_and_its_numbers() -> None:
    tally = Tally()
    measured = replace(MEASURED, broken=("z",))
    tally.add("outsider", replace(PASSED, verdict=Verdict.FAIL, measurements=(measured,), message="no"), 7)
    (line,) = tally.lines
    assert (line["verdict"], line["seed"], line["case"], line["message"]) == (
        "FAIL",
        7,
        PASSED.case.to_json(),
        "no",
    )
    assert line["measurements"][0]["broken"] == ["z"]
    assert tally.red == 1


def test_what_passes_or_is_refused_is_counted_alone() -> None:
    tally = Tally()
    tally.add("outsider", PASSED, 7)
    tally.add("outsider", replace(PASSED, verdict=Verdict.UNSUPPORTED), 7)
    tally.add("outsider", replace(PASSED, verdict=Verdict.INCONCLUSIVE), 7)
    assert [line["verdict"] for line in tally.lines] == ["INCONCLUSIVE"]
    counts = tally.counts_json()
    assert (counts["results"], counts["red"]) == (3, 0)
    assert counts["by_subject"] == {"outsider": {"INCONCLUSIVE": 1, "PASS": 1, "UNSUPPORTED": 1}}


def test_tallies_add_up_to_the_largest_statistics() -> None:
    total = Tally()
    for subject, z in (("a", 2.0), ("b", 4.0), ("c", 1.0)):
        tally = Tally()
        tally.add(subject, replace(PASSED, measurements=(replace(MEASURED, largest_z=z),)), 0)
        total.join(tally)
    summary = total.summary()
    assert summary["results"] == 3
    largest = {entry["statistic"]: (entry["value"], entry["subject"]) for entry in summary["largest"]}
    assert largest["largest_z"] == (4.0, "b")
    assert largest["bias_t"][0] == 3.0
    assert 0 < largest["z_of_limit"][0] < 4.0


# It sets what its processes inherit, which the tests that follow must not.
@patch.dict(os.environ)
def test_a_run_stops_in_time_and_ends_its_file_with_a_summary(tmp_path: Path) -> None:
    out = tmp_path / "alarms.jsonl"
    options = ["--profile", "quick", "--seeds", "5", "--workers", "1", "--seconds", "5", "--out", str(out)]
    evidence = tmp_path / "evidence.json"
    main([*options, "--subjects", "outsider.numpy", "--evidence", str(evidence)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[-1]["kind"] == "summary"
    assert lines[-1]["profile"] == "quick"
    assert json.loads(evidence.read_text()) == lines[-1]
    judged = sum(sum(verdicts.values()) for verdicts in lines[-1]["by_subject"].values())
    assert judged == lines[-1]["results"]
    assert all(name.startswith("outsider.numpy.") for name in lines[-1]["by_subject"])


@patch.dict(os.environ)
def test_the_file_of_a_run_whose_workers_are_lost_has_what_they_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def perform(jobs: Iterator[object], *_arguments: object) -> Iterator[Outcome]:
        tally = Tally()
        tally.add("outsider.numpy.plain", replace(PASSED, verdict=Verdict.FAIL), 5)
        yield Outcome(next(jobs), tally)
        raise LostError("the last worker was lost")

    monkeypatch.setattr(run, "perform", perform)
    out = tmp_path / "alarms.jsonl"
    options = ("--profile", "quick", "--seeds", "5", "--workers", "1", "--subjects", "outsider.numpy")
    assert main([*options, "--out", str(out)]) == 1
    assert [json.loads(line)["kind"] for line in out.read_text().splitlines()] == ["result", "summary"]
    assert capsys.readouterr().err == "attest: the last worker was lost\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ("--cluster", "local:0"),
            "attest: --cluster: got 'local:0', expected local:N with 1 to 1024 workers",
        ),
        (("--workers", "0"), "--workers: got 0, expected at least 1"),
        (("--mixed",), "--mixed: expected with --cluster"),
        (
            ("--cluster", "local:1", "--workers", "1"),
            "--cluster and --workers: a cluster has workers of its own: give one of both",
        ),
    ],
    ids=["address", "workers", "mixed", "both"],
)
@patch.dict(os.environ)
def test_wrong_options_are_one_sentence(
    options: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "alarms.jsonl"
    try:
        status = main([*options, "--out", str(out)])
    except SystemExit as ended:
        status = ended.code
    assert status
    assert capsys.readouterr().err.splitlines()[-1].endswith(sentence)
    assert not out.exists()


def test_a_cluster_judges_what_processes_do(tmp_path: Path) -> None:
    out = tmp_path / "alarms.jsonl"
    options = ("--profile", "quick", "--seeds", "5", "--subjects", "outsider.numpy", "--seconds", "10")
    done = subprocess.run(
        [sys.executable, "-m", "tests.alarms.run", *options, "--cluster", "local:1", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(out.read_text().splitlines()[-1])
    assert summary["results"] > 0
    assert all(name.startswith("outsider.numpy.") for name in summary["by_subject"])
