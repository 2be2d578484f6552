"""Tuning of the Triton kernels: the fastest block sizes of each on this GPU.

    python3 -m benchmarks.gpu_tune --out FOLDER

It tries what gpu_tune.toml lists, writes each sweep to gpu_tune.jsonl as soon as it is measured, and prints
the best of each. The same command continues a run that was stopped.
"""

import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.gpu.contenders import DISTRIBUTIONS
from benchmarks.gpu.lines import LinesFile, read_lines
from benchmarks.gpu.progress import progress
from benchmarks.gpu.report import table
from benchmarks.gpu.timing import Absent, Timing, attempt_all, environment, in_turns, need_gpu
from benchmarks.gpu.workload import Attend, Inputs, Workload, draw, gradients, ready

SCHEMA = "attest.tune/1"
CANDIDATES = Path(__file__).parent / "gpu_tune.toml"
# Which gradients need a kernel of the backward pass; XLA drops the launch of the other one.
GRADIENTS = {"query": slice(0, 1), "key": slice(1, 3)}


@dataclass(frozen=True)
class Sizes:
    """The fields of attest.kernels.triton.BlockSizes, which only a machine that runs Triton can import."""

    q: int
    k: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.q} x {self.k}, {self.num_warps} warps, {self.num_stages} stages"


@dataclass(frozen=True)
class Sweep:
    """One kernel on one workload; the candidate None is the kernel's own choice."""

    kernel: str
    workload: Workload
    candidates: tuple[Sizes | None, ...]

    @property
    def title(self) -> str:
        return f"{self.kernel} d{self.workload.head_dim} {'causal' if self.workload.causal else 'full'}"


type Times = Mapping[Sizes | None, float | Absent]  # milliseconds


def main(
    out: Annotated[Path, typer.Option(help="The folder that the results are written to.")],
    rows: Annotated[str, typer.Option(help="Only sweeps whose title contains this.")] = "",
) -> None:
    """Time every candidate of gpu_tune.toml, one sweep after the other."""
    need_gpu("benchmarks.gpu_tune")
    data = tomllib.loads(CANDIDATES.read_text())
    todo = [sweep for sweep in read_sweeps(data) if rows in sweep.title]
    path = out / "gpu_tune.jsonl"
    try:
        file = LinesFile(path, {"schema": SCHEMA, "about": environment(DISTRIBUTIONS)})
        time_sweeps(todo, Timing(**data["timing"]), file)
        print(best_table(read_done(path)))
    except ValueError as error:
        raise SystemExit(str(error)) from error


def time_sweeps(todo: Sequence[Sweep], timing: Timing, file: LinesFile) -> None:
    """Measure the sweeps that the file does not hold yet, and write each when it is measured."""
    there = [sweep for sweep, _ in read_done(file.path)]
    missing = [sweep for sweep in todo if sweep not in there]
    start = time.perf_counter()
    with progress(len(missing)) as show:
        for number, sweep in enumerate(missing):
            show(sweep.title, number)
            file.add(sweep_to_json(sweep, measure(sweep, timing)))
            print(f"{time.perf_counter() - start:4.0f} s  {sweep.title}", flush=True)


def read_sweeps(data: Mapping[str, Any]) -> list[Sweep]:
    """Return every sweep of the file on the workload of each of its head dims, full and causal."""
    workloads = {entry["head_dim"]: Workload(**entry) for entry in data["workloads"]}
    return [
        Sweep(entry["kernel"], replace(workloads[head_dim], causal=causal), _candidates(entry))
        for entry in data["sweeps"]
        for head_dim in entry["head_dims"]
        for causal in (False, True)
    ]


def _candidates(entry: Mapping[str, Any]) -> tuple[Sizes | None, ...]:
    axes = (entry["q"], entry["k"], entry["num_warps"], entry["num_stages"])
    return None, *(Sizes(*sizes) for sizes in product(*axes))


def measure(sweep: Sweep, timing: Timing) -> Times:
    """Return the time of every candidate, or why there is none: too much shared memory, most often."""
    inputs = draw(sweep.workload)
    makes = {sizes: partial(ready, program(sweep, sizes), inputs) for sizes in sweep.candidates}
    prepared = attempt_all(makes)
    runs = {sizes: run for sizes, run in prepared.items() if not isinstance(run, Absent)}
    samples = in_turns(runs, timing)
    times = {sizes: it if isinstance(it, Absent) else 1e3 * median(it) for sizes, it in samples.items()}
    return {sizes: times.get(sizes, prepared[sizes]) for sizes in sweep.candidates}


def program(sweep: Sweep, sizes: Sizes | None) -> Callable[[Inputs], Any]:
    """Return what is timed: the forward pass, or with it the gradients that the kernel makes."""
    from attest.kernels.triton import BackwardSizes, BlockSizes, flash_attention

    def attend(**params: Any) -> Attend:
        return lambda inputs: flash_attention(
            inputs["query"], inputs["key"], inputs["value"], causal=sweep.workload.causal, **params
        )

    chosen = None if sizes is None else BlockSizes(**asdict(sizes))
    if sweep.kernel == "forward":
        return attend(fwd_params=chosen)
    differentiate = gradients(attend(bwd_params=BackwardSizes(**{sweep.kernel: chosen})))
    return lambda inputs: differentiate(inputs)[GRADIENTS[sweep.kernel]]


def best_table(done: Sequence[tuple[Sweep, Times]]) -> str:
    """Return the fastest candidate of each sweep beside the kernel's own choice."""
    lines = []
    for sweep, times in done:
        present = {sizes: it for sizes, it in times.items() if not isinstance(it, Absent)}
        best = min(present, key=present.__getitem__, default=None)
        lines.append(
            (
                sweep.title,
                "own choice" if best is None else str(best),
                f"{present[best]:.3f}" if present else "absent",
                f"{present[None]:.3f}" if None in present else "absent",
                f"{len(times) - len(present)} of {len(times)}",
            )
        )
    return table(("sweep", "best", "ms", "own choice, ms", "failed"), lines)


def sweep_to_json(sweep: Sweep, times: Times) -> dict[str, Any]:
    """Return a sweep as its line holds it."""
    return {
        "kernel": sweep.kernel,
        "workload": asdict(sweep.workload),
        "candidates": [
            {"sizes": None if sizes is None else asdict(sizes)}
            | ({"failed": it.reason} if isinstance(it, Absent) else {"milliseconds": it})
            for sizes, it in times.items()
        ],
    }


def sweep_from_json(data: Mapping[str, Any]) -> tuple[Sweep, Times]:
    """Return the sweep and the times of a line."""
    times: dict[Sizes | None, float | Absent] = {}
    for it in data["candidates"]:
        sizes = None if it["sizes"] is None else Sizes(**it["sizes"])
        times[sizes] = Absent(it["failed"]) if "failed" in it else it["milliseconds"]
    return Sweep(data["kernel"], Workload(**data["workload"]), tuple(times)), times


def read_done(path: Path) -> list[tuple[Sweep, Times]]:
    """Return the sweeps of a file. Raises ValueError that names it."""
    _, lines = read_lines(path, SCHEMA)
    return [sweep_from_json(line) for line in lines]


if __name__ == "__main__":
    typer.run(main)
