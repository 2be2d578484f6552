"""The JSON Schemas: those of docs/ are current, they accept what attest reads and refuse what it refuses."""

import json
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from attest.conformance import json_schemas
from attest.conformance.cases.case import Case, case_from_json
from attest.conformance.drawing.corpus import load_corpus
from attest.conformance.record import Element, Measurement, Result, RunRecord, Verdict
from attest.conformance.records.baseline_file import baseline_text
from attest.conformance.records.line_format import all_lines
from attest.conformance.records.record_file import record_text
from attest.conformance.running.choice import first_try
from attest.conformance.running.expectations import FOLDER, load_expectations
from attest.conformance.running.plan import load_profile, tasks
from attest.conformance.subject import find
from tests.meta.processes import ROOT

SCHEMAS = json_schemas.schemas()
PLACE = ROOT / "docs" / "reference" / "schemas"


def wrong(name: str, data: Any) -> list[str]:
    return [fault.message for fault in Draft202012Validator(SCHEMAS[name]).iter_errors(data)]


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schemas_of_the_pages_are_valid_and_current(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[name])
    current = json_schemas.schema_text(SCHEMAS[name])
    advice = "run python -m attest.conformance.json_schemas docs/reference/schemas"
    assert (PLACE / f"{name}.json").read_text() == current, advice


def test_the_pages_have_no_other_schemas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json_schemas.main([str(tmp_path)]) == 0
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text() for path in PLACE.iterdir()}
    assert json_schemas.main([]) == 2
    assert "usage: " in capsys.readouterr().err


def test_every_drawn_and_known_case_is_valid() -> None:
    subject = find("xla.flash_attention")
    planned = [draw for task in tasks(subject, load_profile("standard"), 0) for draw, _ in task.draws]
    cases = [*filter(None, map(first_try, planned)), *(entry.case for entry in load_corpus())]
    assert len(cases) > 500
    for case in cases:
        assert not wrong("case", case.to_json())
    drawn = {name for case in cases for name in case.to_json()}
    assert {field.name for field in fields(Case)} - drawn <= {"dropout_seed", "empty_rows", "bias_hides"}


CASES: list[dict[str, Any]] = [
    {"q_length": 3},
    {"dtype": "float64"},
    {"dtype": None},
    {"batch": 0},
    {"batch": 1 << 13},
    {"q_len": -1},
    {"q_len": 1.5},
    {"q_len": True},
    {"q_heads": 0},
    {"head_dim": 0},
    {"value_dim": 0},
    {"family": "usual"},
    {"causal": 1},
    {"window": [1]},
    {"window": [-1, None]},
    {"window": [0.5, None]},
    {"mask": "bhqk"},
    {"mask": "bh", "mask_pattern": "some"},
    {"bias": "hb"},
    {"bias": "bhq", "bias_pattern": "small"},
    {"segments": 0},
    {"segments": 2, "segment_pattern": "any"},
    {"q_len": 3, "kv_len": 3, "lengths": [[1, 1, 1]]},
    {"q_len": 3, "kv_len": 3, "lengths": [[-1, 1]]},
    {"sinks": -1},
    {"sinks": 1, "sink_pattern": "twos"},
    {"soft_cap": 0},
    {"soft_cap": "3"},
    {"dropout": 1},
    {"dropout": 0.5, "dropout_seed": -1},
    {"dropout": 0.5, "dropout_shared": "q"},
    {"scale": 1e39},
    {"tiling": -2},
    {"seed": 1 << 64},
    {"q_offset": 1 << 40},
    {"q_offset": [0.5]},
    {"positions": "random"},
    {"origin": [0, 0, 0]},
    {"origin": [0, 0, 0, -1]},
    {"chunk_size": 0},
    {"ranges": "all"},
    {"alibi": "rows"},
]


@pytest.mark.parametrize("data", CASES, ids=json.dumps)
def test_a_wrong_case_is_refused_by_the_schema_and_by_attest(data: dict[str, Any]) -> None:
    assert wrong("case", data)
    with pytest.raises(ValueError, match="case field"):
        case_from_json(data)


def test_every_field_of_a_case_has_a_wrong_value_above() -> None:
    switches = {"integer_mask", "empty_rows", "bias_hides", "sinks_per_head", "normalized", "poison"}
    named = {name for data in CASES for name in data}
    assert {field.name for field in fields(Case)} - named <= {*switches, "kv_heads"}


