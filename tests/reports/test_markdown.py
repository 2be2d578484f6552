"""What a pull request shows: snapshots, the size of a comment, and text that means only itself."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from attest.conformance.judging.failure import replay_line
from attest.conformance.record import RunRecord, Verdict
from attest.reports.compare import compare_records
from attest.reports.render.markdown import SIZE_LIMIT, render_comparison, render_run
from attest.reports.render.template import code, escape, fenced, link
from tests.reports.records import case, example_base, example_head, measurement, result, run

NASTY = "| `x` <img src=a> *b* \n# [c](d) @all \x00 \U0001f9e8 " * 40


@cache
def large(verdict: Verdict, scale: float) -> RunRecord:
    """5,000 results of long names and long messages, a fifth with the given verdict."""
    return run(
        *(
            result(
                verdict if number % 5 == 0 else Verdict.PASS,
                *(measurement(name, rms_ratio=0.5 * scale) for name in ("out", "lse", "dquery")),
                asked=case(number, causal=number % 2 == 0, window=(number % 7, 0), sinks=number % 3),
                subject=f"kernel.{'n' * 60}.{number % 40}",
                check=f"check{number % 8}",
                message=NASTY,
                link="https://example.org/" + "l" * 200,
            )
            for number in range(5000)
        ),
        problems=tuple(f"problem {number} {NASTY}" for number in range(100)),
        note=NASTY,
        environment={f"flag{number}": NASTY for number in range(50)},
    )


@pytest.mark.usefixtures("own_words")
def test_snapshots(matches_snapshot: Callable[[str, str], None]) -> None:
    base, head = example_base(), example_head()
    matches_snapshot("run.md", render_run(head))
    matches_snapshot("comparison.md", render_comparison(compare_records(base, head)))
    matches_snapshot("comparison_fine.md", render_comparison(compare_records(base, base)))
    matches_snapshot("comparison_empty.md", render_comparison(compare_records(run(), run())))


def test_the_order_of_results_does_not_matter() -> None:
    base, head = example_base(), example_head()
    turned = [replace(record, results=record.results[::-1]) for record in (base, head)]
    assert render_run(turned[1]) == render_run(head)
    assert render_comparison(compare_records(*turned)) == render_comparison(compare_records(base, head))


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.XFAIL])
def test_five_thousand_results_fit_a_comment(verdict: Verdict) -> None:
    before, after = large(Verdict.PASS, 1.0), large(verdict, 4.0)
    after = replace(after, environment={name: f"b{value}" for name, value in after.environment.items()})
    for text in (render_run(after), render_comparison(compare_records(before, after))):
        assert len(text.encode()) < SIZE_LIMIT
        assert len(text) > 4000
        assert re.search(r"… and \d+ .*more", text)
        assert text.count("<details>") == text.count("</details>")


def test_a_long_explanation_keeps_its_replay_line() -> None:
    failing = result(Verdict.FAIL, measurement(broken=("bound",)), message="long " * 5000)
    text = render_run(run(failing))
    assert replay_line(failing) in text
    assert "characters left out" in text
    assert replay_line(failing) in render_comparison(
        compare_records(run(replace(failing, verdict=Verdict.PASS)), run(failing))
    )


def test_the_first_line_says_it_all() -> None:
    text = render_comparison(compare_records(example_base(), example_head()))
    assert text.startswith("**6 regressions: our.kernel forward bfloat16: 1 case PASS ")
    assert render_run(example_head()).startswith("**FAIL: 25 results, ")


def test_tables_are_whole() -> None:
    """Every row of a table has as many cells as its head, whatever the messages say."""
    record = large(Verdict.FAIL, 1.0)
    record = replace(record, results=record.results[:60])
    text = render_run(record) + render_comparison(compare_records(example_base(), record))
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


def test_text_means_only_itself() -> None:
    assert escape("a|b `c` <d> @e _f_\n\x1bg") == r"a\|b \`c\` \<d> \@e \_f\_ \\x1bg"
    assert code("a`b|c\nd") == "`a'b\\|c d`"
    assert fenced("```` x").startswith("`````text\n")
    assert link("https://example.org/a_b") == "<https://example.org/a_b>"
    assert link("javascript:alert(1) <b>") == r"javascript:alert(1) \<b>"
