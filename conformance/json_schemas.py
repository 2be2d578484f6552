"""JSON Schemas of the files of attest: `python -m attest.conformance.json_schemas FOLDER` writes them.

They are made of the types by which attest reads and writes these files, and of the lists and limits of
Cases. A schema cannot say that `q_heads` is a multiple of `kv_heads`: such rules are checked when attest
reads a file.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from attest.conformance.cases import axes, case, families
from attest.conformance.cases.case import Case
from attest.conformance.cases.features import ALL_FEATURES, DTYPES
from attest.conformance.checks import all_checks
from attest.conformance.files import write_text
from attest.conformance.process.phases import PHASES
from attest.conformance.record import Verdict
from attest.conformance.records.line_format import LinesHeader
from attest.conformance.records.schema import RECORD, RecordData, ResultData
from attest.conformance.running.expectations import Entry
from attest.conformance.running.plan import profile_names
from attest.conformance.subject import BACKENDS
from attest.reference.dropout import SHARED
from attest.reference.problem import POSITIONS
from attest.reports.render.matrix_json import MatrixData

Schema = dict[str, Any]

_DRAFT = "https://json-schema.org/draft/2020-12/schema"

# The words that a field of a Case may have, and the bounds of its numbers.
_WORDS: Mapping[str, Sequence[str | None]] = {
    "dtype": DTYPES,
    "family": sorted(families.FAMILIES),
    "mask": axes.MASKS,
    "bias": axes.BIASES,
    "mask_pattern": case.MASK_PATTERNS,
    "bias_pattern": case.BIAS_PATTERNS,
    "segment_pattern": case.SEGMENT_PATTERNS,
    "sink_pattern": case.SINK_PATTERNS,
    "positions": case.POSITION_PATTERNS,
    "ranges": case.RANGE_PATTERNS,
    "alibi": case.ALIBI_PATTERNS,
    "dropout_shared": [word for word in SHARED if word is not None],
}
_VERDICTS = tuple(verdict.value for verdict in Verdict)
_SEEDS = {"minimum": 0, "maximum": 2**64 - 1}
_BOUNDS: Mapping[str, Mapping[str, float]] = {
    **{name: {"minimum": 1, "maximum": most} for name, most in case.LIMITS.items()},
    "q_len": {"minimum": 0, "maximum": case.LIMITS["q_len"]},
    "kv_len": {"minimum": 0, "maximum": case.LIMITS["kv_len"]},
    "sinks": {"minimum": 0, "maximum": case.LIMITS["sinks"]},
    "tiling": {"minimum": -1, "maximum": case.LIMITS["tiling"]},
    "seed": _SEEDS,
    "dropout_seed": _SEEDS,
    "dropout": {"minimum": 0, "exclusiveMaximum": 1},
    "soft_cap": {"exclusiveMinimum": 0, "maximum": case.LARGEST_FLOAT},
    "scale": {"minimum": -case.LARGEST_FLOAT, "maximum": case.LARGEST_FLOAT},
    "window": {"minimum": 0, "maximum": case.WIDEST_SIDE},
    "lengths": {"minimum": 0},
    "q_offset": {"minimum": POSITIONS[0], "maximum": POSITIONS[-1]},
    "origin": {"minimum": 0, "maximum": case.ORIGINS},
    "chunk_size": {"minimum": 1, "maximum": case.WIDEST_SIDE},
}


def schemas() -> dict[str, Schema]:
    """Return the schemas by the name of their file."""
    return {
        "case": _document("A Case of attest", "docs/reference/case.md", _case()),
        "record": _document("A record of attest", "docs/how-to/ci.md", *_record()),
        "lines": _document("A line of a record or baseline of attest", "docs/how-to/ci.md", *_lines()),
        "expectations": _document(
            "Expected failures of attest", "docs/how-to/expectations.md", *_expectations()
        ),
        "matrix": _document("The conformance matrix of attest", "docs/reference/matrix.md", *_matrix()),
    }


def schema_text(schema: Schema) -> str:
    """Return the text of a schema's file."""
    return json.dumps(schema, indent=1) + "\n"


def _document(title: str, page: str, schema: Schema, parts: Mapping[str, Schema] | None = None) -> Schema:
    head = {"$schema": _DRAFT, "title": title, "description": f"{page} explains the fields."}
    return {**head, **schema, **({"$defs": dict(parts)} if parts else {})}


