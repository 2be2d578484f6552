"""The file of a speed benchmark: what is measured is kept, and is not measured again."""

import io
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from attest.conformance.running import environment as run_environment
from attest.conformance.tuning.workload import Workload
from attest.kernels import xla
from benchmarks import gpu_speed, runner, targets
from benchmarks.contenders import KERNELS
from benchmarks.processes import part_of, run_parts
from benchmarks.record import (
    OURS,
    Absent,
    Entry,
    Report,
    ReportFile,
    Result,
    Row,
    Run,
    Samples,
    State,
    Target,
    read_report,
)
from benchmarks.report import MILLISECONDS, Layout, as_markdown
from benchmarks.state import parse, watched
from benchmarks.targets import PLAIN
from benchmarks.workload import FORWARD
from tests.benchmarks.test_gpu_speed import small_targets
from tests.meta.processes import ROOT

FOLDER = ROOT / "reports" / "data" / "benchmarks"

RUN = Run("today", "abc", "toy", {"jax": "1"})
LAYOUT = Layout("Toys", "In turns.", (MILLISECONDS,))
SMALL = Workload(2, 16, 2, 8, causal=True, key_heads=1)
TITLES = [
    f"{name}, {direction}"
    for name in ("plain", "model", "feature")
    for direction in ("forward", "forward + backward")
]


def row(name: str, workload: Workload = SMALL) -> Row:
    entries = {name: Entry(name, workload) for name in (OURS, "gone", "other")}
    return Row(name, FORWARD, entries, (Target("other", "speed", 2.0),), "a note")


MEASURED = {OURS: Samples((0.5, 0.25, 1.0)), "gone": Absent("no wheel"), "other": Samples((0.75,), 0.125)}


def benchmark(monkeypatch: pytest.MonkeyPatch, folder: Path, commit: str = "abc", family: str = "triton"):
    """A benchmark of small workloads, with the kernels that run anywhere in place of those for GPUs."""
    small_targets(folder, family)
    monkeypatch.setattr(targets, "FOLDER", folder)
    anywhere(monkeypatch, commit)
    monkeypatch.setitem(sys.modules, KERNELS[family], xla)
    return lambda **options: gpu_speed.main(folder / "out", kernels=family, **options)


def anywhere(monkeypatch: pytest.MonkeyPatch, commit: str = "abc") -> None:
    """Run benchmarks without the device that they need, at a commit."""
    monkeypatch.setattr(runner, "_need", lambda benchmark: None)
    about = {"commit": commit, "processor": "toy"}
    monkeypatch.setattr(run_environment, "environment", lambda: about)


