"""What a person sees: snapshots without colour, and lines that can be copied."""

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from attest.conformance.judging.failure import replay_line
from attest.conformance.record import RunRecord, Verdict
from attest.reports.compare import compare_records
from attest.reports.render.terminal import print_comparison, print_run
from tests.reports.records import example_base, example_head, measurement, result, run


def shown(print_it: Callable[[Console], None], width: int = 110, colour: bool = False) -> str:
    file = io.StringIO()
    print_it(
        Console(file=file, width=width, force_terminal=colour, color_system="standard" if colour else None)
    )
    return file.getvalue()


def run_shown(record: RunRecord, width: int = 110, colour: bool = False) -> str:
    return shown(lambda console: print_run(record, console), width, colour)


@pytest.mark.usefixtures("own_words")
def test_snapshots(matches_snapshot: Callable[[str, str], None]) -> None:
    base, head = example_base(), example_head()
    matches_snapshot("run.txt", run_shown(head))
    changes = compare_records(base, head)
    matches_snapshot("comparison.txt", shown(lambda console: print_comparison(changes, console), width=160))


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("colour", [False, True])
def test_the_replay_line_can_be_copied(width: int, colour: bool) -> None:
    failing = result(Verdict.FAIL, measurement(broken=("bound",)), message="[bold]x[/] :smile: [/nothing]")
    text = run_shown(run(failing), width, colour)
    assert replay_line(failing) in text
    assert "[bold]x[/] :smile: [/nothing]" in text


def test_the_seconds_of_each_family_of_checks_are_shown_if_they_are_known() -> None:
    known = run(result(seconds=1.2), result(check="refusal.scale_nan", seconds=0.5))
    table = run_shown(known)
    assert "seconds" in table
    assert [line.split()[-1] for line in table.splitlines() if line.startswith("  ")][:2] == ["1.2", "0.5"]
    assert "seconds" not in run_shown(run(result(), result(check="lse")))


def test_the_last_line_is_the_status() -> None:
    last = run_shown(example_head()).splitlines()[-1]
    assert last == (
        "FAIL: 25 results, 19 PASS, 1 FAIL, 1 UNSUPPORTED, 1 INCONCLUSIVE, 1 TIMEOUT, 1 ERROR, 1 XFAIL,"
        " 1 problem (profile quick, seed 0)"
    )
    assert run_shown(run()).splitlines()[-1] == "FAIL: 0 results (profile quick, seed 0)"
    cut = replace(
        example_base(), complete=False, note="interrupted", shard=(2, 3), narrowed="--dtype float32"
    )
    last = run_shown(cut).splitlines()[-1]
    assert last.endswith("cut short (interrupted) (profile quick, seed 0, shard 2/3, --dtype float32)")


def test_terminals_are_not_commanded() -> None:
    assert "\x1b" not in run_shown(example_head())


def test_the_last_line_of_a_comparison_is_its_headline() -> None:
    for base, head in ((example_base(), example_head()), (example_base(), example_base()), (run(), run())):
        changes = compare_records(base, head)
        text = shown(lambda console, changes=changes: print_comparison(changes, console), width=60)
        assert text.splitlines()[-1] == changes.headline


@pytest.mark.parametrize(
    ("base", "head", "style"),
    [
        (example_base(), example_base(), "33"),
        (run(result()), run(result()), "32"),
        (run(result()), run(result(Verdict.FAIL)), "1;31"),
    ],
)
def test_only_a_comparison_with_a_head_that_passes_is_green(
    base: RunRecord, head: RunRecord, style: str
) -> None:
    changes = compare_records(base, head)
    text = shown(lambda console: print_comparison(changes, console), colour=True)
    assert text.splitlines()[-1] == f"\x1b[{style}m{changes.headline}\x1b[0m"


def test_the_order_of_results_does_not_matter() -> None:
    head = example_head()
    assert run_shown(replace(head, results=head.results[::-1])) == run_shown(head)
