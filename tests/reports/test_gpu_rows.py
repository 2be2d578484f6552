"""The file of a speed benchmark: what is measured is kept, and is not measured again."""

import io
import json
import os
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attest.conformance.running import environment as run_environment
from attest.kernels import xla
from benchmarks import gpu_speed, gpu_tune
from benchmarks.gpu.contenders import KERNELS
from benchmarks.gpu.processes import part_of, run_parts
from benchmarks.gpu.report import as_markdown
from benchmarks.gpu.rows import RowsFile, read_report, row_name
from benchmarks.gpu.state import State, parse, watched
from benchmarks.gpu.targets import OURS, PLAIN, Row, Target, Times
from benchmarks.gpu.timing import Absent
from benchmarks.gpu.workload import FORWARD, Workload
from tests.reports.test_gpu_speed import small_targets

ABOUT = {"date": "today", "commit": "abc", "device": "toy", "jax": "1"}
SMALL = Workload(2, 16, 2, 8, causal=True, key_heads=1)
TITLES = [
    f"{name}, {direction}"
    for name in ("plain", "model", "feature")
    for direction in ("forward", "forward + backward")
]


def row(name: str, workload: Workload = SMALL) -> Row:
    entries = {OURS: ("ours", workload), "gone": ("gone", workload), "other": ("other", workload)}
    return Row(name, FORWARD, entries, (Target("other", "speed", 2.0),), "a note")


MEASURED = {OURS: Times((0.5, 0.25, 1.0)), "gone": Absent("no wheel"), "other": Times((0.75,), 0.125)}


def benchmark(monkeypatch: pytest.MonkeyPatch, folder: Path, commit: str = "abc", family: str = "triton"):
    """A benchmark of small workloads, with the kernels that run anywhere in place of those for GPUs."""
    small_targets(folder, family)
    monkeypatch.setattr(gpu_speed, "TARGETS", folder)
    monkeypatch.setattr(gpu_speed, "need_gpu", lambda program: None)
    monkeypatch.setattr(run_environment, "environment", lambda: {"commit": commit})
    monkeypatch.setitem(sys.modules, KERNELS[family], xla)
    return lambda **options: gpu_speed.main(folder / "out", kernels=family, **options)


