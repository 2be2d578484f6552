"""JUnit XML of a comparison: a test for each verdict that changed and for each regression."""

import xml.etree.ElementTree as ET

from attest.conformance.text import printable
from attest.reports.compare import Comparison
from attest.reports.pairing import Fate, Pair
from attest.reports.render.junit import document, element, suite
from attest.reports.words import one_line, recipe

_REGRESSIONS, _VERDICTS = "attest.regressions", "attest.verdicts"


def render_junit(comparison: Comparison) -> str:
    """Return a comparison as JUnit XML. What became worse fails, what else changed passes."""
    worse = [_regression(str(regression)) for regression in comparison.regressions]
    changed = [_changed(pair) for pair in comparison.pairs if pair.fate is not Fate.SAME]
    return document(
        [suite(_REGRESSIONS, worse or [element("none", _REGRESSIONS)]), suite(_VERDICTS, changed)]
    )


def _regression(words: str) -> ET.Element:
    test = element(words, _REGRESSIONS)
    ET.SubElement(test, "failure", {"type": "regression", "message": one_line(words)}).text = printable(words)
    return test


def _changed(pair: Pair) -> ET.Element:
    subject, check, case = pair.key
    test = element(f"{check}[{case}] {recipe(pair.result.case)}", f"{subject}.{check}")
    if pair.fate.regressed:
        about = {"type": pair.fate.value, "message": f"{pair.before} -> {pair.after}"}
        ET.SubElement(test, "failure", about).text = printable(pair.result.message)
    return test
