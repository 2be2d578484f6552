"""Seconds to compile our kernels and a peer's on this GPU, one program at a time.

    python3 -m benchmarks.gpu_compile --out FOLDER

It needs neither an installed project nor a network. The programs and the targets are in
`gpu_targets/compile.toml`; the report is gpu_compile.json, and gpu_compile.md beside it. Every program is
compiled once, from tracing to machine code, since compilers keep what they have compiled.
"""

import json
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from attest.conformance.files import write_text
from benchmarks.gpu.contenders import CONTENDERS, DISTRIBUTIONS
from benchmarks.gpu.report import absent_cell, table
from benchmarks.gpu.targets import titled
from benchmarks.gpu.timing import Absent, attempt, environment, need_gpu
from benchmarks.gpu.workload import DIRECTIONS, FORWARD, Workload, draw, gradients

TARGETS = Path(__file__).parent / "gpu_targets" / "compile.toml"

# Compiled first by each contender and not reported: it pays for imports and for what compilers set up once.
_FIRST = Workload(1, 128, 1, 64)


@dataclass(frozen=True)
class Program:
    """One row: a workload in a direction, and the target, a ratio to the peer's seconds or seconds."""

    name: str
    direction: str
    workload: Workload
    target: Mapping[str, float]

    @property
    def title(self) -> str:
        return titled(self.name, self.direction)


type Seconds = Mapping[str, float | Absent]  # of one program, by contender


def main(
    out: Annotated[Path, typer.Option(help="The folder that the report is written to.")],
    programs: Annotated[str, typer.Option(help="Only programs whose title contains this.")] = "",
) -> None:
    """Time the compilation of each program by each contender, and report it."""
    need_gpu("benchmarks.gpu_compile")
    data = tomllib.loads(TARGETS.read_text())
    todo = [program for program in read_programs(data) if programs in program.title]
    for contender in data["contenders"]:
        attempt(partial(seconds_to_compile, contender, _FIRST, FORWARD))
    rows: list[tuple[Program, Seconds]] = []
    for program in todo:
        rows.append((program, {it: seconds(it, program) for it in data["contenders"]}))
        print(f"{program.title}: {rows[-1][1]}", flush=True)
    about = environment(DISTRIBUTIONS)
    write_text(out / "gpu_compile.json", json.dumps(to_json(about, rows), indent=1, sort_keys=True) + "\n")
    write_text(out / "gpu_compile.md", as_markdown(about, rows, data["contenders"], data["peer"]))


def read_programs(data: Mapping[str, Any]) -> list[Program]:
    """Return the programs of the data of compile.toml."""
    return [
        Program(entry["name"], direction, Workload(**entry["workload"]), entry[direction])
        for entry in data["programs"]
        for direction in DIRECTIONS
    ]


def seconds(contender: str, program: Program) -> float | Absent:
    """Return the seconds that a contender takes to compile a program, or why it cannot."""
    return attempt(partial(seconds_to_compile, contender, program.workload, program.direction))


def seconds_to_compile(contender: str, workload: Workload, direction: str) -> float:
    """Trace, lower and compile a workload; return the seconds of all three together."""
    attend = CONTENDERS[contender](workload)
    function = attend if direction == FORWARD else gradients(attend)
    shapes = jax.eval_shape(partial(draw, workload))
    start = time.perf_counter()
    jax.jit(function).lower(shapes).compile()
    return time.perf_counter() - start


def to_json(about: Mapping[str, str], rows: Iterable[tuple[Program, Seconds]]) -> dict[str, Any]:
    """Return the report as the file holds it."""
    return {
        "schema": "attest.compile_seconds/1",
        "about": dict(about),
        "programs": [
            {
                "name": program.name,
                "direction": program.direction,
                "workload": asdict(program.workload),
                "target": dict(program.target),
                "seconds": {
                    name: it if isinstance(it, float) else {"absent": it.reason} for name, it in taken.items()
                },
            }
            for program, taken in rows
        ],
    }


def as_markdown(
    about: Mapping[str, str], rows: Iterable[tuple[Program, Seconds]], contenders: Sequence[str], peer: str
) -> str:
    """Return the report: what it ran on, and a table of seconds with the targets."""
    lines = [
        (
            program.title,
            *(_cell(taken[name]) for name in contenders),
            *_target(program, taken, contenders, peer),
        )
        for program, taken in rows
    ]
    parts = (
        "# Seconds to compile",
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        "Tracing, lowering and compiling one program, each once, with nothing beside it. The target is for "
        f"the first contender: a ratio to {peer}'s seconds, or seconds.",
        table(("program", *contenders, "target", "outcome"), lines),
    )
    return "\n\n".join(parts) + "\n"


def _cell(taken: float | Absent) -> str:
    return absent_cell(taken) if isinstance(taken, Absent) else f"{taken:.1f}"


def _target(program: Program, taken: Seconds, contenders: Sequence[str], peer: str) -> tuple[str, str]:
    ours, theirs, target = taken[contenders[0]], taken[peer], program.target
    if "seconds" in target:
        text, value, most = f"<= {target['seconds']:g} s", ours, target["seconds"]
    else:
        text, most = f"<= {target['most']:g}x", target["most"]
        absent = isinstance(ours, Absent) or isinstance(theirs, Absent)
        value = Absent("no peer") if absent else ours / theirs
    if isinstance(value, Absent):
        return text, "absent"
    met = "met" if value <= most else "MISSED"
    return text, met if "seconds" in target else f"{value:.2f}x {met}"


if __name__ == "__main__":
    typer.run(main)
