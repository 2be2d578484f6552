"""Seconds to compile our kernels and a peer's on this GPU, one program at a time.

    python3 -m benchmarks.gpu_compile --out FOLDER

The programs and the targets are in `gpu_targets/compile.toml`. Every program is compiled once, from tracing
to machine code, since compilers keep what they have compiled.
"""

import time
from collections.abc import Sequence
from functools import cache, partial

import jax
import typer

from attest.conformance.tuning.workload import Workload, draw
from benchmarks import runner, targets
from benchmarks.contenders import program
from benchmarks.record import Entry, Measured, Row
from benchmarks.report import Column, Layout
from benchmarks.runner import Benchmark, Out, Rows
from benchmarks.timing import Prepared, attempt, measure_each
from benchmarks.workload import FORWARD

# Compiled first by each contender and not reported: it pays for imports and for what compilers set up once.
_FIRST = Workload(1, 128, 1, 64)
_TEXT = (
    "Tracing, lowering and compiling one program, each once, with nothing beside it. The targets of ours are "
    "ratios to a peer's seconds, or seconds."
)


def main(out: Out, rows: Rows = "") -> None:
    """Time the compilation of each program by each contender, and report it."""
    runner.run(benchmark(targets.read_programs()), out, rows)


def benchmark(rows: Sequence[Row]) -> Benchmark:
    """Return the benchmark of rows of programs."""
    column = Column("seconds", lambda _result, _label, found: f"{found.median:.1f}")
    return Benchmark(
        "gpu_compile", "gpu_compile", rows, Layout("Seconds to compile", _TEXT, (column,)), measure
    )


def measure(row: Row, _prepared: Prepared) -> Measured:
    """Return the seconds that each contender takes to compile a program, or why it cannot."""
    return measure_each(row, lambda row, entry: _seconds(row.direction, entry))


def _seconds(direction: str, entry: Entry) -> tuple[float]:
    _first(entry.contender)
    return (seconds_to_compile(entry.contender, entry.call(), direction),)


@cache
def _first(contender: str) -> None:
    attempt(partial(seconds_to_compile, contender, _FIRST, FORWARD))


def seconds_to_compile(contender: str, workload: Workload, direction: str) -> float:
    """Trace, lower and compile a workload; return the seconds of all three together."""
    function = program(contender, workload, direction)
    shapes = jax.eval_shape(partial(draw, workload))
    start = time.perf_counter()
    jax.jit(function).lower(shapes).compile()
    return time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