def _case() -> Schema:
    found = _of_type(Case)["Case"]
    for name, schema in found["properties"].items():
        for choice in _choices(schema):
            if choice["type"] == "string":
                choice["enum"] = [*_WORDS[name]]
            if choice["type"] in ("integer", "number", "array"):
                _bound(choice, _BOUNDS[name])
    return {**found, "additionalProperties": False}


def _choices(schema: Schema) -> list[Schema]:
    return schema.get("anyOf", [schema])


def _bound(schema: Schema, bounds: Mapping[str, float]) -> None:
    """Give bounds to the numbers of a schema, in lists as well."""
    if schema["type"] != "array":
        schema |= {} if schema["type"] == "null" else bounds
        return
    for inner in (*schema.get("prefixItems", ()), schema.get("items") or {"type": "null"}):
        for choice in _choices(inner):
            _bound(choice, bounds)


def _record() -> tuple[Schema, dict[str, Schema]]:
    parts = _with_results(_of_type(RecordData))
    record = parts.pop("RecordData")
    record["properties"]["schema"] = {"const": RECORD}
    record["properties"]["status"] = {"enum": ["pass", "fail"]}
    record["properties"]["counts"]["propertyNames"] = {"enum": [*_VERDICTS]}
    return record, parts


def _lines() -> tuple[Schema, dict[str, Schema]]:
    """Return the schema of one line: the header, or a result."""
    parts = _with_results({**_of_type(LinesHeader), **_of_type(ResultData)})
    return {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in ("LinesHeader", "ResultData")]}, parts


def _with_results(parts: dict[str, Schema]) -> dict[str, Schema]:
    """Add the words and the Cases of results to a schema."""
    result = parts["ResultData"]["properties"]
    result["case"] = {"$ref": "#/$defs/Case"}
    result["verdict"] = {"enum": [*_VERDICTS]}
    result["phase"] = {"enum": ["", *PHASES], "default": ""}
    return {**parts, "Case": _case()}


def _matrix() -> tuple[Schema, dict[str, Schema]]:
    parts = _of_type(MatrixData)
    return parts.pop("MatrixData"), parts


def _expectations() -> tuple[Schema, dict[str, Schema]]:
    parts = _of_type(Entry)
    entry = parts["Entry"]["properties"]
    entry["check"] = {"enum": sorted(all_checks())}
    entry["link"]["pattern"] = "^(https?://|docs/)"
    entry["profiles"]["items"] = {"enum": [*profile_names()]}
    entry["backends"]["items"] = {"enum": [*BACKENDS]}
    entry["when"] = {
        "type": "object",
        "properties": _conditions(),
        "additionalProperties": False,
        "default": {},
    }
    limit = {"type": "object", "properties": {"min": {"type": "number"}, "max": {"type": "number"}}}
    parts["Range"] = {**limit, "minProperties": 1, "additionalProperties": False}
    listed = {"type": "array", "items": {"$ref": "#/$defs/Entry"}}
    return {"type": "object", "properties": {"expect": listed}, "additionalProperties": False}, parts


def _conditions() -> dict[str, Schema]:
    """Return the schema of each condition: a value of the field, a list of values or their range."""
    features = {"type": "array", "items": {"enum": [*ALL_FEATURES]}}
    found: dict[str, Schema] = {"features": features, "without": features}
    properties = _case()["properties"]
    for name in (field.name for field in fields(Case)):
        # TOML has no null, and a default is no condition.
        value = {"anyOf": [choice for choice in _choices(properties[name]) if choice["type"] != "null"]}
        value["anyOf"] = [{k: x for k, x in choice.items() if k != "default"} for choice in value["anyOf"]]
        found[name] = {
            "anyOf": [*value["anyOf"], {"type": "array", "items": value}, {"$ref": "#/$defs/Range"}]
        }
    return found


def _of_type(kind: Any) -> dict[str, Schema]:
    """Return the schema of a type and those that it refers to, by name, without the docstrings."""
    parts: dict[str, Schema] = msgspec.json.schema(kind)["$defs"]
    return {
        name: {key: x for key, x in schema.items() if key not in ("description", "title")}
        for name, schema in parts.items()
    }


def main(arguments: Sequence[str]) -> int:
    """Write the schemas into a folder; return the exit status."""
    if len(arguments) != 1:
        print("usage: python -m attest.conformance.json_schemas FOLDER", file=sys.stderr)
        return 2
    for name, schema in schemas().items():
        write_text(Path(arguments[0]) / f"{name}.json", schema_text(schema))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
