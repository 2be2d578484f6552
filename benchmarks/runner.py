"""The runner of benchmarks: options, rows measured side by side, one file of results and one report.

It needs neither an installed project nor a network. Each row is written to FOLDER/NAME.jsonl as soon as it is
measured, and the report, FOLDER/NAME.md, is made from the rows. The same command continues a run that was
stopped: rows that are there are not measured again. Set ATTEST_COMMIT to the commit where the files were
copied without their history.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import jax
import typer

from attest.conformance.files import write_text
from benchmarks.processes import part_folders, part_of, run_parts, turn, wait_for_all
from benchmarks.progress import progress
from benchmarks.record import Measured, Report, ReportFile, Result, Row, read_report
from benchmarks.report import Layout, as_markdown, summarized
from benchmarks.state import watched
from benchmarks.timing import Prepared, this_run

# The options of every benchmark; typer looks into no alias made by `type`.
Out = Annotated[Path, typer.Option(help="The folder that the results are written to.")]
Rows = Annotated[str, typer.Option(help="Only rows whose title contains this.")]
# Those of benchmarks that can compile in several processes.
Processes = Annotated[int, typer.Option(help="Compile in so many processes.", min=1)]
Part = Annotated[str, typer.Option(help="i/n: the rows of one of the processes.", hidden=True)]
Meet = Annotated[Path | None, typer.Option(help="Where the processes meet.", hidden=True)]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its rows, how each is measured, and how the report looks.

    module: the command is `python3 -m benchmarks.MODULE`. file: the name of its files. prepare: compiles what
    rows need; measure: measures one row. platform, devices: what JAX must have, at least. arguments: those
    of the command, but for the options of the runner.
    """

    module: str
    file: str
    rows: Sequence[Row]
    layout: Layout
    measure: Callable[[Row, Prepared], Measured]
    prepare: Callable[[Sequence[Row]], Prepared] = lambda _: {}
    platform: str = "gpu"
    devices: int = 1
    arguments: tuple[str, ...] = ()


def run(
    benchmark: Benchmark,
    out: Path,
    rows: str = "",
    processes: int = 1,
    part: str = "",
    meet: Path | None = None,
) -> Report:
    """Measure the rows that the file in `out` does not hold yet, write the report, and print a summary."""
    _need(benchmark)
    if not (todo := matching(benchmark, rows)):
        title = benchmark.rows[0].title
        raise SystemExit(
            f"--rows {rows}: no row has this in its title; expected a part of one, as of {title}"
        )
    try:
        file = ReportFile(out / f"{benchmark.file}.jsonl", this_run())
        if meet is not None:
            _run_part(benchmark, part_of(_by_name(_missing(todo, file)), part), part, meet, file)
            return file.read()
        if processes > 1:
            with TemporaryDirectory() as folder:
                _run_in_processes(benchmark, todo, rows, processes, Path(folder), file)
        _run_here(benchmark, todo, file)
        report = file.read()
    except ValueError as error:
        raise SystemExit(str(error)) from error
    _write(benchmark, file)
    print(summarized(report, benchmark.layout))
    return report


def matching(benchmark: Benchmark, rows: str) -> list[Row]:
    """Return the rows whose title contains a text."""
    return [row for row in benchmark.rows if rows in row.title]


def _need(benchmark: Benchmark) -> None:
    """End the program in one sentence where JAX lacks what the benchmark needs."""
    program, needed, there = f"benchmarks.{benchmark.module}", benchmark.platform, jax.default_backend()
    if there != needed:
        raise SystemExit(f"{program} needs a {needed.upper()}, and JAX runs on {there} here.")
    if jax.local_device_count() < benchmark.devices:
        raise SystemExit(f"{program} needs {benchmark.devices} devices, and JAX has fewer here.")


def _by_name(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows in groups: the directions of a workload share its inputs."""
    return [list(group) for _, group in groupby(rows, key=lambda row: row.name)]


def _measured(benchmark: Benchmark, row: Row, prepared: Prepared) -> Result:
    with watched() as watch:
        measured = benchmark.measure(row, prepared)
    return Result(row, measured, watch.state)


def _write(benchmark: Benchmark, file: ReportFile) -> None:
    write_text(file.path.with_suffix(".md"), as_markdown(file.read(), benchmark.layout))


def _missing(rows: Sequence[Row], file: ReportFile) -> list[Row]:
    """Return the rows that the file does not hold."""
    there = file.read()
    return [row for row in rows if there.of(row) is None]


def _run_here(benchmark: Benchmark, todo: Sequence[Row], file: ReportFile) -> None:
    """Measure the rows that the file does not hold yet; write each, and the report, when it is measured."""
    missing = _missing(todo, file)
    if len(missing) < len(todo):
        print(f"{len(todo) - len(missing)} of {len(todo)} rows are in {file.path}", flush=True)
    start, done = time.perf_counter(), 0
    with progress(len(missing)) as show:
        # No two workloads need be in memory at once.
        for group in _by_name(missing):
            show(f"compiling {group[0].name}", done)
            prepared = benchmark.prepare(group)
            for row in group:
                show(row.title, done)
                file.add(_measured(benchmark, row, prepared))
                _write(benchmark, file)
                done += 1
                print(f"{time.perf_counter() - start:4.0f} s  {row.title}", flush=True)
            del prepared


def _run_part(
    benchmark: Benchmark, groups: Sequence[Sequence[Row]], part: str, folder: Path, file: ReportFile
) -> None:
    """Compile all rows of a process, wait for the others, and measure each row when no other does."""
    prepared = [(group, benchmark.prepare(group)) for group in groups]
    wait_for_all(folder, part)
    for group, runs in prepared:
        for row in group:
            with turn(folder):
                result = _measured(benchmark, row, runs)
            file.add(result)
            print(row.title, flush=True)


def _run_in_processes(
    benchmark: Benchmark, todo: Sequence[Row], rows: str, processes: int, folder: Path, file: ReportFile
) -> None:
    """Measure the rows in several processes; write those that were measured in the order of the rows."""
    arguments = (*benchmark.arguments, "--rows", rows)
    there = file.read()
    if there.results:
        # A process leaves out the rows that its file holds.
        for out in part_folders(folder, processes):
            out.mkdir()
            shutil.copy(file.path, out)
    outs = run_parts(f"benchmarks.{benchmark.module}", arguments, processes, folder)
    reports = [read_report(out / file.path.name) for out in outs]
    for row in todo:
        found = next((result for report in reports if (result := report.of(row))), None)
        if found is not None and there.of(row) is None:
            file.add(found)
