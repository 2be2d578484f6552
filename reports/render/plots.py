"""Histograms of a run's numbers by check and dtype, as SVG."""

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from attest.conformance.record import Result, RunRecord
from attest.reports.pairing import ordered
from attest.reports.spread import measured
from attest.reports.thresholds import badness
from attest.reports.words import one_line

# Without a salt and with dates, two renderings of one run would differ.
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "attest",
    "svg.fonttype": "none",
    "font.size": 8.0,
    "axes.linewidth": 0.6,
}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}

# The columns of a legend, and the characters of a name that fit one.
_LEGEND_COLUMNS = 3
_LABEL = 36

# Told apart with any colour vision (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


@dataclass(frozen=True)
class Panel:
    """One kind of histogram. edges: of its bins; what lies beyond falls into the outermost. limit: a line."""

    statistic: str
    label: str
    edges: tuple[float, ...]
    log: bool
    limit: float


_PANELS = (
    Panel("worst_ratio", "largest err / bound of a case", tuple(i / 20 for i in range(26)), False, 1.0),
    Panel(
        "rms_ratio", "rms(err) / rms(std) of a case", tuple(2.0 ** (i / 2) for i in range(-8, 9)), True, 1.0
    ),
)


@dataclass(frozen=True)
class Plot:
    """One check's histograms. svg: the element, without prolog. count: how many measurements it shows."""

    check: str
    count: int
    svg: str


def plots(record: RunRecord) -> tuple[Plot, ...]:
    """Return one plot for each check that measures, byte for byte the same for the same run."""
    by_check: dict[str, list[Result]] = {}
    for result in ordered(record.results):
        if measured(result):
            by_check.setdefault(result.check, []).append(result)
    with mpl.rc_context(_STYLE):
        return tuple(
            _plot(f"plot{place}-", check, results)
            for place, (check, results) in enumerate(sorted(by_check.items()), 1)
        )


def _plot(prefix: str, check: str, results: Sequence[Result]) -> Plot:
    dtypes = sorted({result.case.dtype for result in results})
    subjects = sorted({result.subject for result in results})
    legend = 0.2 * math.ceil(len(subjects) / _LEGEND_COLUMNS) if len(subjects) > 1 else 0.0
    figure = Figure(figsize=(7.5, 0.6 + 1.2 * len(dtypes) + legend), layout="constrained")
    FigureCanvasSVG(figure)
    grid = figure.subplots(len(dtypes), len(_PANELS), squeeze=False, sharex="col")
    for line, dtype in zip(grid, dtypes, strict=True):
        chosen = [result for result in results if result.case.dtype == dtype]
        for axes, panel in zip(line, _PANELS, strict=True):
            _draw(axes, panel, chosen, subjects)
        line[0].set_ylabel(dtype)
    for axes, panel in zip(grid[-1], _PANELS, strict=True):
        axes.set_xlabel(panel.label)
    handles, labels = grid[0][0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside upper left", ncols=_LEGEND_COLUMNS, frameon=False)
    return Plot(check, sum(len(measured(result)) for result in results), _svg(figure, prefix))


def _draw(axes: Axes, panel: Panel, results: Sequence[Result], subjects: Sequence[str]) -> None:
    """Draw shares of each subject's measurements, so that subjects with more cases look no different."""
    for number, subject in enumerate(subjects):
        values = _values(panel, (result for result in results if result.subject == subject))
        shares = [0.0] * (len(panel.edges) - 1)
        for value in values:
            shares[_bin(panel, value)] += 1.0 / len(values)
        axes.stairs(
            shares, panel.edges, label=_plain(subject), color=_COLOURS[number % len(_COLOURS)], linewidth=1.2
        )
    if panel.log:
        axes.set_xscale("log", base=2)
    axes.axvline(panel.limit, color="#666666", linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0.0)
    axes.spines[["top", "right"]].set_visible(False)


def _values(panel: Panel, results: Iterable[Result]) -> list[float]:
    # A single number says nothing of a distribution of errors, but it is all that a tiny case has.
    samples = [sample.measurement for result in results for sample in measured(result)]
    taken = [m for m in samples if not panel.log or m.elements > 0]
    return [badness(getattr(measurement, panel.statistic)) for measurement in taken]


def _bin(panel: Panel, value: float) -> int:
    inside = sum(edge <= value for edge in panel.edges) - 1
    return min(max(inside, 0), len(panel.edges) - 2)


def _plain(text: str) -> str:
    """Return a label that matplotlib draws as it is: `$` would start a formula, a leading `_` hide it.

    The end of a long name is kept: names of one module begin alike.
    """
    flat = one_line(text)
    shown = flat if len(flat) <= _LABEL else f"...{flat[3 - _LABEL :]}"
    return shown.replace("$", r"\$").removeprefix("_")


def _svg(figure: Figure, prefix: str) -> str:
    """Return the element; the prefix keeps its ids apart from those of other plots of a page."""
    with io.StringIO() as file:
        figure.savefig(file, format="svg", metadata=_NO_METADATA)
        text = file.getvalue()
    element = text[text.index("<svg") :]
    plain = re.sub(r"<metadata>.*?</metadata>\s*", "", element, flags=re.S).strip()
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\1{prefix}", plain)