def counted(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> list[str]:
    """The titles of the rows that are measured from now on, the last of which is interrupted."""
    titles: list[str] = []
    measure = gpu_speed.measure

    def counting(it: Row, *others, **options):
        titles.append(it.title)
        if len(titles) == stop_at:
            raise KeyboardInterrupt
        return measure(it, *others, **options)

    monkeypatch.setattr(gpu_speed, "measure", counting)
    return titles


@pytest.mark.parametrize(
    ("family", "report"), [("triton", "gpu_speed"), ("mosaic_gpu", "gpu_speed_mosaic_gpu")]
)
def test_a_run_times_the_kernels_that_are_named(
    family: str, report: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    benchmark(monkeypatch, tmp_path, family=family)(rows=", forward +")
    assert sorted(it.name for it in (tmp_path / "out").iterdir()) == [f"{report}.jsonl", f"{report}.md"]
    header, *lines = (tmp_path / "out" / f"{report}.jsonl").read_text().splitlines()
    assert json.loads(header)["schema"] == "attest.benchmark/1"
    peers, models, features = map(json.loads, lines)
    assert [it["name"] for it in (peers, models, features)] == ["plain", "model", "feature"]
    assert [it["label"] for it in peers["entries"]] == [OURS, "cudnn"]
    assert [it["label"] for it in models["entries"]] == [OURS, "cudnn"]
    assert [it["label"] for it in features["entries"]] == [OURS, PLAIN]
    measured = [it["contender"] for line in (peers, models, features) for it in line["entries"]]
    assert measured.count(f"our_{family}") == 4
    reasons = {it["absent"] for line in (peers, models) for it in line["entries"] if "absent" in it}
    assert reasons == {"NotImplementedError: runs on gpu, this machine has cpu"}


def test_a_run_that_is_stopped_leaves_what_it_measured_and_goes_on_from_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    run = benchmark(monkeypatch, tmp_path)
    file = tmp_path / "out" / "gpu_speed.jsonl"
    with monkeypatch.context() as patch:
        counted(patch, stop_at=4)
        with pytest.raises(KeyboardInterrupt):
            run()
    before = file.read_text()
    assert [it.row.title for it in read_report(file).results] == TITLES[:3]
    # The report of that moment is made from those rows.
    assert file.with_suffix(".md").read_text() == as_markdown(
        read_report(file), gpu_speed.benchmark("triton").layout
    )

    again = counted(monkeypatch)
    run()
    assert again == TITLES[3:]
    assert file.read_text().startswith(before)
    assert [it.row.title for it in read_report(file).results] == TITLES
    assert file.with_suffix(".md").read_text() == as_markdown(
        read_report(file), gpu_speed.benchmark("triton").layout
    )
    run()
    assert again == TITLES[3:], "nothing is left to measure"


def test_progress_is_shown_on_terminals(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    run = benchmark(monkeypatch, tmp_path)
    monkeypatch.delenv("CI", raising=False)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    run(rows="plain")
    shown = terminal.getvalue()
    places = [shown.index(text) for text in ("compiling plain", TITLES[0], "0/2", TITLES[1], "1/2")]
    assert places[0] < places[1] < places[3]

    nowhere = io.StringIO()
    monkeypatch.setattr(sys, "stderr", nowhere)
    run(rows="model")
    assert nowhere.getvalue() == ""


def test_another_row_by_the_same_name_is_measured(tmp_path) -> None:
    file = ReportFile(tmp_path / "rows.jsonl", RUN)
    file.add(Result(row("a"), MEASURED))
    there = file.read()
    assert there.of(row("a")) == Result(row("a"), MEASURED)
    assert there.of(row("b")) is None
    assert there.of(row("a", Workload(2, 16, 2, 8))) is None
    assert there.of(replace(row("a"), unit="bytes")) is None


def test_a_row_is_read_as_it_was_written(tmp_path) -> None:
    target = Target("plain", "speed", 0.5, ("plain", "spread"))
    entries = {"plain": Entry("a"), "spread": Entry("b", Workload(1, 8, 2, 8, dtype="float32"), devices=2)}
    other = Row("b", "", entries, (target,), unit="bytes")
    results = (
        Result(row("a"), MEASURED),
        Result(other, {"plain": Absent("no"), "spread": Samples((3.0,), by_device=True)}),
    )
    file = ReportFile(tmp_path / "rows.jsonl", RUN)
    for result in results:
        file.add(result)
    assert file.read() == Report(RUN, results)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/*.jsonl")), ids=lambda path: path.parent.name)
def test_a_report_that_is_kept_is_read(path: Path) -> None:
    """Those of an earlier schema, too."""
    report = read_report(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert report.run.device.startswith("NVIDIA")
    shown = [
        {it["label"]: it["milliseconds"] for it in line["entries"] if "milliseconds" in it} for line in lines
    ]
    read = [
        {label: 1e3 * it.median for label, it in result.measured.items() if isinstance(it, Samples)}
        for result in report.results
    ]
    assert read == shown
    assert [[it.outcome(target) for target in it.row.targets] for it in report.results] == [
        [it["outcome"] for it in line["targets"]] for line in lines
    ]
    assert [result.state is None for result in report.results] == [not line["state"] for line in lines]


def test_clock_and_power_are_kept_with_the_row(tmp_path) -> None:
    state = parse(["345, 70.31", "[N/A], 12.0", "", "1980, 691.50", "1755, 688.2"])
    assert state == State((345, 1980), (70.31, 691.5))
    file = ReportFile(tmp_path / "rows.jsonl", RUN)
    file.add(Result(row("a"), MEASURED, state))
    file.add(Result(row("b"), MEASURED))
    report = file.read()
    assert [it.state for it in report.results] == [state, None]
    assert "| a, forward | 345 to 1980 MHz, 70 to 692 W |" in as_markdown(report, LAYOUT)


def test_there_is_no_state_without_readings(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    assert parse(["NVIDIA-SMI has failed"]) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    with watched() as watch:
        pass
    assert watch.state is None


def test_the_readings_are_those_of_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    program = tmp_path / "nvidia-smi"
    started = tmp_path / "started"
    program.write_text(f"#!/bin/sh\necho 1000, 300.0\ntouch {started}\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with watched() as watch:
        while not started.exists():
            time.sleep(0.01)
    assert watch.state == State((1000, 1000), (300, 300))


def test_a_line_that_was_cut_off_is_measured_again(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    file = ReportFile(path, RUN)
    file.add(Result(row("a"), MEASURED))
    whole = path.read_bytes()
    file.add(Result(row("b"), MEASURED))
    path.write_bytes(path.read_bytes()[:-20])
    assert [it.row.name for it in read_report(path).results] == ["a"]
    again = ReportFile(path, RUN)
    assert path.read_bytes() == whole
    again.add(Result(row("b"), MEASURED))
    assert [it.row.name for it in read_report(path).results] == ["a", "b"]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (replace(RUN, device="other"), "measured with device toy, now it is other: choose another --out"),
        (replace(RUN, versions={"jax": "2"}), "measured with jax 1, now it is 2"),
        (replace(RUN, commit="abd"), "measured with commit abc, now it is abd"),
        (replace(RUN, versions={"jax": "1", "tokamax": "1"}), "measured with tokamax None, now it is 1"),
    ],
)
def test_rows_of_another_device_version_or_commit_are_not_mixed(run: Run, message: str, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    ReportFile(path, RUN).add(Result(row("a"), MEASURED))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        ReportFile(path, run)
    ReportFile(path, replace(RUN, date="tomorrow"))
    assert path.read_bytes() == before


@pytest.mark.parametrize("commit", ["", "abc+dirty"])
def test_rows_of_uncommitted_code_are_not_gone_on_with(
    commit: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    run = benchmark(monkeypatch, tmp_path, commit)
    run(rows="plain, forward +")
    with pytest.raises(SystemExit, match="measured with uncommitted code"):
        run()


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", "nothing\n", '{"schema":"attest.run/2"}\n'])
def test_another_file_is_refused(text: str, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="its first line is no "):
        read_report(path)


@pytest.mark.parametrize("there", [0, 1])
def test_processes_measure_every_row_once(
    there: int, monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two threads stand in for two processes. there: how many rows an earlier run has measured."""

    def run_parts(module: str, arguments: Sequence[str], parts: int, folder: Path) -> list[Path]:
        assert (module, parts) == ("benchmarks.gpu_speed", 2)
        assert arguments == ("--kernels", "triton", "--contenders", "ours", "--rows", "forward +")
        outs = [folder / f"part{i}" for i in (1, 2)]
        app = typer.Typer()
        app.command()(gpu_speed.main)
        command = typer.main.get_command(app)
        with ThreadPoolExecutor() as pool:
            for i, out in enumerate(outs):
                its = ("--part", f"{i + 1}/2", "--meet", str(folder), "--out", str(out))
                pool.submit(command.main, [*arguments, *its], standalone_mode=False)
        return outs

    run = benchmark(monkeypatch, tmp_path)
    if there:
        run(rows=TITLES[1], contenders="ours")
    monkeypatch.setattr(runner, "run_parts", run_parts)
    capsys.readouterr()
    run(rows="forward +", contenders="ours", processes=2)
    measured = [line for line in capsys.readouterr().out.splitlines() if line in TITLES]
    assert sorted(measured) == sorted(TITLES[1::2][there:])
    report = read_report(tmp_path / "out" / "gpu_speed.jsonl")
    assert [it.row.title for it in report.results] == TITLES[1::2]
    assert (tmp_path / "out" / "gpu_speed.md").read_text() == as_markdown(
        report, gpu_speed.benchmark("triton").layout
    )


def test_a_part_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "program.py").write_text(
        "import pathlib, sys\n"
        "part, out = (sys.argv[sys.argv.index(it) + 1] for it in ('--part', '--out'))\n"
        "assert part != '2/3'\n"
        "pathlib.Path(out).mkdir()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    meet = tmp_path / "meet"
    assert run_parts("program", (), 3, meet) == [meet / "part1", meet / "part3"]
    assert [part_of("abcde", f"{i}/2") for i in (1, 2)] == [["a", "c", "e"], ["b", "d"]]
