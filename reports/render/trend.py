"""The answer of a query of a store as a plot over time, in SVG."""

import io
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from attest.reports.render.plots import NO_METADATA, STYLE


def render_plot(title: str, x: str, y: str, lines: Mapping[str, Sequence[tuple[datetime, float]]]) -> str:
    """Return the lines over time as SVG: points by name, each (day, value)."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for name, points in lines.items():
            days: Any = [day for day, _ in points]
            axes.plot(days, [value for _, value in points], marker="o", label=name)
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.tick_params(axis="x", rotation=30)
        if lines:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata=NO_METADATA)
    return out.getvalue()
