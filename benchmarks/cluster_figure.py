"""The figure of the benchmark of clusters: results a second by the number of workers."""

import io
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.cluster_model import model_of
from benchmarks.cluster_record import PACED, Host

_MOST_WORKERS = 2000


def figure(hosts: Sequence[Host]) -> str:
    """Return an SVG with a panel for each host."""
    drawn = Figure(figsize=(6.4 * len(hosts), 4.2), layout="constrained")
    for panel, host in zip(drawn.subplots(1, len(hosts), squeeze=False)[0], hosts, strict=True):
        _draw(panel, host)
    target = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "attest"}):
        FigureCanvasSVG(drawn).print_svg(target, metadata={"Date": None})
    # Matplotlib ends some lines with spaces.
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"


def _draw(panel: Axes, host: Host) -> None:
    if host.can_be_modelled:
        _draw_model(panel, host)
    rows = [(row.workers, row.processes, row.cluster) for row in host.rows]
    if rows:
        workers, processes, cluster = zip(*rows, strict=True)
        panel.plot(workers, processes, "x", color="C1", label="measured: processes without a cluster")
        panel.plot(workers, cluster, "o", color="C0", fillstyle="none", label="measured: a cluster")
    paced = [(run.workers, run.rate) for run in host.idle if run.kind == PACED]
    if paced:
        panel.plot(*zip(*paced, strict=True), "s", color="C2", label="measured: workers that only wait")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("workers")
    panel.set_ylabel("results a second")
    panel.set_title(host.name, fontsize=9)
    panel.legend(fontsize=7, loc="lower right")


def _draw_model(panel: Axes, host: Host) -> None:
    model = model_of(host)
    many = np.geomspace(1, _MOST_WORKERS, 200)
    ideal = many * model.rate_of_a_worker
    panel.plot(many, ideal, color="0.7", linestyle=":", label="as many times one worker")
    panel.plot(many, [model.rate(workers) for workers in many], color="C0", label="model")
    for limit in model.limits:
        panel.axhline(limit.rate, color="0.85", linewidth=0.8, zorder=0)
        panel.annotate(
            limit.what, (1, limit.rate), fontsize=7, color="0.4", xytext=(2, 2), textcoords="offset points"
        )
