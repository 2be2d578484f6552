"""What a page shows: one self-contained file, the same bytes for the same run."""

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from attest.conformance.record import Element, Verdict
from attest.reports.cards import cards
from attest.reports.render import html
from attest.reports.render import plots as drawing
from attest.reports.render.html import SIZE_LIMIT, render_run
from attest.reports.render.plots import plots
from tests.reports.records import case, example_head, measurement, result, run


class Page(HTMLParser):
    """The tags of a page, and whether they nest."""

    void = ("meta", "br", "wbr", "input")

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
    assert not {"link", "img", "iframe", "object", "base"}.intersection(names)
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [{}]
    loaded = [v for _, attributes in page.tags for k, v in attributes.items() if k in ("src", "xlink:href")]
    assert all((value or "").startswith("#") for value in loaded)
    assert "@import" not in text
    assert "url(" not in text[: text.index("</style>")]
    links = [str(a["href"]) for tag, a in page.tags if tag == "a"]
    outward = [link for link in links if not link.startswith("#")]
    assert outward == ["https://example.org/kernels/issues/1"]


def test_ids_are_unique_and_links_lead_somewhere() -> None:
    page = Page(example_page())
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    inward = {str(a["href"])[1:] for tag, a in page.tags if tag == "a" and str(a["href"]).startswith("#")}
    named = {str(a["aria-labelledby"]) for _, a in page.tags if "aria-labelledby" in a}
    assert "main" in inward
    assert len(inward) == 3
    assert inward | named <= set(ids)


def test_the_link_of_a_cause_is_the_same_in_another_run() -> None:
    wrong = measurement(broken=("bound", "semantics"))
    failing = [result(Verdict.FAIL, wrong, asked=case(seed, causal=True)) for seed in range(12)]
    passing = [result(Verdict.PASS, measurement(), asked=case(seed)) for seed in range(12)]
    other = result(Verdict.ERROR, message="bad", subject="another")
    (alone,) = cards([*failing, *passing])
    _, second = cards([*failing[2:], *passing, other])
    assert alone.id == second.id
    assert f'id="{alone.id}"' in render_run(run(*failing, *passing))
    twice = cards([replace(other, message=message) for message in ("bad 1", "bad\n1")])
    assert len({card.id for card in twice}) == len(twice)


def test_headings_and_tables_can_be_read_aloud() -> None:
    page = Page(example_page())
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(a.get("scope") in ("col", "row") for tag, a in page.tags if tag == "th")
    for place, (tag, _) in enumerate(page.tags):
        if tag == "table":
            box = page.tags[place - 1][1]
            assert (box.get("class"), box.get("tabindex"), box.get("role")) == ("box", "0", "region")
            assert box.get("aria-label")


def test_the_page_works_without_its_script() -> None:
    """Only the filters are hidden at first."""
    page = Page(example_page())
    assert [a.get("id") for _, a in page.tags if "hidden" in a] == ["filters"]
    assert [tag for tag, _ in page.tags].count("button") == 1


def test_the_verdict_comes_first_and_then_what_is_wrong() -> None:
    text = example_page()
    found = re.findall("<h[12][^>]*>([^<]*)", text)
    assert found == [
        "attest: FAIL",
        "Wrong cases by feature and output",
        "Causes",
        "Timed out, so neither right nor wrong",
        "Expected failures",
        "Refusals",
        "Verdicts",
        "Distribution of the errors",
        "Numbers",
        "Environment",
    ]


def test_entries_name_what_the_filters_look_for() -> None:
    page = Page(example_page())
    entries = [a for _, a in page.tags if "data-subject" in a]
    card = next(a for a in entries if a.get("class") == "card")
    assert card["data-subject"] == "our.kernel"
    assert (card["data-check"], card["data-verdict"]) == ("forward", "FAIL")
    row = next(a for a in entries if "PASS" in str(a.get("data-verdict")))
    assert str(row["data-verdict"]).split("\n")[:2] == ["PASS", "FAIL"]
    selects = {f"data-{a['name']}" for tag, a in page.tags if tag == "select"}
    assert selects == {name for a in entries for name in a if name.startswith("data-")}


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_have_enough_contrast(scheme: int) -> None:
    style = example_page().partition("</style>")[0]
    blocks = re.findall(r":root \{(.*?)\}", style, flags=re.S)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[scheme]))
    texts = ("text", "quiet", "link", "good", "bad")
    pairs = [(text, ground) for text in texts for ground in ("page", "panel")]
    pairs += [("text", "s1"), ("text", "s2"), ("text", "s3"), ("on-s4", "s4")]
    for text, ground in pairs:
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours by WCAG 2."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("verdict", [Verdict.ERROR, Verdict.XFAIL, Verdict.UNSUPPORTED])
def test_a_large_run_fits_a_page(verdict: Verdict) -> None:
    """Messages that differ by more than a number are causes of their own."""
    letters = str.maketrans("0123456789", "abcdefghij")
    record = run(
        *(
            result(
                verdict,
                measurement(),
                asked=case(number, causal=number % 2 == 0),
                subject=f"kernel.{number % 40}",
                check=("forward", "lse", "gradients")[number % 3],
                message=f"{'x' * 900} {number}".translate(letters),
            )
            for number in range(3000)
        )
    )
    text = render_run(record)
    assert 200_000 < len(text.encode()) < SIZE_LIMIT
    assert re.search(r"… and \d+ .* more: see the record", text)