def counted(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> list[str]:
    """The titles of the rows that are measured from now on, the last of which is interrupted."""
    titles: list[str] = []
    measure = gpu_speed.measure

    def counting(it: Row, *others):
        titles.append(it.title)
        if len(titles) == stop_at:
            raise KeyboardInterrupt
        return measure(it, *others)

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
    assert json.loads(header)["about"]["ours"] == KERNELS[family]
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
    assert [it.title for it, _ in read_report(file).rows] == TITLES[:3]
    # The report of that moment is made from those rows.
    assert file.with_suffix(".md").read_text() == as_markdown(read_report(file))

    again = counted(monkeypatch)
    run()
    assert again == TITLES[3:]
    assert file.read_text().startswith(before)
    assert [it.title for it, _ in read_report(file).rows] == TITLES
    assert file.with_suffix(".md").read_text() == as_markdown(read_report(file))
    run()
    assert again == TITLES[3:], "nothing is left to measure"


def test_tuning_that_is_stopped_goes_on_from_there(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    titles: list[str] = []

    def measure(sweep, timing):
        titles.append(sweep.title)
        if len(titles) == 3:
            raise KeyboardInterrupt
        own, *others = sweep.candidates
        return {own: 2.0} | dict.fromkeys(others, Absent("out of resources"))

    monkeypatch.setattr(gpu_tune, "need_gpu", lambda program: None)
    monkeypatch.setattr(gpu_tune, "measure", measure)
    monkeypatch.setattr(run_environment, "environment", lambda: {"commit": "abc"})
    sweeps = gpu_tune.read_sweeps(tomllib.loads(gpu_tune.CANDIDATES.read_text()))
    todo = [it for it in sweeps if it.kernel == "forward"]
    with pytest.raises(KeyboardInterrupt):
        gpu_tune.main(tmp_path, rows="forward")
    done = gpu_tune.read_done(tmp_path / "gpu_tune.jsonl")
    assert [sweep for sweep, _ in done] == todo[:2]
    own, *others = todo[0].candidates
    assert done[0][1] == {own: 2.0} | dict.fromkeys(others, Absent("out of resources"))
    gpu_tune.main(tmp_path, rows="forward")
    assert titles[3:] == [it.title for it in todo[2:]]
    assert [sweep for sweep, _ in gpu_tune.read_done(tmp_path / "gpu_tune.jsonl")] == todo


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
    file = RowsFile(tmp_path / "rows.jsonl", ABOUT, 0.05)
    file.add(row("a"), MEASURED)
    there = file.read()
    assert there.times(row("a")) == MEASURED
    assert there.times(row("b")) is None
    assert there.times(row("a", Workload(2, 16, 2, 8))) is None


def test_a_row_is_read_as_it_was_written(tmp_path) -> None:
    file = RowsFile(tmp_path / "rows.jsonl", ABOUT, 0.05)
    file.add(row("a"), MEASURED)
    report = file.read()
    assert report.about == ABOUT
    assert report.largest_difference == 0.05
    assert report.rows == ((row("a"), MEASURED),)


def test_clock_and_power_are_kept_with_the_row(tmp_path) -> None:
    state = parse(["345, 70.31", "[N/A], 12.0", "", "1980, 691.50", "1755, 688.2"])
    assert state == State((345, 1980), (70.31, 691.5))
    file = RowsFile(tmp_path / "rows.jsonl", ABOUT, 0.05)
    file.add(row("a"), MEASURED, state)
    file.add(row("b"), MEASURED)
    report = file.read()
    assert report.states == {row_name(row("a")): state}
    assert "| a, forward | 345 to 1980 MHz, 70 to 692 W |" in as_markdown(report)


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
    file = RowsFile(path, ABOUT, 0.05)
    file.add(row("a"), MEASURED)
    whole = path.read_bytes()
    file.add(row("b"), MEASURED)
    path.write_bytes(path.read_bytes()[:-20])
    assert [it.name for it, _ in read_report(path).rows] == ["a"]
    again = RowsFile(path, ABOUT, 0.05)
    assert path.read_bytes() == whole
    again.add(row("b"), MEASURED)
    assert [it.name for it, _ in read_report(path).rows] == ["a", "b"]


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"device": "other"}, "measured with device toy, now it is other: choose another --out"),
        ({"jax": "2"}, "measured with jax 1, now it is 2"),
        ({"commit": "abd"}, "measured with commit abc, now it is abd"),
        ({"tokamax": "1"}, "measured with tokamax None, now it is 1"),
    ],
)
def test_rows_of_another_device_version_or_commit_are_not_mixed(
    about: dict[str, str], message: str, tmp_path
) -> None:
    path = tmp_path / "rows.jsonl"
    RowsFile(path, ABOUT, 0.05).add(row("a"), MEASURED)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        RowsFile(path, ABOUT | about, 0.05)
    RowsFile(path, ABOUT | {"date": "tomorrow"}, 0.05)
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


def test_processes_measure_every_row_once(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Two threads stand in for two processes."""

    def run_parts(module: str, arguments: Sequence[str], parts: int, folder: Path) -> list[Path]:
        assert (module, parts) == ("benchmarks.gpu_speed", 2)
        assert arguments == ("--kernels", "triton", "--rows", "forward +", "--contenders", "ours")
        outs = [folder / f"part{i}" for i in (1, 2)]
        given = {"kernels": "triton", "rows": "forward +", "contenders": "ours", "meet": folder}
        with ThreadPoolExecutor() as pool:
            for i, out in enumerate(outs):
                pool.submit(gpu_speed.main, out, **given, part=f"{i + 1}/2")
        return outs

    run = benchmark(monkeypatch, tmp_path)
    monkeypatch.setattr(gpu_speed, "run_parts", run_parts)
    run(rows="forward +", contenders="ours", processes=2)
    report = read_report(tmp_path / "out" / "gpu_speed.jsonl")
    assert [it.title for it, _ in report.rows] == TITLES[1::2]
    assert (tmp_path / "out" / "gpu_speed.md").read_text() == as_markdown(report)


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
