"""Speed of our kernels beside their peers on this GPU, in one process and one run.

    python3 -m benchmarks.gpu_speed --out FOLDER [--kernels mosaic_gpu]

It needs neither an installed project nor a network, and writes gpu_speed.json and gpu_speed.md for the Triton
kernels, gpu_speed_mosaic_gpu.json and .md for those in Mosaic GPU.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

from benchmarks.gpu.contenders import COMPILED_ALONE, CONTENDERS, DISTRIBUTIONS, KERNELS
from benchmarks.gpu.problem import FORWARD, Problem, draw, gradients, ready
from benchmarks.gpu.report import OURS, Result, Results, Row, as_data, as_markdown, read_rows, targets_table
from benchmarks.gpu.timing import Absent, Timing, attempt, attempt_all, environment, in_turns, need_gpu

TARGETS = Path(__file__).parent / "gpu_targets"  # a file for each of KERNELS
REPORTS = {"triton": "gpu_speed", "mosaic_gpu": "gpu_speed_mosaic_gpu"}

type Key = tuple[str, Problem, str]  # contender, problem, direction
type Run = Callable[[], Any]


def main(
    out: Annotated[Path, typer.Option(help="The folder that the results are written to.")],
    kernels: Annotated[str, typer.Option(help=f"Which are ours: {' or '.join(KERNELS)}.")] = "triton",
    commit: Annotated[str, typer.Option(help="The git commit to name in the results.")] = "unknown",
    rows: Annotated[str, typer.Option(help="Only rows whose title contains this.")] = "",
    contenders: Annotated[str, typer.Option(help="Only these, separated by commas.")] = "",
) -> None:
    """Times the rows of a file of targets and judges ours by them."""
    need_gpu("benchmarks.gpu_speed")
    if kernels not in KERNELS:
        raise typer.BadParameter(f"--kernels {kernels}: expected {' or '.join(KERNELS)}.")
    chosen = contenders.split(",") if contenders else []
    known = (OURS, *CONTENDERS)
    if unknown := [name for name in chosen if name not in known]:
        raise typer.BadParameter(f"--contenders {', '.join(unknown)}: expected some of {', '.join(known)}.")
    todo, timing, largest_difference = read_rows(TARGETS / f"{kernels}.toml", chosen)
    todo = [row for row in todo if rows in row.title]
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "ours": KERNELS[kernels],
        **environment(DISTRIBUTIONS),
    }

    start = time.perf_counter()
    runs = prepare(todo)
    print(f"{len(runs)} programs ready in {time.perf_counter() - start:.0f} s", flush=True)
    measured: list[tuple[Row, Results]] = []
    for row in todo:
        measured.append((row, measure(row, runs, timing)))
        # After every row, so that a driver that takes the process down costs one row.
        write(out / REPORTS[kernels], about, measured, largest_difference)
        print(f"{time.perf_counter() - start:4.0f} s  {row.title}", flush=True)
    print(targets_table(measured))


def prepare(rows: Sequence[Row]) -> dict[Key, Run | Absent]:
    """Every program that the rows need, once; libraries are imported here, before there are threads."""
    keys = dict.fromkeys((*entry, row.direction) for row in rows for entry in row.entries.values())
    inputs = {problem: draw(problem) for _, problem, _ in keys}
    absent: dict[Key, Absent] = {}
    makes: dict[Key, Callable[[], Run]] = {}
    for contender, problem, direction in keys:
        attend = attempt(partial(CONTENDERS[contender], problem))
        if isinstance(attend, Absent):
            absent[contender, problem, direction] = attend
        else:
            function = attend if direction == FORWARD else gradients(attend)
            makes[contender, problem, direction] = partial(ready, function, inputs[problem])
    alone = {key: attempt(make) for key, make in makes.items() if key[0] in COMPILED_ALONE}
    return absent | alone | attempt_all({key: make for key, make in makes.items() if key not in alone})


def measure(row: Row, prepared: Mapping[Key, Run | Absent], timing: Timing) -> Results:
    """One result for each entry of the row, absent ones included."""
    chosen = {label: prepared[*entry, row.direction] for label, entry in row.entries.items()}
    runs = {label: run for label, run in chosen.items() if not isinstance(run, Absent)}
    results: dict[str, Result | Absent] = {
        label: run for label, run in chosen.items() if isinstance(run, Absent)
    }
    samples = in_turns(runs, timing)
    first = next((label for label, it in samples.items() if not isinstance(it, Absent)), None)
    for label, it in samples.items():
        if isinstance(it, Absent):
            results[label] = it
        elif label == first or row.entries[label][1] != row.entries[first][1]:
            results[label] = Result(it)
        else:
            apart = attempt(lambda run=runs[label]: float(difference(run(), runs[first]())))
            results[label] = apart if isinstance(apart, Absent) else Result(it, apart)
    return results


@jax.jit
def difference(theirs: Any, ours: Any) -> jax.Array:
    """The largest ||a - b|| / ||b|| among the outputs or gradients."""

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())

    largest = jnp.max(jnp.array(jax.tree.leaves(jax.tree.map(one, theirs, ours))))
    # JSON has neither NaN nor inf.
    return jnp.minimum(jnp.nan_to_num(largest, nan=jnp.inf), jnp.finfo(jnp.float32).max)


def write(
    report: Path, about: Mapping[str, str], measured: Sequence[tuple[Row, Results]], largest_difference: float
) -> None:
    """Both files of a report, which is named without their suffixes."""
    report.parent.mkdir(parents=True, exist_ok=True)
    data = {"about": about, "rows": [as_data(row, results) for row, results in measured]}
    report.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    report.with_suffix(".md").write_text(as_markdown(about, measured, largest_difference))


if __name__ == "__main__":
    typer.run(main)
