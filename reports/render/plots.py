"""Plots of a run's numbers by check and dtype, as SVG: histograms, and the errors along the sequence."""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from attest.conformance.cases.case import Case
from attest.conformance.judging.places import sequence_axis
from attest.conformance.record import ACCURACY, Measurement, Result, RunRecord
from attest.reference import judgements
from attest.reports.pairing import ordered
from attest.reports.spread import measured
from attest.reports.thresholds import badness
from attest.reports.words import one_line

# Without a salt and with dates, two renderings of one run would differ.
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "attest",
    "svg.fonttype": "none",
    "font.size": 8.0,
    "axes.linewidth": 0.6,
}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}

# The columns of a legend, and the characters of a name that fit one.
_LEGEND_COLUMNS = 3
_LABEL = 36

# Told apart with any colour vision (Okabe and Ito), on a light and on a dark page. Black, which
# stands for the text's own colour, is not among them.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_LIMIT_COLOUR = "#808080"


@dataclass(frozen=True)
class _Point:
    """One measurement, with the case and the subject that it belongs to."""

    subject: str
    case: Case
    measurement: Measurement

    @property
    def limits(self) -> judgements.Limits:
        """The largest statistics that a correct kernel may have there."""
        m, case = self.measurement, self.case
        return judgements.limits(m.output, m.elements, case.kv_len, case.dtype, case.family)

    @property
    def ratio(self) -> float:
        return badness(self.measurement.worst_ratio)

    @property
    def rms(self) -> float | None:
        # A case without so many errors that they have a distribution counts 0 elements.
        return badness(self.measurement.rms_ratio) if self.measurement.elements else None

    @property
    def z(self) -> float | None:
        """The largest z over its limit."""
        return (
            badness(self.measurement.largest_z) / self.limits.largest_z if self.measurement.elements else None
        )

    @property
    def place(self) -> float | None:
        """The place of the largest error along the sequence, from 0, its start, to 1."""
        worst, along = self.measurement.worst, sequence_axis(self.measurement.output)
        if worst is None or along is None or len(worst.index) <= along[0]:
            return None
        axis, word = along
        return (worst.index[axis] + 0.5) / (self.case.q_len if word == "query" else self.case.kv_len)


@dataclass(frozen=True)
class _Panel:
    """One kind of histogram.

    value: of a point, None if it does not count. edges: of the bins, on a log axis; what lies beyond falls
    into the outermost. limits: the lines of some points.
    """

    label: str
    base: int
    edges: tuple[float, ...]
    value: Callable[[_Point], float | None]
    limits: Callable[[_Point], float]


_PANELS = (
    _Panel(
        "largest err / bound of a case",
        10,
        tuple(10.0 ** (i / 4) for i in range(-12, 13)),
        lambda point: point.ratio,
        lambda point: point.limits.worst_ratio,
    ),
    _Panel(
        "rms(err) / rms(std) of a case",
        2,
        tuple(2.0 ** (i / 2) for i in range(-8, 9)),
        lambda point: point.rms,
        lambda point: point.limits.rms,
    ),
    _Panel(
        "largest z / limit of a case",
        2,
        tuple(2.0 ** (i / 4) for i in range(-20, 13)),
        lambda point: point.z,
        lambda point: 1.0,
    ),
)
_PREDICTED = _PANELS[2]
# Bins of the sequence, and the errors that its panel shows.
_PLACES = 20
_RATIOS = (_PANELS[0].edges[0], _PANELS[0].edges[-1])


@dataclass(frozen=True)
class Plot:
    """The plot of one check. svg: the element, without prolog. count: how many measurements it shows."""

    check: str
    count: int
    svg: str

    @property
    def accuracy(self) -> bool:
        """Whether the check compares one compiled call with the oracle."""
        return self.check in ACCURACY


def plots(record: RunRecord) -> tuple[Plot, ...]:
    """Return one plot for each check that measures, byte for byte the same for the same run.

    The checks that compare one compiled call with the oracle come first.
    """
    by_check: dict[str, list[Result]] = {}
    for result in ordered(record.results):
        if measured(result):
            by_check.setdefault(result.check, []).append(result)
    checks = sorted(by_check, key=lambda check: (check not in ACCURACY, check))
    with mpl.rc_context(STYLE):
        return tuple(_plot(f"plot{place}-", check, by_check[check]) for place, check in enumerate(checks, 1))


