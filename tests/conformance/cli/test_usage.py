"""What makes no sense is said in one sentence on stderr, with exit status 2, and never as a traceback."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

CASE = '{"subject": "tests.toys:right", "check": "forward", "case": {"q_len": 2}}'

WRONG = {
    "no such command": (("gaet",), "gaet"),
    "unknown option": (("gate", "--profil", "quick"), "--profil"),
    "unknown subject": (("check", "nobody"), "unknown subject 'nobody'"),
    "no such module": (("check", "nowhere.module:thing"), "nowhere.module:thing"),
    "no such attribute": (("check", "tests.toys:nothing_here"), "nothing_here"),
    "not a subject": (("check", "tests.toys:not_a_subject"), "int"),
    "no subject of a pattern": (("gate", "--subject", "xla.*", "--subject", "nobody.*"), "'nobody.*'"),
    "no subject of a pattern here": (("gate", "--subject", "triton.cuda"), "no subject can run"),
    "unknown profile": (("check", "tests.toys:right", "--profile", "slow"), "'slow'"),
    "a subject of another machine": (("check", "triton.cuda"), "triton.cuda cannot run here: runs on gpu"),
    "negative seed": (("check", "tests.toys:right", "--seed", "-1"), "--seed"),
    "negative workers": (("check", "tests.toys:right", "-n", "-1"), "-n"),
    "words for workers": (("check", "tests.toys:right", "-n", "two"), "-n"),
    "shard beyond the last": (("check", "tests.toys:right", "--shard", "3/2"), "--shard: got '3/2'"),
    "shard zero": (("gate", "--shard", "0/2"), "--shard: got '0/2'"),
    "shard of words": (("gate", "--shard", "first"), "--shard: got 'first'"),
    "shard of many digits": (("gate", "--shard", f"1/{'9' * 5000}"), "--shard: got '1/999"),
    "shard of other digits": (("gate", "--shard", "١/٢"), "--shard: got"),
    "too many workers": (("gate", "-n", "9" * 20), "1024"),
    "timeout zero": (("check", "tests.toys:right", "--timeout", "0"), "--timeout: got 0"),
    "budget zero": (("check", "tests.toys:right", "--budget", "0"), "--budget: got 0"),
    "timeout nan": (("check", "tests.toys:right", "--timeout", "nan"), "--timeout: got nan"),
    "no examples": (("check", "tests.toys:right", "--examples", "0"), "--examples"),
    "unknown feature": (("check", "tests.toys:right", "--feature", "magic"), "--feature: got 'magic'"),
    "undeclared feature": (
        ("check", "tests.toys:right", "--feature", "bias", "-n", "0"),
        "does not declare bias",
    ),
    "unknown dtype": (("check", "tests.toys:right", "--dtype", "int8"), "--dtype: got 'int8'"),
    "undeclared dtype": (("check", "tests.toys:right", "--dtype", "float16", "-n", "0"), "float16"),
    "unknown check": (("check", "tests.toys:right", "--check", "karma", "-n", "0"), "unknown check 'karma'"),
    "unwritable record": (("gate", "--json", "/nowhere/run.json"), "/nowhere does not exist"),
    "unwritable report": (("gate", "--html", "/nowhere/run.html"), "/nowhere does not exist"),
    "record is a folder": (("gate", "--json", "/"), "is a folder"),
    "no expectations": (("gate", "--expectations", "/nowhere.toml"), "/nowhere.toml"),
    "no baseline": (("gate", "--baseline", "/nowhere.json"), "/nowhere.json: not a readable record"),
    "no record to report": (("report", "/nowhere.json"), "/nowhere.json: not a readable record"),
    "no records to compare": (("compare", "/nowhere.json", "/nowhere.json"), "/nowhere.json"),
    "no records to merge": (("merge", "/nowhere.json"), "/nowhere.json"),
    "replay of nothing": (("replay", "/nowhere.json"), "/nowhere.json: not a readable case"),
    "replay of broken JSON": (("replay", "{broken"), "not valid JSON"),
    "replay without subject": (("replay", "{}"), "add --subject"),
    "replay of an unknown field": (("replay", '{"colour": 1}', "--subject", "tests.toys:right"), "'colour'"),
    "replay of a wrong type": (("replay", '{"q_len": "2"}', "--subject", "tests.toys:right"), "q_len"),
    "replay of a negative length": (("replay", '{"q_len": -2}', "--subject", "tests.toys:right"), "q_len"),
    "replay of a negative window": (
        ("replay", '{"window": [-1, 1]}', "--subject", "tests.toys:right"),
        "window",
    ),
    "replay of a huge seed": (("replay", '{"seed": 18446744073709551616}', "--subject", "a:b"), "seed"),
    "replay of a scale of NaN": (("replay", '{"scale": NaN}', "--subject", "a:b"), "not valid JSON"),
    "replay with more keys": (("replay", '{"case": {}, "mood": 1}'), "`mood`"),
    "replay of an unknown check": (("replay", CASE, "--check", "karma"), "unknown check 'karma'"),
    "replay of an unknown subject": (("replay", CASE, "--subject", "nobody"), "unknown subject 'nobody'"),
    "replay with a numeric subject": (
        ("replay", '{"case": {}, "subject": 3}'),
        "subject: expected `str | null`, got `int`",
    ),
}


@pytest.mark.parametrize("title", WRONG)
def test_one_sentence_and_status_2(attest, title):
    arguments, expected = WRONG[title]
    done = attest(*arguments)
    assert done.status == 2
    assert done.out == ""
    assert expected in done.err
    assert done.err.startswith("attest: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not valid JSON"),
        ("[1]", "expected `object`, got `array`"),
        ("\x00\xff", "not valid JSON"),
        ('{"case": {"q_len": 2, "dtype": "int8"}, "subject": "tests.toys:right"}', "dtype"),
        ('{"case": 4, "subject": "tests.toys:right"}', "case: expected `object`, got `int`"),
    ],
)
def test_broken_case_file(attest, tmp_path: Path, text, expected):
    path = tmp_path / "case.json"
    path.write_text(text)
    done = attest("replay", path)
    assert done.status == 2
    assert str(path) in done.err
    assert expected in done.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "schema: got none"),
        ("[]", "expected `object`, got `array`"),
        (json.dumps({"schema": "attest.run/1"}), "broken record: object missing required field"),
        (json.dumps({"schema": "attest.run/9"}), "schema: got 'attest.run/9', expected 'attest.run/2'"),
        (json.dumps({"schema": ["x"]}), "schema: got ['x']"),
        ("not JSON", "not valid JSON"),
    ],
)
def test_broken_record(attest, tmp_path: Path, text, expected):
    path = tmp_path / "run.json"
    path.write_text(text)
    for command in (("report", path), ("merge", path), ("compare", path, path)):
        done = attest(*command)
        assert done.status == 2
        assert expected in done.err


def test_nothing_is_run_or_written_for_a_usage_error(attest, tmp_path: Path):
    record = tmp_path / "run.json"
    done = attest("check", "tests.toys:right", "--feature", "bias", "-n", "0", "--json", record)
    assert done.status == 2
    assert not record.exists()


def test_help_tells_the_options(attest):
    assert attest("--help").status == 0
    done = attest("check", "--help")
    assert done.status == 0
    for option in ("--feature", "--dtype", "--examples", "--shard", "--timeout", "number of cores"):
        assert option in " ".join(done.out.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("check", "xla.flash_atention"), "did you mean xla.flash_attention"),
        (("check", "tests.toys:rigth"), "did you mean right"),
        (("check", "xla.flash_attention", "--check", "forwrd"), "did you mean forward?"),
        (("check", "xla.flash_attention", "--check", "zzz"), "known are batch_dims, configuration, "),
        (("check", "zzz"), "`attest list` has the names"),
    ],
)
def test_a_mistyped_name_gets_the_nearest(attest, arguments, said):
    done = attest(*arguments)
    assert done.status == 2
    assert said in done.err
    assert len(done.err) < 400


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_has_a_short_form(attest, option):
    assert attest("check", option).out.startswith("Usage: attest check")


def test_the_version_is_that_of_the_package(attest):
    assert attest("--version").out == f"attest {version('attest-attention')}\n"
