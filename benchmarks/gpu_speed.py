"""Speed of our kernels beside their peers on this GPU, in one process and one run.

    python3 -m benchmarks.gpu_speed --out FOLDER [--kernels mosaic_gpu]

It needs neither an installed project nor a network. Each row is written to gpu_speed.jsonl as soon as it is
measured (gpu_speed_mosaic_gpu.jsonl for the kernels in Mosaic GPU), and the report beside it, a .md file, is
made from the rows. The same command continues a run that was stopped: rows that are there are not measured
again. With `--processes 14`, fourteen processes compile at the same time before any of them times anything.
Set ATTEST_COMMIT to the commit where the files were copied without their history.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

from attest.conformance.files import write_text
from benchmarks.gpu.contenders import COMPILED_ALONE, CONTENDERS, DISTRIBUTIONS, KERNELS
from benchmarks.gpu.processes import part_of, run_parts, turn, wait_for_all
from benchmarks.gpu.progress import progress
from benchmarks.gpu.report import as_markdown, targets_table
from benchmarks.gpu.rows import RowsFile, read_report, row_name
from benchmarks.gpu.state import watched
from benchmarks.gpu.targets import OURS, Measured, Row, Times, read_rows
from benchmarks.gpu.timing import (
    Absent,
    Timing,
    attempt,
    attempt_all,
    device_seconds,
    environment,
    in_turns,
    need_gpu,
)
from benchmarks.gpu.workload import FORWARD, Workload, draw, gradients, ready

TARGETS = Path(__file__).parent / "gpu_targets"  # a file for each of KERNELS, and one of models
REPORTS = {name: "gpu_speed" if name == "triton" else f"gpu_speed_{name}" for name in KERNELS}

type Key = tuple[str, Workload, str]  # contender, workload, direction
type Run = Callable[[], Any]


def main(
    out: Annotated[Path, typer.Option(help="The folder that the results are written to.")],
    kernels: Annotated[str, typer.Option(help=f"Which are ours: {' or '.join(KERNELS)}.")] = "triton",
    rows: Annotated[str, typer.Option(help="Only rows whose title contains this.")] = "",
    contenders: Annotated[str, typer.Option(help="Only these, separated by commas.")] = "",
    processes: Annotated[int, typer.Option(help="Compile in so many processes.", min=1)] = 1,
    part: Annotated[str, typer.Option(help="i/n: the rows of one of the processes.", hidden=True)] = "",
    meet: Annotated[Path | None, typer.Option(help="Where the processes meet.", hidden=True)] = None,
) -> None:
    """Time the rows of a file of targets and of the models' workloads, and report them."""
    need_gpu("benchmarks.gpu_speed")
    if kernels not in KERNELS:
        raise typer.BadParameter(f"--kernels {kernels}: expected {' or '.join(KERNELS)}.")
    chosen = contenders.split(",") if contenders else []
    known = (OURS, *CONTENDERS)
    if unknown := [name for name in chosen if name not in known]:
        raise typer.BadParameter(f"--contenders {', '.join(unknown)}: expected some of {', '.join(known)}.")
    todo, timing, largest_difference = read_rows(TARGETS / f"{kernels}.toml", chosen, TARGETS / "models.toml")
    about = environment(DISTRIBUTIONS) | {"ours": KERNELS[kernels]}
    todo = [row for row in todo if rows in row.title]
    try:
        file = RowsFile(out / f"{REPORTS[kernels]}.jsonl", about, largest_difference)
        if meet is not None:
            time_part(part_of(by_name(todo), part), part, meet, timing, file)
            return
        if processes > 1:
            arguments = ("--kernels", kernels, "--rows", rows, "--contenders", contenders)
            with TemporaryDirectory() as folder:
                time_in_processes(todo, arguments, processes, Path(folder), file)
        time_rows(todo, timing, file)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(targets_table(file.read().rows))