def _plot(prefix: str, check: str, results: Sequence[Result]) -> Plot:
    points = [
        _Point(result.subject, result.case, measurement)
        for result in results
        for measurement in measured(result)
    ]
    dtypes = sorted({point.case.dtype for point in points})
    subjects = sorted({point.subject for point in points})
    legend = 0.2 * math.ceil(len(subjects) / _LEGEND_COLUMNS) if len(subjects) > 1 else 0.0
    figure = Figure(figsize=(11.5, 0.6 + 1.3 * len(dtypes) + legend), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    grid = figure.subplots(len(dtypes), len(_PANELS) + 1, squeeze=False, sharex="col")
    for line, dtype in zip(grid, dtypes, strict=True):
        chosen = [point for point in points if point.case.dtype == dtype]
        for axes, panel in zip(line, _PANELS, strict=False):
            _draw_histograms(axes, panel, chosen, subjects)
        _draw_places(line[-1], chosen, subjects)
        line[0].set_ylabel(f"{dtype}\nshare")
        line[-1].set_ylabel("err / bound")
    labels = [*(panel.label for panel in _PANELS), "place of the largest error in the sequence"]
    for axes, label in zip(grid[-1], labels, strict=True):
        axes.set_xlabel(label)
    handles, names = grid[0][0].get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(handles, names, loc="outside upper left", ncols=_LEGEND_COLUMNS, frameon=False)
    said = (
        f"Plots of {check}, {', '.join(dtypes)}: {'; '.join(labels)}. The table of numbers has the extremes."
    )
    return Plot(check, len(points), _svg(figure, prefix, said))


def _draw_histograms(axes: Axes, panel: _Panel, points: Sequence[_Point], subjects: Sequence[str]) -> None:
    """Draw shares of each subject's measurements, so that subjects with more cases look no different."""
    if panel is _PREDICTED:
        axes.stairs(_predicted(points), panel.edges, fill=True, color=_LIMIT_COLOUR, alpha=0.35)
    for number, subject in enumerate(subjects):
        found = [panel.value(point) for point in points if point.subject == subject]
        values = [value for value in found if value is not None]
        shares = [0.0] * (len(panel.edges) - 1)
        for value in values:
            shares[_bin(panel.edges, value)] += 1.0 / len(values)
        axes.stairs(shares, panel.edges, label=_plain(subject), color=_colour(number), linewidth=1.2)
    _set_log(axes.set_xscale, axes.xaxis, panel.base)
    for limit in sorted({panel.limits(point) for point in points if panel.value(point) is not None}):
        if math.isfinite(limit):
            axes.axvline(limit, color=_LIMIT_COLOUR, linewidth=1.0, linestyle="--")
    axes.set_ylim(bottom=0.0)
    _finish(axes)


def _predicted(points: Sequence[_Point]) -> list[float]:
    """Return the shares of the bins of largest z over its limit, if errors are independent and normal.

    Of n such errors, all are below z standard deviations with probability erf(z / sqrt(2)) ** n.
    """
    shares = [0.0] * (len(_PREDICTED.edges) - 1)
    counted = [(p.measurement.elements, p.limits.largest_z) for p in points if p.measurement.elements]
    for elements, limit in counted:
        below = [math.erf(edge * limit / math.sqrt(2)) ** elements for edge in _PREDICTED.edges]
        below[0], below[-1] = 0.0, 1.0
        for place in range(len(shares)):
            shares[place] += (below[place + 1] - below[place]) / len(counted)
    return shares


def _draw_places(axes: Axes, points: Sequence[_Point], subjects: Sequence[str]) -> None:
    """Draw the largest err / bound by the place where a measurement has it."""
    smallest, largest = _RATIOS
    edges = [place / _PLACES for place in range(_PLACES + 1)]
    for number, subject in enumerate(subjects):
        most = [math.nan] * _PLACES
        for point in points:
            if point.subject == subject and point.place is not None:
                place = _bin(edges, point.place)
                ratio = min(max(point.ratio, smallest), largest)
                most[place] = ratio if math.isnan(most[place]) else max(most[place], ratio)
        axes.stairs(most, edges, baseline=None, color=_colour(number), linewidth=1.2)
    _set_log(axes.set_yscale, axes.yaxis, 10)
    axes.axhline(1.0, color=_LIMIT_COLOUR, linewidth=1.0, linestyle="--")
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(smallest / 1.5, largest * 1.5)
    _finish(axes)


def _set_log(scale: Callable[..., Any], axis: Any, base: int) -> None:
    scale("log", base=base)
    # A line for each would make a page twice as large.
    axis.set_minor_locator(NullLocator())


def _finish(axes: Axes) -> None:
    axes.patch.set_visible(False)
    axes.spines[["top", "right"]].set_visible(False)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _bin(edges: Sequence[float], value: float) -> int:
    inside = sum(edge <= value for edge in edges) - 1
    return min(max(inside, 0), len(edges) - 2)


def _plain(text: str) -> str:
    """Return a label that matplotlib draws as it is: `$` would start a formula, a leading `_` hide it.

    The end of a long name is kept: names of one module begin alike.
    """
    flat = one_line(text)
    shown = flat if len(flat) <= _LABEL else f"...{flat[3 - _LABEL :]}"
    return shown.replace("$", r"\$").removeprefix("_")


def _svg(figure: Figure, prefix: str, label: str) -> str:
    """Return the element; the prefix keeps its ids apart from those of other plots of a page.

    Black becomes the colour of the page's text, so that the plot can be read on a dark page, too.
    """
    with io.StringIO() as file:
        figure.savefig(file, format="svg", metadata=NO_METADATA)
        text = file.getvalue()
    element = text[text.index("<svg") :]
    plain = re.sub(r"<metadata>.*?</metadata>\s*", "", element, flags=re.S).strip()
    themed = plain.replace("#000000", "currentColor")
    named = f'<svg role="img" aria-label="{escape(label)}"{themed.removeprefix("<svg")}'
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\1{prefix}", named)
