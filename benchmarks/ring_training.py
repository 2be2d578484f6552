"""Losses of a small language model trained with ring attention on several meshes, and a plot of them.

    python3 -m benchmarks.ring_training --out FOLDER

It runs on 8 devices of a CPU, and also draws `ring-training.svg`. The samples of an entry are the losses of
its steps. In float32 a training is set beside that on one device; in bfloat16 the meshes are set beside block
sizes on one device.
"""

import io
from collections.abc import Iterable

import jax
import matplotlib as mpl
import numpy as np
import typer
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from attest.kernels.ring.arguments import STRATEGIES
from attest.kernels.xla.blocks import ChunkSizes
from benchmarks import runner
from benchmarks.record import Entry, Measured, Result, Row, Samples
from benchmarks.report import Column, Layout
from benchmarks.runner import Benchmark, Out, Rows
from benchmarks.timing import Prepared, measure_each
from tests.kernels.ring import gpt

DEVICES = (2, 4, 8)
BLOCKS = (8, 16, 32, 64)
COLOURS = {"ring": "C0", "zigzag": "C1", "all_gather": "C2", "ulysses": "C3", "blocks": "0.5"}
ONE = "one device"


def main(out: Out, rows: Rows = "") -> None:
    """Train in each dtype, report how far losses are from those on one device, and draw them."""
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    report = runner.run(benchmark(), out, rows)
    (out / "ring-training.svg").write_text(plot(report.results))


def benchmark() -> Benchmark:
    """Return the trainings of all meshes and of block sizes on one device, in each dtype."""
    entries = {ONE: Entry(ONE)}
    entries |= {f"{name}, {n} devices": Entry(name, devices=n) for name in STRATEGIES for n in DEVICES}
    entries |= {f"blocks of {block}": Entry(f"blocks {block}") for block in BLOCKS}
    rows = [Row(dtype, "", entries, unit="loss") for dtype in ("float32", "bfloat16")]
    last = Column("last loss", lambda _result, _label, found: f"{found.values[-1]:.8g}")
    far = Column("largest distance from one device", lambda *cell: f"{distances(*cell).max():.1e}")
    layout = Layout(
        "Training with ring attention",
        f"The losses of {gpt.STEPS} steps, and how far they are from those on one device, relative to these.",
        (last, far),
    )
    return Benchmark(
        "ring_training", "ring_training", rows, layout, measure, platform="cpu", devices=max(DEVICES)
    )


def measure(row: Row, _prepared: Prepared) -> Measured:
    """Return the loss of each step of each training."""
    return measure_each(row, lambda row, entry: [float(f"{x:.8g}") for x in losses(row.name, entry)])


def losses(dtype: str, entry: Entry) -> np.ndarray:
    """Return the loss of each step: with a strategy on a mesh, or on one device with block sizes."""
    if entry.contender in STRATEGIES:
        attend = gpt.attend_in(dtype, axis_name=gpt.AXIS, strategy=entry.contender)
        return gpt.losses(attend, gpt.mesh_of(entry.devices))
    if entry.contender == ONE:
        return gpt.losses(gpt.attend_in(dtype))
    block = int(entry.contender.removeprefix("blocks "))
    sizes = ChunkSizes(block, block)
    return gpt.losses(gpt.attend_in(dtype, fwd_params=sizes, bwd_params=sizes))


def distances(result: Result, _label: str, found: Samples) -> np.ndarray:
    """Return how far each loss is from that on one device, relative to it."""
    one = result.measured[ONE]
    alone = np.array(one.values if isinstance(one, Samples) else np.nan)
    return np.abs(np.array(found.values) / alone - 1)


def plot(results: Iterable[Result]) -> str:
    """Return three panels: the losses of all trainings, and how far each is from that on one device."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    results = list(results)
    panels = figure.subplots(1, 1 + len(results))
    for panel, result in zip(panels[1:], results, strict=True):
        for name, found in result.measured.items():
            if name == ONE or not isinstance(found, Samples):
                continue
            kind = name.split(",")[0].split()[0]
            known = panel.get_legend_handles_labels()[1]
            label = kind if kind not in known else None
            panels[0].plot(found.values, color=COLOURS[kind], linewidth=0.5)
            far = np.maximum(distances(result, name, found), 1e-9)
            panel.semilogy(far, color=COLOURS[kind], linewidth=0.8, label=label)
        panel.set_title(f"{result.row.name}: |loss / loss on one device - 1|", fontsize=9)
        panel.legend(fontsize=7)
    panels[0].set_title("loss, all trainings of both dtypes", fontsize=9)
    for panel in panels:
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=7)
    target = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "attest"}):
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None})
    return target.getvalue()


if __name__ == "__main__":
    typer.run(main)