def by_name(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows in groups: the directions of a workload share its inputs."""
    return [list(group) for _, group in groupby(rows, key=lambda row: row.name)]


def time_part(
    groups: Sequence[Sequence[Row]], part: str, folder: Path, timing: Timing, file: RowsFile
) -> None:
    """Compile all rows of a process, wait for the others, and measure each row when no other does."""
    prepared = [(group, prepare(group)) for group in groups]
    wait_for_all(folder, part)
    for group, runs in prepared:
        for row in group:
            with turn(folder), watched() as watch:
                measured = measure(row, runs, timing)
            file.add(row, measured, watch.state)
            print(row.title, flush=True)


def time_in_processes(
    todo: Sequence[Row], arguments: Sequence[str], processes: int, folder: Path, file: RowsFile
) -> None:
    """Measure the rows in several processes; write those that were measured in the order of the rows."""
    outs = run_parts("benchmarks.gpu_speed", arguments, processes, folder)
    reports = [read_report(out / file.path.name) for out in outs]
    there = file.read()
    for row in todo:
        for report in reports:
            measured = report.times(row)
            if measured is not None and there.times(row) is None:
                file.add(row, measured, report.states.get(row_name(row)))
    write_text(file.path.with_suffix(".md"), as_markdown(file.read()))


def time_rows(todo: Sequence[Row], timing: Timing, file: RowsFile) -> None:
    """Measure the rows that the file does not hold yet; write each, and the report, when it is measured."""
    there = file.read()
    missing = [row for row in todo if there.times(row) is None]
    if len(missing) < len(todo):
        print(f"{len(todo) - len(missing)} of {len(todo)} rows are in {file.path}", flush=True)
    start = time.perf_counter()
    done = 0
    with progress(len(missing)) as show:
        # No two workloads need be in memory at once.
        for pair in by_name(missing):
            show(f"compiling {pair[0].name}", done)
            runs = prepare(pair)
            for row in pair:
                show(row.title, done)
                with watched() as watch:
                    measured = measure(row, runs, timing)
                file.add(row, measured, watch.state)
                write_text(file.path.with_suffix(".md"), as_markdown(file.read()))
                done += 1
                print(f"{time.perf_counter() - start:4.0f} s  {row.title}", flush=True)
            del runs


def prepare(rows: Sequence[Row]) -> dict[Key, Run | Absent]:
    """Compile every program that the rows need, once."""
    keys = dict.fromkeys((*entry, row.direction) for row in rows for entry in row.entries.values())
    inputs = {workload: draw(workload) for workload in dict.fromkeys(workload for _, workload, _ in keys)}
    absent: dict[Key, Absent] = {}
    makes: dict[Key, Callable[[], Run]] = {}
    for contender, workload, direction in keys:
        attend = attempt(partial(CONTENDERS[contender], workload))
        if isinstance(attend, Absent):
            absent[contender, workload, direction] = attend
        else:
            function = attend if direction == FORWARD else gradients(attend)
            makes[contender, workload, direction] = partial(ready, function, inputs[workload])
    alone = {key: attempt(make) for key, make in makes.items() if key[0] in COMPILED_ALONE}
    return absent | alone | attempt_all({key: make for key, make in makes.items() if key not in alone})


def measure(row: Row, prepared: Mapping[Key, Run | Absent], timing: Timing) -> Measured:
    """Time every entry of the row, absent ones included."""
    chosen = {label: prepared[*entry, row.direction] for label, entry in row.entries.items()}
    runs = {label: run for label, run in chosen.items() if not isinstance(run, Absent)}
    found: dict[str, Times | Absent] = {
        label: run for label, run in chosen.items() if isinstance(run, Absent)
    }
    samples = in_turns(runs, timing)
    shortest = min((median(it) for it in samples.values() if not isinstance(it, Absent)), default=math.inf)
    by_device = shortest < timing.device_time_below
    if by_device:
        samples = {label: attempt(partial(device_seconds, run, timing)) for label, run in runs.items()}
    first = next((label for label, it in samples.items() if not isinstance(it, Absent)), None)
    for label, it in samples.items():
        if isinstance(it, Absent):
            found[label] = it
        elif label == first or row.entries[label][1] != row.entries[first][1]:
            found[label] = Times(it, by_device=by_device)
        else:
            apart = attempt(lambda run=runs[label]: float(difference(run(), runs[first]())))
            found[label] = apart if isinstance(apart, Absent) else Times(it, apart, by_device)
    return found


@jax.jit
def difference(theirs: Any, ours: Any) -> jax.Array:
    """Return the largest ||a - b|| / ||b|| among the outputs or gradients."""

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())

    largest = jnp.max(jnp.array(jax.tree.leaves(jax.tree.map(one, theirs, ours))))
    # JSON has neither NaN nor inf.
    return jnp.minimum(jnp.nan_to_num(largest, nan=jnp.inf), jnp.finfo(jnp.float32).max)


if __name__ == "__main__":
    typer.run(main)
