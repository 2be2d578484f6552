"""The commands of the benchmarks; the benchmarks of CPUs, of training and of arithmetic."""

import importlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks import (
    cpu,
    gpu_compile,
    gpu_speed,
    ring_speed,
    ring_training,
    runner,
    targets,
    timing,
    wrong_kernels,
)
from benchmarks.contenders import CONTENDERS
from benchmarks.record import OURS, SECONDS, Absent, Entry, Report, Result, Row, Samples, read_report
from benchmarks.report import MILLISECONDS, Layout, as_markdown
from benchmarks.timing import Timing, measure_each
from benchmarks.workload import FORWARD
from tests.benchmarks.test_gpu_rows import anywhere

DATA = targets.read(targets.CPU)
SMALL = {"batch": 1, "length": 8, "heads": 2, "head_dim": 8, "causal": True, "dtype": "float32"}
MODULES = (cpu, gpu_compile, gpu_speed, ring_speed, ring_training, wrong_kernels)


def invoke(module: Any, *arguments: object) -> Any:
    """The result of a command of a module."""
    app = typer.Typer()
    app.command()(module.main)
    return CliRunner().invoke(app, [str(it) for it in arguments])


def small(**changes: Any) -> dict[str, Any]:
    """The data of targets.toml with one small call of each kind, each timed once."""
    quick = {"samples": 1, "sample_seconds": 1e-9}
    call = {"shape": [1, 8, 2, 8], "operation_ratio": 1e9}
    large = {"workload": SMALL, "memory_length": 16}
    most = dict.fromkeys(("forward_ratio", "forward_backward_ratio", "memory_ratio"), 1e9)
    return {
        "xla": {
            "flash_attention": large | most | {"timing": quick},
            "small": {"timing": quick, "shapes": [[1, 1, 8, 2, 8]], "ratio": 1e9, "compile_ratio": 1e9}
            | changes,
        },
        "eager": {"timing": quick, "peer_ratio": 1e9, "calls": [call]},
    }


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_benchmark_has_the_options_of_the_runner(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    given: list[tuple[Path, str]] = []

    def run(benchmark: Any, out: Path, rows: str = "", *others: Any) -> None:
        given.append((out, rows))
        assert importlib.import_module(f"benchmarks.{benchmark.module}") is module
        raise SystemExit(0)

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    result = invoke(module, "--out", tmp_path, "--rows", "a row")
    assert result.exit_code == 0, result.output
    assert given == [(tmp_path, "a row")]


def test_targets_of_cpus_are_of_entries() -> None:
    benchmarks = cpu.benchmarks(DATA)
    assert len({it.file for it in benchmarks}) == len(benchmarks)
    for row in (row for it in benchmarks for row in it.rows):
        assert row.targets
        for target in row.targets:
            assert {target.other, *target.of} <= row.entries.keys()
        known = cpu.EAGER if OURS not in row.entries else CONTENDERS
        assert {entry.contender for entry in row.entries.values()} <= known.keys()
        # A row is about calls that see as many pairs.
        assert len({entry.call().dtype for entry in row.entries.values()}) == 1
    assert {Timing(**it["timing"]).cpu_time for it in (DATA["eager"], DATA["xla"]["small"])} == {True}


def test_a_run_on_a_cpu_measures_times_compilation_and_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    anywhere(monkeypatch)
    monkeypatch.setattr(cpu, "COMPILATIONS", 1)
    # The other tests of this process need what they compiled.
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    monkeypatch.setattr(targets, "read", lambda path: small())
    result = invoke(cpu, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    found = [
        it
        for name in ("large", "small", "eager")
        for it in read_report(tmp_path / f"cpu_{name}.jsonl").results
    ]
    assert {it.row.unit for it in found} == {SECONDS, cpu.BYTES, targets.TO_COMPILE}
    for it in found:
        assert all(it.value(label) is not None for label in it.row.entries), it
        assert [it.outcome(target) for target in it.row.targets] == ["met"] * len(it.row.targets)
        for label, measured in it.measured.items():
            if it.row.unit == SECONDS and it.row.entries[label] == it.row.entries.get(OURS):
                assert isinstance(measured, Samples)
                assert measured.difference is None or measured.difference < 1e-4


def test_a_missed_target_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    anywhere(monkeypatch)
    monkeypatch.setattr(targets, "read", lambda path: small(ratio=0.0))
    result = invoke(cpu, "--out", tmp_path, "--rows", "full, forward")
    assert result.exit_code == 1
    assert re.search(r"\| MISSED +\|", result.output)
    assert {it.stem for it in tmp_path.iterdir()} == {"cpu_small"}


@pytest.mark.process(TRITON_INTERPRET="1")
def test_the_arithmetic_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """In Triton's interpreter, which adds in float32."""
    from benchmarks import gpu_numerics

    anywhere(monkeypatch)
    monkeypatch.setattr(gpu_numerics, "POINTS", gpu_numerics.BLOCK)
    result = invoke(gpu_numerics, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    functions, *products = read_report(tmp_path / "gpu_numerics.jsonl").results
    for name in ("exp2", "tanh"):
        assert 0 < functions.value(name) < 1e-6
    for it in products:
        assert [it.value(f"1 + {units} ulp") for units in (0.25, 1.0, 1.75)] == [0, 1, 2]


def test_trainings_are_compared_with_one_device(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    benchmark = ring_training.benchmark()
    rows = benchmark.rows
    assert [row.name for row in rows] == ["float32", "bfloat16"]

    def losses(dtype: str, entry: Any) -> np.ndarray:
        if entry.contender == "ulysses":
            raise NotImplementedError("no heads")
        return np.array([2.0, 1.0]) * (1.0 if entry.contender == ring_training.ONE else 1.125)

    monkeypatch.setattr(ring_training, "losses", losses)
    results = [Result(row, benchmark.measure(row, {})) for row in rows]
    cells = [
        column.cell(results[0], "ring, 2 devices", Samples((2.25, 1.125)))
        for column in benchmark.layout.columns
    ]
    assert cells == ["1.125", "1.2e-01"]
    assert results[0].measured["ulysses, 2 devices"] == Absent("NotImplementedError: no heads")
    assert ring_training.plot(results).count("loss on one device") == len(rows)


def test_a_value_that_is_not_finite_is_absent() -> None:
    row = ring_training.benchmark().rows[0]
    measured = measure_each(row, lambda _, entry: [1.0, math.nan if entry.devices == 8 else 2.0])
    assert measured["ring, 8 devices"] == Absent("ValueError: a value is not finite")
    assert measured["ring, 4 devices"] == Samples((1.0, 2.0))


def test_a_text_that_is_in_no_title_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    anywhere(monkeypatch)
    with pytest.raises(
        SystemExit, match=r"^--rows window: no row has this in its title; .* of 4096 tokens, "
    ):
        cpu.main(tmp_path, rows="window")
    assert not list(tmp_path.iterdir())


def test_short_calls_have_the_time_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("short", FORWARD, {"a": Entry("a"), "b": Entry("b")})
    prepared = {(entry, FORWARD): lambda: jax.numpy.ones(3) for entry in row.entries.values()}
    monkeypatch.setattr(timing, "device_seconds", lambda run, timing: (1e-5,))
    by_device = timing.measure(row, prepared, Timing(1, 1e-9, device_time_below=1e9))
    assert by_device == {"a": Samples((1e-5,), None, True), "b": Samples((1e-5,), 0.0, True)}
    by_clock = timing.measure(row, prepared, Timing(1, 1e-9, device_time_below=0.0))
    assert not any(it.by_device for it in by_clock.values())
    cells = [MILLISECONDS.cell(Result(row, it), "a", it["a"]) for it in (by_device, by_clock)]
    assert cells[0] == "0.010 (device)"
    assert not cells[1].endswith("(device)")


def test_geometric_means_are_of_rows_that_have_both() -> None:
    row = Row("row", FORWARD, {name: Entry(name) for name in (OURS, "slow", "gone")})
    gone = Absent("no wheel")
    results = (
        Result(row, {OURS: Samples((1.0,)), "slow": Samples((2.0,)), "gone": gone}),
        Result(row, {OURS: Samples((1.0,)), "slow": Samples((8.0,)), "gone": Samples((1.0,))}),
        Result(row, {OURS: gone, "slow": Samples((100.0,)), "gone": Samples((1.0,))}),
        Result(replace(row, unit="bytes"), dict.fromkeys(row.entries, Samples((1.0,)))),
    )
    text = as_markdown(Report(runner.this_run(), results), Layout("Toys", "In turns.", (MILLISECONDS,)))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["forward", "slow", "4.00x", "2.00x", "2"] in lines
    assert ["forward", "gone", "1.00x", "1.00x", "1"] in lines
    assert ["forward", "the fastest of them", "1.41x", "1.00x", "2"] in lines


def test_values_that_are_no_times_are_written_with_their_unit(tmp_path) -> None:
    row = cpu.large_rows(DATA["xla"]["flash_attention"])[-1]
    file = runner.ReportFile(tmp_path / "rows.jsonl", runner.this_run())
    file.add(Result(row, {OURS: Samples((1e6,)), cpu.PEER: Samples((1e9,))}))
    line = json.loads(file.path.read_text().splitlines()[1])
    assert line["unit"] == "bytes"
    assert ["milliseconds" in entry for entry in line["entries"]] == [False, False]
    assert [it["outcome"] for it in line["targets"]] == ["met"]
