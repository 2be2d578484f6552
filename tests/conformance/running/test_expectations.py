"""Known failures are conditional, have a reason and a link, and must keep failing."""

import os
import re
from threading import Thread

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.record import Measurement, RunRecord, Verdict
from attest.conformance.running.expectations import Expectation, expect, load_expectations
from attest.conformance.running.gate import with_policy
from tests.conformance.running.fakes import result

ENTRY = """
[[expect]]
subject = "toys.right"
check = "forward"
reason = "it is known"
link = "https://example.org/1"
"""


def known(**more) -> Expectation:
    required = {"subject": "toys.right", "check": "forward", "reason": "known", "link": "https://example.org"}
    return Expectation(**{**required, **more})


def stale(record: RunRecord, entry: Expectation) -> list[str]:
    return [text for text in with_policy(record, [entry]).problems if text.startswith("stale expectation")]


def wrong(output: str) -> Measurement:
    return Measurement(output, 1, 2.0, 1.0, 1.0, 0.0, broken=("bound",))


WINDOWED = Case(dtype="bfloat16", q_len=4, kv_len=8, window=(0, 1), causal=True)


@pytest.mark.parametrize(
    ("conditions", "holds"),
    [
        ({}, True),
        ({"subject": "toys.left"}, False),
        ({"check": "lse"}, False),
        ({"case": {"dtype": "bfloat16"}}, True),
        ({"case": {"dtype": ["float16", "bfloat16"]}}, True),
        ({"case": {"dtype": "float32"}}, False),
        ({"case": {"window": [0, 1]}}, True),
        ({"case": {"window": [[1, 1], [0, 1]]}}, True),
        ({"case": {"window": [1, 0]}}, False),
        ({"case": {"kv_len": {"min": 8}}}, True),
        ({"case": {"kv_len": {"min": 9}}}, False),
        ({"case": {"kv_len": {"max": 8}, "q_len": {"min": 1, "max": 3}}}, False),
        ({"case": {"soft_cap": {"min": 1.0}}}, False),
        ({"features": frozenset({"window", "causal"})}, True),
        ({"features": frozenset({"window", "bias"})}, False),
        ({"without": frozenset({"bias"})}, True),
        ({"without": frozenset({"causal"})}, False),
        ({"message_contains": "outside"}, True),
        ({"message_contains": "raised"}, False),
        ({"outputs": frozenset({"dkey", "dvalue"})}, True),
        ({"outputs": frozenset({"dvalue"})}, False),
    ],
)
def test_conditions(conditions, holds):
    failure = result(WINDOWED, verdict=Verdict.FAIL, message="outside", measurements=(wrong("dkey"),))
    assert known(**conditions).describes(failure) is holds
    expected = expect(failure, [known(clauses=("S7",), **conditions)])
    assert (expected.verdict, expected.breaks) == ((Verdict.XFAIL, ("S7",)) if holds else (Verdict.FAIL, ()))


def test_a_pass_where_a_failure_is_expected_is_red():
    passed = expect(result(WINDOWED), [known()])
    assert passed.verdict is Verdict.XPASS
    assert passed.verdict.red
    assert "expected to fail: known" in passed.message


def test_a_failure_that_shows_only_sometimes_may_pass_but_must_show_once():
    entry = known(shows="sometimes")
    passed, failed = result(WINDOWED), result(Case(), verdict=Verdict.FAIL)
    assert expect(passed, [entry]) == passed
    judged = tuple(expect(found, [entry]) for found in (passed, failed))
    assert stale(RunRecord("quick", 0, judged), entry) == []
    assert len(stale(RunRecord("quick", 0, judged[:1]), entry)) == 1


@pytest.mark.parametrize("verdict", [Verdict.ERROR, Verdict.UNSUPPORTED, Verdict.INCONCLUSIVE])
def test_other_verdicts_are_left_alone(verdict):
    assert expect(result(verdict=verdict), [known()]).verdict is verdict


STALE = known(case={"head_dim": 77})


