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
        assert text.startswith("**")
        assert text.count("<details>") == text.count("</details>")


def test_a_long_explanation_keeps_its_replay_line() -> None:
    failing = result(Verdict.FAIL, message="long " * 5000)
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


def test_a_run_shows_its_causes_before_its_tables() -> None:
    wrong = measurement(broken=("bound", "semantics"), wrong=3, size=9, where=("query 2 of 3",))
    record = run(
        *(result(Verdict.FAIL, wrong, asked=case(seed, causal=True)) for seed in range(9)),
        *(result(Verdict.PASS, measurement(), asked=case(seed)) for seed in range(9)),
        result(
            Verdict.ERROR, message="raised ValueError: `x`\nat a.py:3 in f: g()", subject="b", check="lse"
        ),
    )
    text = render_run(record)
    heads = re.findall(r"^(?:###|<details><summary>) ?(.*)", text, flags=re.M)
    assert heads == [
        "Cause 1 of 2, 1 failure: b: ERROR raised ValueError: \\`x\\`",
        "Cause 2 of 2, 9 failures: our.kernel: out is wrong with causal",
        "Verdicts",
        "Numbers (1)</summary>",
    ]
    assert "2 causes, the first: b: ERROR" in text[: text.index("###")]
    card = text[text.index("### Cause 2") : text.index("### Verdicts")]
    assert "\nout **WRONG** → the forward pass: the logits, which keys are visible, or what follows" in card
    assert "\n- out: wrong in 3 of 9 elements: query 2 of 3; err/bound" in card
    assert "\n- S6: causal" in card
    assert "\n- fails 9 of 9 cases with causal, 0 of 9 without\n" in card
    example = next(found for found in record.results if found.case == case(0, causal=True))
    assert f"```text\n{replay_line(example)}\n```" in card
    assert "```text\nraised ValueError: `x`\nat a.py:3 in f: g()\n```" in text


def test_what_does_not_fit_is_named() -> None:
    """Cards take half of a comment at most; of the tables, the last are left out whole."""
    long = "word " * 700
    record = run(
        *(
            result(Verdict.ERROR, message=f"kind {'x' * n} {long}", subject="k", asked=case(n))
            for n in range(40)
        ),
        *(
            result(
                Verdict.XFAIL, message=f"{n} {long}", link="https://example.org/" + "l" * 200, subject=str(n)
            )
            for n in range(60)
        ),
        *(result(Verdict.TIMEOUT, message=long, asked=case(n), subject="t" * 150) for n in range(60)),
        result(Verdict.PASS, measurement()),
        environment={"jax": "0.11.2"},
    )
    text = render_run(record)
    shown = text.count("### Cause ")
    assert 5 < shown < 40
    assert f"… and {40 - shown} causes more: see the HTML report." in text
    assert "### Verdicts" in text or "<details><summary>Verdicts" in text
    assert text.splitlines()[-1] == "Left out, to fit a comment: expected failures, numbers, environment."
    assert "<summary>Numbers" not in text
    assert "<summary>Environment" not in text
    assert "Left out" not in render_run(run(result(Verdict.FAIL)))


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
