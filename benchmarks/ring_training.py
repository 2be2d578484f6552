"""Losses of a small language model trained with ring attention on several meshes, as JSON and as a plot.

    python -m benchmarks.ring_training FOLDER

runs on 8 devices of a CPU, and writes `ring_training.json` and `ring-training.svg`. In float32 a training is
set beside that on one device; in bfloat16 the meshes are set beside block sizes on one device.
"""

import io
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from attest.kernels.ring.arguments import STRATEGIES
from attest.kernels.xla.blocks import ChunkSizes
from tests.kernels.ring import gpt

DEVICES = (2, 4, 8)
BLOCKS = (8, 16, 32, 64)
COLOURS = {"ring": "C0", "zigzag": "C1", "all_gather": "C2", "ulysses": "C3", "blocks": "0.5"}
ONE = "one device"


def losses(dtype: Any, strategy: str | None = None, devices: int = 1, **options: Any) -> np.ndarray:
    """The loss of each step; on one device without a strategy."""
    if strategy is None:
        return gpt.losses(gpt.attend_in(dtype, **options))
    attend = gpt.attend_in(dtype, axis_name=gpt.AXIS, strategy=strategy, **options)
    return gpt.losses(attend, gpt.mesh_of(devices))


def trainings(dtype: Any) -> dict[str, np.ndarray]:
    """The losses of all meshes and of block sizes on one device, by name."""
    found = {ONE: losses(dtype)}
    found |= {f"{name}, {n} devices": losses(dtype, name, n) for name in STRATEGIES for n in DEVICES}
    for block in BLOCKS:
        sizes = ChunkSizes(block, block)
        found[f"blocks of {block}"] = losses(dtype, fwd_params=sizes, bwd_params=sizes)
    return found


def plot(by_dtype: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """Three panels: the losses of all trainings, and how far each is from that on one device."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    panels = figure.subplots(1, 1 + len(by_dtype))
    for panel, (dtype, found) in zip(panels[1:], by_dtype.items(), strict=True):
        for name, of in found.items():
            if name == ONE:
                continue
            kind = name.split(",")[0].split()[0]
            known = panel.get_legend_handles_labels()[1]
            label = kind if kind not in known else None
            panels[0].plot(of, color=COLOURS[kind], linewidth=0.5)
            far = np.maximum(np.abs(of / found[ONE] - 1), 1e-9)
            panel.semilogy(far, color=COLOURS[kind], linewidth=0.8, label=label)
        panel.set_title(f"{dtype}: |loss / loss on one device - 1|", fontsize=9)
        panel.legend(fontsize=7)
    panels[0].set_title("loss, all trainings of both dtypes", fontsize=9)
    for panel in panels:
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=7)
    target = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "attest"}):
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None})
    return target.getvalue()


def main(folder: Path) -> None:
    """Train, and write both files."""
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    by_dtype = {name: trainings(name) for name in ("float32", "bfloat16")}
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "jax": jax.__version__,
        "processor": platform.processor() or platform.machine(),
        "steps": gpt.STEPS,
        "losses": {
            dtype: {name: [float(f"{x:.8g}") for x in of] for name, of in found.items()}
            for dtype, found in by_dtype.items()
        },
    }
    (folder / "ring_training.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "ring-training.svg").write_text(plot(by_dtype))
    for dtype, found in by_dtype.items():
        far = {name: float(np.abs(of / found[ONE] - 1).max()) for name, of in found.items()}
        print(dtype, json.dumps(far, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
