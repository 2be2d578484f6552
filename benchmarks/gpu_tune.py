"""Tuning of the Triton kernels: the fastest block sizes of each on this GPU.

    python3 -m benchmarks.gpu_tune --out FOLDER

It tries what gpu_tune.toml lists, a row for each kernel and workload, and shows the best of each row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import typer

from benchmarks import runner, targets
from benchmarks.record import Entry, Result, Row
from benchmarks.report import MILLISECONDS, Layout, table
from benchmarks.runner import Benchmark, Meet, Out, Part, Processes, Rows
from benchmarks.timing import Timing, measure, prepare
from benchmarks.workload import FORWARD, FORWARD_BACKWARD, Attend, Inputs, Workload, gradients

CANDIDATES = Path(__file__).parent / "gpu_tune.toml"
OWN = "own choice"  # the label of the kernel's own block sizes
# Which gradients need a kernel of the backward pass; XLA drops the launch of the other one.
GRADIENTS = {"query": slice(0, 1), "key": slice(1, 3)}
_AXES: tuple[str, ...] = ("q", "k", "num_warps", "num_stages")
# The fields of attest.kernels.triton.BlockSizes, which only a machine that runs Triton can import.
type Sizes = Mapping[str, int]
_TEXT = "Medians of calls in bfloat16, candidates in turns. Block sizes are queries x keys."


def main(out: Out, rows: Rows = "", processes: Processes = 1, part: Part = "", meet: Meet = None) -> None:
    """Time every candidate of gpu_tune.toml, one sweep after the other."""
    runner.run(benchmark(targets.read(CANDIDATES)), out, rows, processes, part, meet)


def benchmark(data: Mapping[str, Any]) -> Benchmark:
    """Return the benchmark of the sweeps: each on the workload of each of its head dims, full and causal."""
    workloads = {entry["head_dim"]: Workload(**entry) for entry in data["workloads"]}
    sizes: dict[str, Sizes | None] = {OWN: None}
    rows: list[Row] = []
    for sweep in data["sweeps"]:
        tried = product(*(sweep[axis] for axis in _AXES))
        candidates: list[Sizes] = [dict(zip(_AXES, it, strict=True)) for it in tried]
        sizes |= {_label(it): it for it in candidates}
        for head_dim, causal in product(sweep["head_dims"], (False, True)):
            workload = replace(workloads[head_dim], causal=causal)
            labels = (OWN, *map(_label, candidates))
            entries = {label: Entry(f"{sweep['kernel']}: {label}", workload) for label in labels}
            name = f"{sweep['kernel']} d{head_dim} {'causal' if causal else 'full'}"
            rows.append(Row(name, FORWARD if sweep["kernel"] == FORWARD else FORWARD_BACKWARD, entries))
    return Benchmark(
        "gpu_tune",
        "gpu_tune",
        rows,
        Layout("Block sizes of the Triton kernels", _TEXT, (MILLISECONDS,), best_table),
        partial(measure, timing=Timing(**data["timing"])),
        partial(prepare, program=partial(program, sizes)),
    )


def _label(sizes: Sizes) -> str:
    return "{q} x {k}, {num_warps} warps, {num_stages} stages".format_map(sizes)


def program(
    sizes: Mapping[str, Sizes | None], contender: str, workload: Workload, _direction: str
) -> Callable[[Inputs], Any]:
    """Return what is timed: the forward pass, or with it the gradients that the kernel makes."""
    from attest.kernels.triton import BackwardSizes, BlockSizes, flash_attention

    def attend(**params: Any) -> Attend:
        return lambda inputs: flash_attention(
            inputs["query"], inputs["key"], inputs["value"], causal=workload.causal, **params
        )

    kernel, _, label = contender.partition(": ")
    given = sizes[label]
    chosen = None if given is None else BlockSizes(**given)
    if kernel == FORWARD:
        return attend(fwd_params=chosen)
    differentiate = gradients(attend(bwd_params=BackwardSizes(**{kernel: chosen})))
    return lambda inputs: differentiate(inputs)[GRADIENTS[kernel]]


def best_table(results: Sequence[Result]) -> str:
    """Return the fastest candidate of each sweep beside the kernel's own choice."""
    lines: list[tuple[str, ...]] = []
    for result in results:
        times = {label: it for label in result.row.entries if (it := result.value(label)) is not None}
        best = min(times, key=times.__getitem__, default=OWN)
        shown = {label: f"{1e3 * times[label]:.3f}" if label in times else "absent" for label in (best, OWN)}
        failed = f"{len(result.row.entries) - len(times)} of {len(result.row.entries)}"
        lines.append((result.row.name, best, shown[best], shown[OWN], failed))
    return table(("sweep", "best", "ms", "own choice, ms", "failed"), lines)


if __name__ == "__main__":
    typer.run(main)
