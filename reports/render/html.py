"""The HTML page of a run: one file that loads nothing, with its causes, plots and numbers."""

from collections.abc import Sequence

from attest.conformance.judging import failure
from attest.conformance.judging.picture import text_of
from attest.conformance.record import RunRecord
from attest.reports.heat import heat_maps
from attest.reports.render.picture import drawings
from attest.reports.render.plots import Plot, plots
from attest.reports.render.template import SIZE_LIMIT, fill
from attest.reports.spread import STATISTICS
from attest.reports.summary import options_of, summarise
from attest.reports.words import LEGEND, environment

# The bytes of plots: the rest of a page is text, which can be cut.
_PLOTS_SIZE = 1_200_000

# How many entries each list shows, the most that fit.
TOPS = (2000, 500, 200, 100, 50, 20, 10, 5)


def render_run(record: RunRecord) -> str:
    """Return one run as one file of HTML that loads nothing, byte for byte the same for the same run."""
    summary = summarise(record)
    maps, every_plot = heat_maps(record.results), plots(record)
    drawn = _fitting(every_plot)
    text = ""
    for top in TOPS:
        text = fill(
            "run.html.j2",
            summary=summary,
            options=options_of(record),
            explain=failure.explain,
            drawings=drawings,
            picture_text=text_of,
            maps=maps,
            plots=drawn,
            hidden_plots=len(every_plot) - len(drawn),
            settings=environment(record),
            statistics=STATISTICS,
            legend=LEGEND,
            top=top,
        ).lstrip()
        if len(text.encode()) < SIZE_LIMIT:
            break
    return text


def _fitting(drawn: Sequence[Plot]) -> list[Plot]:
    """Return the first plots, as many as fit."""
    found: list[Plot] = []
    left = _PLOTS_SIZE
    for plot in drawn:
        left -= len(plot.svg.encode())
        if left < 0:
            break
        found.append(plot)
    return found
