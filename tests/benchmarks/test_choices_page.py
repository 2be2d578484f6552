"""The page of measured calls: it shows the table as it is, with the implementation that runs in bold."""

import re
from collections.abc import Iterator

from attest.kernels.choice.fastest import TABLE, read
from benchmarks.choices_page import PAGE, as_page

CHOICES = read(TABLE)


def cells() -> Iterator[dict[str, float]]:
    """Yield the times of each cell of the page, by the name as it is written there, the default first."""
    for line in PAGE.read_text().splitlines():
        for cell in line.split("|"):
            if "**" in cell:
                shown = (x.strip().removesuffix("**").split(" ") for x in cell.split(","))
                yield {name: float(milliseconds) for name, milliseconds in shown}


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == as_page(CHOICES), "run python3 -m benchmarks.choices_page"


def test_each_measured_call_has_a_cell_for_each_direction() -> None:
    assert len(list(cells())) == 2 * len(CHOICES["calls"])


def test_what_is_in_bold_saves_enough() -> None:
    """Numbers on the page are rounded to three digits."""
    for times in cells():
        (bold,) = (name for name in times if name.startswith("**"))
        default, least = next(iter(times)), min(times.values())
        if bold == default:
            assert times[bold] < 1.01 * least / (1 - CHOICES["margin"]), times
        else:
            assert times[bold] == least
            assert times[bold] < 1.01 * (1 - CHOICES["margin"]) * times[default], times


def test_both_kinds_of_choice_are_there() -> None:
    bold = {re.sub(r"\W", "", name) for times in cells() for name in times if "**" in name}
    assert {"mosaic_gpu", "triton"} <= bold
