"""A failure says in words, numbers and one command what is wrong."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

from attest.conformance.cases.case import Case
from attest.conformance.clauses import CLAUSES
from attest.conformance.cli.replay_request import read_replay_request
from attest.conformance.judging.failure import describe_case, explain, replay_line
from attest.conformance.record import Element, Measurement, Verdict
from tests.conformance.running.fakes import result

CASE = Case(
    dtype="bfloat16",
    q_len=2,
    kv_len=3,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    value_dim=5,
    causal=True,
    window=(1, None),
)
WORST = Element((0, 1, 0, 0), 0.5, float("nan"), "0x3f00", "0x7fc0")
BROKEN = Measurement("out", 40, float("inf"), 1.25, 9.5, 0.5, broken=("bound",), worst=WORST)
SOUND = Measurement("lse", 8, 0.1, 0.9, 2.0, 0.1)
FAILURE = result(
    CASE,
    verdict=Verdict.FAIL,
    clauses=("S6", "S7"),
    message="outside the error model: out",
    measurements=(BROKEN, SOUND),
    minimal=True,
)


def test_a_failure_is_explained():
    assert explain(FAILURE).splitlines() == [
        "FAIL toys.right: forward (the simplest failing case that was found)",
        "  outside the error model: out",
        f"  S6: {CLAUSES['S6']}",
        f"  S7: {CLAUSES['S7']}",
        "  out: err/bound inf, rms ratio 1.25, largest z 9.5, bias t 0.5, 40 elements compared",
        "    an element lies outside the proven error bound (bound)",
        "    worst element out[0, 1, 0, 0]",
        "      got      0.5 (0x3f00)",
        "      expected nan (0x7fc0)",
        f"  case {CASE.id}: bfloat16, batch 1, 2 queries x 3 keys, heads 4 over 2, head dim 8 and 5, "
        "normal values, seed 0; causal, window=[1, null]",
        f"  replay: {replay_line(FAILURE)}",
    ]


def test_a_known_failure_shows_its_link():
    known = result(verdict=Verdict.XFAIL, message="expected: known", link="https://example.org/1")
    assert "  known: https://example.org/1" in explain(known).splitlines()


def test_a_case_without_options_says_so():
    assert describe_case(Case()).endswith("; no option")


def test_the_replay_line_asks_the_same_again():
    command, subcommand, argument = shlex.split(replay_line(FAILURE))
    assert (command, subcommand) == ("attest", "replay")
    asked = read_replay_request(argument, None, ())
    assert (asked.subject, asked.checks, asked.case) == ("toys.right", ("forward",), CASE)


def test_options_go_before_what_the_case_says():
    asked = read_replay_request(shlex.split(replay_line(FAILURE))[2], "other", ("lse",))
    assert (asked.subject, asked.checks) == ("other", ("lse",))


def test_a_case_by_itself_is_asked_everything_that_drawn_cases_are(tmp_path: Path):
    path = tmp_path / "case.json"
    path.write_text(json.dumps(CASE.to_json()))
    asked = read_replay_request(str(path), "toys.right", ())
    assert asked.case == CASE
    assert {"forward", "lse", "gradients"} <= set(asked.checks)


def test_a_subject_that_is_a_module_is_named_apart():
    line = replay_line(replace(FAILURE, subject="my module:kernel"))
    *_, argument, option = shlex.split(line)
    assert option == "--subject=my module:kernel"
    assert "subject" not in json.loads(argument)


def test_a_message_of_several_lines_is_indented():
    shown = explain(result(CASE, verdict=Verdict.FAIL, message="raised Error: first\nsecond")).splitlines()
    assert shown[1:3] == ["  raised Error: first", "  second"]
