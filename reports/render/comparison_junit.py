"""JUnit XML of a comparison: a test for each verdict that changed and for each regression."""

import xml.etree.ElementTree as ET

from attest.conformance.text import printable
from attest.reports.comparison import Comparison
from attest.reports.failures import NewCause
from attest.reports.pairing import Fate, Pair
from attest.reports.render.junit import document, element, suite
from attest.reports.words import one_line, recipe

_REGRESSIONS, _VERDICTS = "attest.regressions", "attest.verdicts"


def render_junit(comparison: Comparison) -> str:
    """Return a comparison as JUnit XML. What became worse fails, with its cause; what else changed passes."""
    worse = [_regression(str(regression)) for regression in comparison.regressions]
    cause_of = {pair.key: found for found in comparison.new_causes for pair in found.pairs}
    changed = [
        _changed(pair, cause_of.get(pair.key)) for pair in comparison.pairs if pair.fate is not Fate.SAME
    ]
    return document(
        [suite(_REGRESSIONS, worse or [element("none", _REGRESSIONS)]), suite(_VERDICTS, changed)]
    )


def _regression(words: str) -> ET.Element:
    test = element(words, _REGRESSIONS)
    ET.SubElement(test, "failure", {"type": "regression", "message": one_line(words)}).text = printable(words)
    return test


def _changed(pair: Pair, found: NewCause | None) -> ET.Element:
    test = element(_name(pair), f"{pair.result.subject}.{pair.result.check}")
    if pair.fate.regressed:
        about = {"type": pair.fate.value, "message": f"{pair.before} -> {pair.after}"}
        ET.SubElement(test, "failure", about).text = printable(_explained(pair, found))
    return test


def _name(pair: Pair) -> str:
    return f"{pair.result.check}[{pair.case_id}] {recipe(pair.result.case)}"


def _explained(pair: Pair, found: NewCause | None) -> str:
    """Return the card for the first new failure of a cause, and a reference to that test for the others."""
    if found is None:
        return pair.result.message
    first = next(other for other in found.pairs if other.fate.regressed)
    if pair == first:
        return f"{found.counts}\n{found.card.text}"
    return f"same cause as {one_line(_name(first))}: {one_line(found.card.parts.headline)}"