def test_text_of_subjects_is_escaped() -> None:
    evil = "<script>alert(1)</script>\"' onclick='x()"
    record = run(
        result(Verdict.FAIL, measurement(), message=evil, subject=evil, check="$x_1$"),
        result(Verdict.FAIL, measurement(broken=("bound",)), message=evil, subject=evil),
        result(Verdict.ERROR, message=f"{evil}\n{evil}", subject=evil, check=evil),
        result(Verdict.UNSUPPORTED, message=evil, subject=evil, check=evil),
        result(Verdict.TIMEOUT, message=evil, subject=evil, check=evil, phase=evil),
        result(Verdict.XFAIL, measurement(), subject="b", message=evil, link="javascript:alert(1)"),
        result(Verdict.PASS, measurement("out"), subject="_c", check="$x_1$"),
        problems=(evil,),
        environment={evil: evil},
    )
    page = Page(render_run(record))
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [{}]
    assert not [a for tag, a in page.tags if tag == "a" and not str(a["href"]).startswith("#")]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


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


@pytest.mark.found_outside
def test_many_subjects_of_long_names_leave_room_for_a_plot() -> None:
    """The legend once took all of the figure."""
    record = run(
        *(result(Verdict.PASS, measurement(), subject=f"{'long.name.' * 9}{number}") for number in range(60))
    )
    (plot,) = plots(record)
    assert plot.count == 60
    labels = [text for text in re.findall(">([^<]*)</text>", plot.svg) if "long.name" in text]
    assert len(set(labels)) == 60
    assert max(map(len, labels)) == 36


def test_nothing_to_draw() -> None:
    assert plots(run()) == ()
    assert plots(run(result(Verdict.UNSUPPORTED))) == ()
    Page(render_run(run()))


def lines(svg: str) -> list[list[float]]:
    """The points of each dashed line of a plot: its limits."""
    found = re.findall(r'<path d="([^"]*)"[^>]*stroke-dasharray[^>]*>', svg)
    return [[float(number) for number in re.findall(r"-?[\d.]+", path)] for path in found]


def test_the_plot_of_rms_has_the_limits_of_the_error_model() -> None:
    """That of the dtype, that of lse, and none where rms is not judged."""
    judged = [measurement(), measurement("lse")]
    plain = [result(Verdict.PASS, measurement(elements=8), asked=case(seed)) for seed in range(3)]
    (few,) = plots(run(*plain))
    (both,) = plots(run(result(Verdict.PASS, *judged, asked=case(9)), *plain))
    # err / bound, largest z, and the place; and beside them rms.
    assert len(lines(few.svg)) == 3
    assert len(lines(both.svg)) == 5


def predicted(plot_of: object) -> str:
    """The grey area of a plot."""
    found = re.findall(r'<path d="([^"]*)"[^>]*style="fill: #808080; opacity: 0.35', str(plot_of))
    assert len(found) == 1
    return found[0]


def test_the_predicted_distribution_follows_from_the_number_of_errors() -> None:
    """The largest of many errors is larger, and it does not depend on the errors themselves."""

    def of(elements: int, **numbers: float) -> str:
        (plot,) = plots(run(result(Verdict.PASS, measurement(elements=elements, **numbers))))
        return predicted(plot.svg)

    assert of(64) == of(64, largest_z=9.0)
    assert of(64) != of(10**6)


def test_the_predicted_shares_are_those_of_normal_errors() -> None:
    point = drawing._Point("a", case(), measurement(elements=1))
    shares = drawing._predicted([point])
    assert sum(shares) == pytest.approx(1.0)
    edges = drawing._PREDICTED.edges
    below_one = sum(
        share for share, edge in zip(shares, edges[1:], strict=True) if edge * point.limits.largest_z <= 1
    )
    assert below_one == pytest.approx(0.6827, abs=0.1)
    # All of a million errors are hardly ever below one deviation.
    many = drawing._predicted([drawing._Point("a", case(), measurement(elements=10**6))])
    assert sum(many[: len(many) // 2]) < 1e-6


def test_an_error_is_drawn_at_its_place_in_the_sequence() -> None:
    def place(output: str, index: tuple[int, ...]) -> float | None:
        worst = Element(index, 0.5, 0.25, "0x3f00", "0x3e80")
        return drawing._Point("a", case(q_len=10, kv_len=20), measurement(output, worst=worst)).place

    assert place("out", (0, 4, 0, 5)) == 0.45
    assert place("lse", (0, 2, 9)) == 0.95
    assert place("dkey", (0, 0, 0, 0)) == 0.025
    assert place("dbias", (0, 0, 0, 0)) is None
    assert drawing._Point("a", case(), measurement()).place is None


def test_plots_of_other_checks_are_folded_and_too_many_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("forward", "law.1", "law.2")
    record = run(*(result(Verdict.PASS, measurement(), check=name) for name in names))
    page = render_run(record)
    found = [page.index(text) for text in ("<h3>forward, 1", "Other checks: 2 plots", "<h3>law.1, 1")]
    assert found == sorted(found)
    assert "more: see the record" not in page
    monkeypatch.setattr(html, "_PLOTS_SIZE", 1.5 * len(plots(record)[0].svg))
    page = render_run(record)
    assert page.count('class="plot"') == 1
    assert "… and 2 plots more: see the record" in page


def test_a_plot_has_the_colour_of_the_page_and_a_text_for_those_who_do_not_see_it() -> None:
    svg = plots(example_head())[0].svg
    assert "#000000" not in svg
    assert "currentColor" in svg
    assert svg.startswith('<svg role="img" aria-label="Plots of forward, bfloat16: largest err / bound')