WORST = Element((0, 1), float("nan"), 1.0, "0x7fc00000", "0x3f800000")
MEASURED = Measurement("out", 4, float("inf"), 1.0, 2.0, -0.5, ("bound", "semantics"), WORST)
RECORD = RunRecord(
    "quick",
    3,
    tuple(
        Result(
            "a.b",
            f"check{number}",
            ("S6",),
            Case(causal=True),
            verdict,
            (MEASURED,),
            "said",
            True,
            "1",
            "running",
        )
        for number, verdict in enumerate(Verdict)
    ),
    shard=(1, 2),
    environment={"jax": "0.11.2", "skipped": {}},
    left_out=("a.b: does not return lse: lse",),
    seconds=1.5,
)


def test_a_written_record_is_valid() -> None:
    assert not wrong("record", json.loads(record_text(RECORD)))
    assert not wrong("record", json.loads(record_text(RunRecord("quick", 0))))


@pytest.mark.parametrize("record", [RECORD, RunRecord("quick", 0)])
def test_written_lines_are_valid(record: RunRecord) -> None:
    for line in (*all_lines(record), *baseline_text(record).splitlines()):
        assert not wrong("lines", json.loads(line))


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (0, {"schema": "attest.lines/2"}),
        (0, {"results": -1}),
        (0, {"status": "pass"}),
        (1, {"verdict": "OK"}),
        (1, {"phase": "waiting"}),
        (1, {"case": {"causal": 3}}),
        (1, {"results": 1}),
    ],
)
def test_a_wrong_line_is_not_valid(number: int, change: dict[str, Any]) -> None:
    assert wrong("lines", {**json.loads([*all_lines(RECORD)][number]), **change})


def changed(*path: Any, to: Any) -> dict[str, Any]:
    """The record with another value at a place."""
    found = json.loads(record_text(replace(RECORD)))
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return found


@pytest.mark.parametrize(
    "data",
    [
        changed("schema", to="attest.run/3"),
        changed("status", to="green"),
        changed("shard", to=[1]),
        changed("more", to=1),
        changed("counts", "GREEN", to=1),
        changed("results", 0, "verdict", to="OK"),
        changed("results", 0, "phase", to="waiting"),
        changed("results", 0, "case", "causal", to=3),
        changed("results", 0, "measurements", 0, "worst_ratio", to="large"),
        changed("results", 0, "measurements", 0, "worst", "index", to=[-1]),
    ],
)
def test_a_wrong_record_is_not_valid(data: dict[str, Any]) -> None:
    assert len(wrong("record", data)) == 1


def test_the_expectations_of_the_project_are_valid() -> None:
    files = sorted(FOLDER.glob("*.toml"))
    assert files
    for file in files:
        assert not wrong("expectations", tomllib.loads(file.read_text()))


ENTRY = 'subject = "a"\ncheck = "forward"\nreason = "r"\nlink = "https://example.org"\n'
EXPECTATIONS = {
    "another key": ("others = 1\n", ""),
    "no reason": ("", ENTRY.replace('reason = "r"\n', "")),
    "an empty reason": ("", ENTRY.replace('"r"', '""')),
    "no such check": ("", ENTRY.replace("forward", "fore")),
    "no link": ("", ENTRY.replace("https://example.org", "mail")),
    "no such profile": ("", f'{ENTRY}profiles = ["slow"]'),
    "no such backend": ("", f'{ENTRY}backends = ["npu"]'),
    "shows never": ("", f'{ENTRY}shows = "never"'),
    "no such field": ("", f"{ENTRY}when = {{ length = 3 }}"),
    "no such feature": ("", f'{ENTRY}when = {{ features = ["lookahead"] }}'),
    "a feature, not a list": ("", f'{ENTRY}when = {{ without = "causal" }}'),
    "an empty range": ("", f"{ENTRY}when = {{ q_len = {{}} }}"),
    "a range of words": ("", f'{ENTRY}when = {{ q_len = {{ min = "1" }} }}'),
}


@pytest.mark.parametrize("fault", EXPECTATIONS)
def test_wrong_expectations_are_refused_by_the_schema_and_by_attest(fault: str, tmp_path: Path) -> None:
    before, entry = EXPECTATIONS[fault]
    file = tmp_path / "expected.toml"
    file.write_text(f"{before}[[expect]]\n{entry or ENTRY}")
    assert len(wrong("expectations", tomllib.loads(file.read_text()))) == 1
    with pytest.raises(ValueError, match=r"expected\.toml"):
        load_expectations([file])


def test_conditions_are_values_lists_and_ranges(tmp_path: Path) -> None:
    when = (
        'dtype = ["bfloat16", "float16"], window = [3, 0], lengths = [[1, 2]], q_len = { min = 1, max = 2.5 }'
    )
    file = tmp_path / "expected.toml"
    file.write_text(f"[[expect]]\n{ENTRY}when = {{ {when}, q_offset = [[1, 2], 3], features = [] }}")
    assert not wrong("expectations", tomllib.loads(file.read_text()))
    assert load_expectations([file])
