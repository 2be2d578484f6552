"""The HTML page of a run: all of the Markdown, unabridged, with plots of its numbers."""

from attest.conformance.judging import failure
from attest.conformance.record import RunRecord
from attest.reports.render.plots import plots
from attest.reports.render.template import fill
from attest.reports.spread import STATISTICS
from attest.reports.summary import options_of, summarise
from attest.reports.words import LEGEND, environment


def render_run(record: RunRecord) -> str:
    """Return one run as one file of HTML that loads nothing, byte for byte the same for the same run."""
    summary = summarise(record)
    return fill(
        "run.html.j2",
        summary=summary,
        options=options_of(record),
        explained=[(result, failure.explain(result)) for result in summary.red],
        plots=plots(record),
        settings=environment(record),
        statistics=STATISTICS,
        legend=LEGEND,
    )
