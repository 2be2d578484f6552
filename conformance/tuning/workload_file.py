"""Files of workloads, for `attest tune --workloads`: TOML with a list of calls by name."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from attest.conformance.files import read_bytes
from attest.conformance.sizes import sizes
from attest.conformance.text import sentence
from attest.conformance.tuning.workload import Workload
from attest.conformance.typed import convert, decode_toml

# The lists that a file may have: its own, and that of benchmarks/gpu_targets/models.toml.
_LISTS = ("workloads", "models")
_KNOWN = tuple(x.name for x in fields(Workload))
# Numbers that are at least 1 where they are given.
_COUNTS = (
    *("batch", "length", "heads", "head_dim", "key_length", "key_heads", "value_dim"),
    *("window", "segment", "chunk"),
)


def read_workloads(path: Path) -> dict[str, Workload]:
    """Return the workloads of a file by name; one without a name has its shape as the name.

    An entry has the fields of `Workload`, or has them in a table `workload`.

    Raises: ValueError that begins with the path.
    """
    data = decode_toml(read_bytes(path, sizes().expectations_bytes, "file of workloads"), str(path))
    found: dict[str, Workload] = {}
    for list_name in _LISTS:
        entries = data.get(list_name, [])
        for number, entry in enumerate(entries if isinstance(entries, list) else [entries]):
            name, workload = _workload(f"{path}, {list_name}[{number}]", entry)
            if name in found:
                raise ValueError(sentence(f"{path}: two workloads have the name {name!r}: rename one"))
            found[name] = workload
    if not found:
        raise ValueError(f"{path}: has no workloads; expected a list [[workloads]] of tables")
    return found


def _workload(place: str, entry: object) -> tuple[str, Workload]:
    given = dict(convert(entry, dict[str, Any], place))
    name = given.pop("name", None)
    if "workload" in given:
        given = convert(given["workload"], dict[str, Any], f"{place}, workload")
    for field in given:
        if field not in _KNOWN:
            raise ValueError(
                sentence(f"{place}: got the field {field!r}, expected fields among {', '.join(_KNOWN)}")
            )
    _check_counts(place, given)
    workload = convert(given, Workload, place)
    shape = ", ".join((workload.shape, *(x for x in workload.switched_on if x not in _COUNTS)))
    return shape if name is None else convert(name, str, f"{place}, name"), workload


def _check_counts(place: str, given: Mapping[str, Any]) -> None:
    for name in _COUNTS:
        value = given.get(name)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{place}, {name}: got {value}, expected at least 1")
