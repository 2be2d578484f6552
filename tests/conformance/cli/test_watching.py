"""A run shows on stderr that it goes on, and its first failure as soon as there is one."""

import io
import re
import sys

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.cli import watching as module
from attest.conformance.cli.watching import watching
from attest.conformance.judging.failure import replay_line
from attest.conformance.record import Verdict
from attest.conformance.running.progress import Progress
from tests.conformance.running.fakes import result


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until its number is changed."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "limits", lambda: {"heartbeat_seconds": 20.0})
    return now


def test_a_pipe_gets_a_line_now_and_then(clock, capsys):
    with watching() as watch:
        for seconds in (5, 19, 21, 30, 42):
            clock[0] = seconds
            watch.progress(Progress("judging", seconds, 100, 1))
    assert capsys.readouterr().err.splitlines() == [
        "attest: judging, 1 failing: 21 of 100 tasks done after 21 s",
        "attest: judging, 1 failing: 42 of 100 tasks done after 42 s",
    ]


@pytest.mark.parametrize(
    ("progress", "says"),
    [
        ({"planned": False}, "judging: 3 of at least 9 tasks done after 30 s"),
        ({"left": 12.4}, "judging: 3 of 9 tasks done after 30 s, about 12 s left"),
        ({"now": "k: causal", "seconds": 4.9}, "judging: 3 of 9 tasks done after 30 s; on k: causal"),
        ({"now": "k: causal", "seconds": 17.2}, "judging: 3 of 9 tasks done after 30 s; 17 s on k: causal"),
    ],
)
def test_a_line_names_the_total_the_time_left_and_what_takes_long(clock, capsys, progress, says):
    with watching() as watch:
        clock[0] = 30
        watch.progress(Progress("judging", 3, 9, 0, **progress))
    assert capsys.readouterr().err == f"attest: {says}\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_terminal_has_one_line_of_its_width(monkeypatch, clock, width):
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    for name, value in (("COLUMNS", str(width)), ("TERM", "xterm"), ("TTY_COMPATIBLE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CI", raising=False)
    progress = Progress(
        "judging", 7, 149, 2, left=125, now="xla.flash_attention: " + "causal, " * 30, seconds=9
    )
    with watching() as watch:
        watch.progress(progress)
        clock[0] = 65
        watch.progress(progress)
    plain = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    lines = [line.rstrip() for line in re.split("[\r\n]", plain)]
    (shown,) = {line for line in lines if "1:05" in line}
    assert re.match("judging, 2 failing   7/149 .{8} 1:05, 2:05 left; 9 s on xla.flash", shown)
    assert len(shown) == width


def test_the_searches_are_announced_at_once(clock, capsys):
    with watching() as watch:
        watch.progress(Progress("judging", 1, 1, 3))
        watch.progress(Progress("shrinking", 0, 2, 3))
    assert "attest: shrinking, 3 failing: 0 of 2 tasks done" in capsys.readouterr().err


def test_the_first_failure_is_shown_once(capsys):
    with watching() as watch:
        watch.results([result(), result(Case(q_len=2), verdict=Verdict.FAIL, message="wrong\nmore")])
        watch.results([result(Case(q_len=3), verdict=Verdict.FAIL, message="again")])
    first, described, replay = capsys.readouterr().err.splitlines()
    assert first == "attest: first failure: toys.right: forward: wrong"
    assert described.startswith("attest:   float32, batch 1, 2 queries x 1 key")
    assert replay.startswith("attest:   replay: attest replay ")


def test_a_long_replay_line_can_be_copied(capsys):
    case = Case(q_len=90, kv_len=80, batch=20, lengths=tuple((90 - i, 80 - i) for i in range(20)))
    failing = result(case, verdict=Verdict.FAIL, message="wrong")
    with watching() as watch:
        watch.results([failing])
    *_, replay = capsys.readouterr().err.splitlines()
    assert len(replay) > 200
    assert replay == f"attest:   replay: {replay_line(failing)}"


def test_a_quick_run_that_passes_shows_nothing(clock, capsys):
    with watching() as watch:
        watch.progress(Progress("judging", 1, 1, 0))
        watch.results([result()])
    assert capsys.readouterr().err == ""
