"""What a person sees: snapshots without colour, and lines that can be copied."""

import io
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from attest.conformance.judging.failure import replay_line
from attest.conformance.record import Result, RunRecord, Verdict
from attest.reports.compare import compare_records
from attest.reports.render.terminal import print_comparison, print_run
from tests.reports.records import case, example_base, example_head, measurement, result, run


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


@pytest.mark.parametrize("width", [40, 80])
def test_the_name_of_a_subject_is_not_cut_and_all_counts_stand_below_their_titles(width: int) -> None:
    name = "operation.pallas.tpu_interpret.flash_attention.explicit"
    others = [replace(result(), subject=f"our.kernel{number}") for number in range(12)]
    lines = run_shown(run(replace(result(), subject=name), *others), width).splitlines()
    assert name in lines
    counts = [line for line in lines if line.startswith("  forward")]
    titles = next(line for line in lines if line.startswith("check"))
    assert len(counts) == 13
    assert {line.index("1") for line in counts} == {titles.index("PASS") + 3}


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


def test_an_empty_shard_is_no_pass_of_nothing() -> None:
    """A run may have more shards than tasks. A whole run without results is a failure."""
    last = run_shown(run(shard=(2, 3))).splitlines()[-1]
    assert last == "PASS: 0 results, since this shard has no case (profile quick, seed 0, shard 2/3)"
    assert "this shard" not in run_shown(run())
    assert "this shard" not in run_shown(run(shard=(2, 3), complete=False))


def test_a_run_that_was_only_cut_short_is_incomplete() -> None:
    cut = run(result(), complete=False, note="stopped after its 9 seconds: 1 of 2 cases not judged")
    last = run_shown(cut).splitlines()[-1]
    assert last.startswith(
        "INCOMPLETE: 1 result, 1 PASS, cut short (stopped after its 9 seconds: 1 of 2 cases"
    )
    for failed in (
        replace(cut, results=(result(Verdict.FAIL, message="wrong"),)),
        replace(cut, problems=("stale",)),
        replace(cut, complete=True, results=()),
    ):
        assert run_shown(failed).splitlines()[-1].startswith("FAIL: ")


def test_the_lines_before_the_status_say_what_was_judged_and_skipped() -> None:
    skipped = {"t.cuda": "runs on gpu, this machine has cpu", "p.tpu": "runs on tpu", "a.cuda": "runs on tpu"}
    record = run(
        result(),
        result(check="lse"),
        result(asked=case(1), subject="other.kernel"),
        environment={"skipped": skipped},
        left_out=("our.kernel: declares that NaN leaks: poison",),
        seconds=12.34,
    )
    assert run_shown(record).splitlines()[-5:-1] == [
        "judged: 2 cases of 2 subjects by 2 checks in 12.3 s",
        "skipped: t.cuda: runs on gpu, this machine has cpu",
        "skipped: a.cuda, p.tpu: runs on tpu",
        "skipped: our.kernel: declares that NaN leaks: poison",
    ]
    assert "judged: 1 case of 1 subject by 1 check\n" in run_shown(run(result()))
    assert "skipped" not in run_shown(run(result(), environment={"skipped": "nonsense"}))


def test_much_that_was_skipped_is_listed_only_if_it_is_asked_for() -> None:
    record = run(result(), left_out=tuple(f"kernel{n}: does not return lse: lse" for n in range(9)))
    assert [line for line in run_shown(record).splitlines() if "skipped" in line][-2:] == [
        "skipped: kernel5: does not return lse: lse",
        "skipped: 3 more, which -v lists",
    ]
    assert "skipped: kernel8: does" in verbose(record)


def verbose(record: RunRecord, width: int = 110, colour: bool = False) -> str:
    return shown(lambda console: print_run(record, console, verbose=True), width, colour)


def test_the_slowest_checks_and_features_are_listed_if_it_is_asked_for() -> None:
    record = run(
        *(result(check=f"check{n}", asked=case(causal=n % 2 == 0), seconds=n) for n in range(7)),
        result(check="check6", asked=case(sinks=1), seconds=0.25),
    )
    slowest = "check6 6.2 s, check5 5.0 s, check4 4.0 s, check3 3.0 s, check2 2.0 s"
    assert f"slowest checks: {slowest}\nslowest features: causal 12.0 s, sinks 0.2 s\n" in verbose(record)
    assert "slowest" not in run_shown(record)
    assert "slowest" not in verbose(run(result()))


ISSUE = "https://example.org/kernels/issues/1"


def known(check: str, reason: str, number: int, link: str = ISSUE, subject: str = "our.kernel") -> Result:
    message = f"expected: {reason}; found: something of case {number}"
    return result(Verdict.XFAIL, asked=case(number), check=check, message=message, link=link, subject=subject)


def known_failures() -> RunRecord:
    return run(
        *(known(check, "the window is short", number) for check in ("forward", "lse") for number in range(6)),
        known("refusal.scale_nan", "a scale of NaN is accepted", 7),
        known("forward", "no link", 8, link=""),
        known("poison", "no link", 8, link=""),
        known("forward", "the window is short", 9, subject="their.kernel"),
    )


def test_each_cause_of_expected_failures_is_one_line() -> None:
    assert run_shown(known_failures()).splitlines()[-9:-2] == [
        "Expected failures, one line for each cause (-v: all, with commands):",
        "  our.kernel",
        "       2 no link",
        f"      13 the window is short (+1 more) {ISSUE}",
        "  their.kernel",
        f"       1 the window is short {ISSUE}",
        "",
    ]


def test_every_expected_failure_is_listed_if_it_is_asked_for() -> None:
    text = verbose(known_failures())
    assert f"  our.kernel forward, 6 cases: the window is short {ISSUE}\n    attest replay" in text
    assert f"  our.kernel refusal.scale_nan, 1 case: a scale of NaN is accepted {ISSUE}\n" in text
    assert text.count("attest replay") == 6


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_terminal_is_not_too_narrow_for_any_line_but_commands(width: int) -> None:
    record = replace(
        example_head(),
        results=(*example_head().results, known("lse", "a long reason " * 12, 1)),
        problems=("a long problem " * 20,),
        left_out=("our.kernel: no reason: " + "check, " * 60,),
    )
    for text in (run_shown(record, width, colour=True), verbose(record, width, colour=True)):
        lines = re.sub("\x1b\\[[0-9;]*m", "", text).splitlines()
        assert max(len(line) for line in lines if "attest replay" not in line) <= width


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