@pytest.mark.parametrize(
    ("entry", "changes", "told"),
    [
        (STALE, {}, True),
        (known(), {}, False),
        (known(subject="absent"), {}, False),
        (known(check="gradients", case={"head_dim": 77}), {}, False),
        (known(case={"head_dim": 77}, profiles=("standard", "nightly")), {}, False),
        (known(case={"head_dim": 77}, profiles=("quick",)), {}, True),
        (known(case={"head_dim": 77}, shows="sometimes"), {}, False),
        (known(shows="sometimes", message_contains="other words"), {}, True),
        (STALE, {"shard": (1, 2)}, False),
        (STALE, {"narrowed": "--dtype float32"}, False),
        (STALE, {"complete": False, "note": "interrupted"}, False),
    ],
)
def test_staleness_is_judged_on_whole_runs_only(entry, changes, told):
    failure = expect(result(verdict=Verdict.FAIL), [entry])
    found = stale(RunRecord(**{"profile": "quick", "seed": 0, "results": (failure,), **changes}), entry)
    assert bool(found) is told
    assert all("stale expectation" in problem and entry.reason in problem for problem in found)


def test_an_entry_is_read_whole(tmp_path):
    path = tmp_path / "known.toml"
    path.write_text(
        ENTRY + 'outputs = ["dkey"]\nprofiles = ["quick"]\nshows = "sometimes"\nmessage_contains = "x"\n'
        'clauses = ["S15"]\n'
        '[expect.when]\ndtype = "float16"\nfeatures = ["bias"]\nwithout = ["mask"]\nkv_len = { min = 1024 }\n'
    )
    (entry,) = (entry for entry in load_expectations([path]) if entry.subject == "toys.right")
    assert entry.case == {"dtype": "float16", "kv_len": {"min": 1024}}
    assert (entry.features, entry.without) == (frozenset({"bias"}), frozenset({"mask"}))
    assert entry.clauses == ("S15",)
    assert (entry.outputs, entry.profiles, entry.shows) == (frozenset({"dkey"}), ("quick",), "sometimes")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("expect = [", "not readable as TOML"),
        ("[other]", "nothing else"),
        (ENTRY.replace('reason = "it is known"', ""), "entry 1: object missing required field `reason`"),
        (ENTRY.replace("it is known", ""), "entry 1, reason: expected `str` of length >= 1"),
        (ENTRY.replace("https://example.org/1", "example.org"), "link: got 'example.org'"),
        (ENTRY.replace("forward", "karma"), "check: got 'karma'"),
        (ENTRY + 'mood = "good"', "entry 1: object contains unknown field `mood`"),
        (ENTRY + "message_contains = 3", "entry 1, message_contains: expected `str`, got `int`"),
        (ENTRY + 'profiles = ["slow"]', "profiles: got ('slow',)"),
        (ENTRY + 'clauses = ["S99"]', "clauses: got ('S99',)"),
        (ENTRY + 'profiles = "quick"', "entry 1, profiles: expected `array`, got `str`"),
        (ENTRY + 'shows = "seldom"', "entry 1, shows: invalid enum value 'seldom'"),
        (ENTRY + '[expect.when]\nfeatures = ["magic"]', "when.features: got ('magic',)"),
        (ENTRY + "[expect.when]\ncolour = 1", "when.colour: got 1"),
        (ENTRY + "[expect.when]\nkv_len = { least = 1 }", "when.kv_len"),
        (ENTRY + "[expect.when]\nkv_len = { min = 'a' }", "when.kv_len: got {'min': 'a'}"),
        (ENTRY + "when = 3", "entry 1, when: expected `object`, got `int`"),
        (ENTRY + "[expect.when]\nfeatures = 3", "when, features: expected `array`, got `int`"),
        ("expect = [3]", "entry 1: expected `object`, got `int`"),
        ("x = " + "[" * 4000, "nested more than"),
        ("x = " + "9" * 5000, "not readable as TOML"),
        (ENTRY + ENTRY, "appears twice: remove one"),
    ],
)
def test_a_broken_entry_is_one_sentence(tmp_path, text, expected):
    path = tmp_path / "known.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(expected)) as raised:
        load_expectations([path])
    assert "\n" not in str(raised.value)


def test_the_projects_own_entries_are_sound():
    assert all(entry.reason and entry.link and entry.clauses for entry in load_expectations())


@pytest.mark.found_outside
def test_a_pipe_in_a_folder_is_refused_and_one_that_is_named_is_read(tmp_path):
    pipe = tmp_path / "known.toml"
    os.mkfifo(pipe)
    with pytest.raises(
        ValueError, match=r"known\.toml: not a readable file of expectations: it is no regular"
    ):
        load_expectations([tmp_path])
    writer = Thread(target=pipe.write_text, args=(ENTRY,))
    writer.start()
    assert load_expectations([pipe])[-1].subject == "toys.right"
    writer.join()
