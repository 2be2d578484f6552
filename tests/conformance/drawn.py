"""Cases as a run draws them, for Hypothesis to choose from."""

from hypothesis import strategies as st

from attest.conformance.cases.case import Case
from attest.conformance.cases.features import DTYPES
from attest.conformance.drawing.covering import covering_rows
from attest.conformance.drawing.recipes import fillings, model
from attest.conformance.drawing.shapes import Blocks, Offer

ROWS = list(covering_rows(model(), 2, seed=0))


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    """A filling of a row of a covering array, for a subject of small blocks or of its own."""
    offer = Offer(
        dtype=draw(st.sampled_from(DTYPES)),
        blocks=draw(st.sampled_from((None, Blocks(4, 8), Blocks(16, 16)))),
    )
    return draw(st.sampled_from(fillings(draw(st.sampled_from(ROWS)), offer, draw(st.integers(0, 999)), 3)))
