"""Speed of our kernels beside their peers on this GPU, in one process and one run.

    python3 -m benchmarks.gpu_speed --out FOLDER [--kernels mosaic_gpu]

The rows are those of gpu_targets/KERNELS.toml and of the models' workloads. The files are named gpu_speed
for the Triton kernels, gpu_speed_mosaic_gpu for those in Mosaic GPU, and so on. With `--processes 14`,
fourteen processes compile at the same time before any of them times anything.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import runner, targets
from benchmarks.contenders import KERNELS, program
from benchmarks.report import MILLISECONDS, TFLOPS, Layout, difference_column
from benchmarks.runner import Benchmark, Meet, Out, Part, Processes, Rows
from benchmarks.timing import measure, prepare

_TEXT = (
    "Medians of calls in bfloat16, contenders in turns in one process; ours are {ours}. Workloads are batch "
    "x queries x keys, query heads on key heads, head dim/value dim. Operations are counted over the visible "
    "pairs, forward + backward as 3.5 times forward. A call forward + backward returns out and the gradients "
    "of query, key and value. "
    "Difference: ||a - b|| / ||b|| from the first contender, at most {largest:g}. tokamax runs the "
    "configurations of its heuristics, nothing autotuned. Times marked (device) are those of the kernels "
    "alone, by JAX's profiler, as the dispatch of such a call takes longer."
)


def main(
    out: Out,
    kernels: Annotated[str, typer.Option(help=f"Which are ours: {' or '.join(KERNELS)}.")] = "triton",
    rows: Rows = "",
    contenders: Annotated[str, typer.Option(help="Only these, separated by commas.")] = "",
    processes: Processes = 1,
    part: Part = "",
    meet: Meet = None,
) -> None:
    """Time the rows of a file of targets and of the models' workloads, and report them."""
    if kernels not in KERNELS:
        raise typer.BadParameter(f"--kernels {kernels}: expected {' or '.join(KERNELS)}.")
    try:
        it = benchmark(kernels, contenders)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    runner.run(it, out, rows, processes, part, meet)


def benchmark(kernels: str, contenders: str = "", folder: Path | None = None) -> Benchmark:
    """Return the benchmark of the kernels; contenders: only these, separated by commas."""
    folder = folder or targets.FOLDER
    chosen = contenders.split(",") if contenders else []
    rows, timing, largest = targets.read_rows(folder / f"{kernels}.toml", chosen, folder / "models.toml")
    columns = (MILLISECONDS, TFLOPS, difference_column(largest))
    return Benchmark(
        "gpu_speed",
        "gpu_speed" if kernels == "triton" else f"gpu_speed_{kernels}",
        rows,
        Layout(
            "Speed of the attention kernels", _TEXT.format(ours=KERNELS[kernels], largest=largest), columns
        ),
        partial(measure, timing=timing),
        partial(prepare, program=program),
        arguments=("--kernels", kernels, "--contenders", contenders),
    )


if __name__ == "__main__":
    typer.run(main)
