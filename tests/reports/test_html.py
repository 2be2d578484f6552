"""What a page shows: one self-contained file, the same bytes for the same run."""

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest

from attest.conformance.record import Verdict
from attest.reports.render.html import render_run
from attest.reports.render.plots import plots
from tests.reports.records import case, example_head, measurement, result, run


class Page(HTMLParser):
    """The tags of a page, and whether they nest."""

    void = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@cache
def example_page() -> str:
    return render_run(example_head())


@pytest.mark.usefixtures("own_words")
def test_snapshot_without_plots(matches_snapshot: Callable[[str, str], None]) -> None:
    """The curves are matplotlib's, whose versions differ in the last digits."""
    matches_snapshot(
        "run.html", re.sub(r"<svg.*?</svg>", "<svg></svg>", render_run(example_head()), flags=re.S)
    )


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = example_page()
    page = Page(text)
    names = [tag for tag, _ in page.tags]
    assert names.count("svg") == 2
    assert not {"script", "link", "img", "iframe"}.intersection(names)
    loaded = [v for _, attributes in page.tags for k, v in attributes.items() if k in ("src", "xlink:href")]
    assert all((value or "").startswith("#") for value in loaded)
    assert "@import" not in text
    assert [a["href"] for tag, a in page.tags if tag == "a"] == ["https://example.org/kernels/issues/1"]


def test_text_of_subjects_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    record = run(
        result(Verdict.FAIL, measurement(), message=evil, subject=evil, check="$x_1$"),
        result(Verdict.XFAIL, measurement(), subject="b", message=evil, link="javascript:alert(1)"),
        result(Verdict.PASS, measurement("out"), subject="_c", check="$x_1$"),
        problems=(evil,),
        environment={evil: evil},
    )
    page = Page(render_run(record))
    assert not [tag for tag, _ in page.tags if tag in ("script", "a")]


def test_same_bytes_in_any_order() -> None:
    head = example_head()
    assert render_run(replace(head, results=head.results[::-1])) == example_page()


def test_same_bytes_in_another_process() -> None:
    program = (
        "import sys; from tests.reports.records import example_head;"
        "from attest.reports.render.html import render_run;"
        "sys.stdout.buffer.write(render_run(example_head()).encode())"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert made.stdout.decode() == example_page()


def test_numbers_beyond_the_scale_are_drawn() -> None:
    strange = (math.nan, math.inf, 0.0, 1e30)
    record = run(
        *(
            result(Verdict.PASS, measurement(worst_ratio=v, rms_ratio=v), asked=case(seed), check="lse")
            for seed, v in enumerate(strange)
        )
    )
    (plot,) = plots(record)
    assert plot.count == 4
    assert "nan" not in plot.svg.lower()


def test_nothing_to_draw() -> None:
    assert plots(run()) == ()
    assert plots(run(result(Verdict.UNSUPPORTED))) == ()
    Page(render_run(run()))
