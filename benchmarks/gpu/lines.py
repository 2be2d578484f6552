"""The file of a benchmark: JSON lines, a header and one line for each measurement, written when it is made.

The header names the schema and the environment. A benchmark that is stopped leaves what it had measured;
begun again on the same device, versions and commit, it measures the rest.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A resumed benchmark has another date than the one before it.
_MAY_DIFFER = ("date",)


class LinesFile:
    """A file of JSON lines, to which lines are appended.

    header: has "schema" and "about", the environment with the commit. Raises ValueError in one sentence if
    the file exists and has another schema, or was measured elsewhere.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        if path.exists() and path.stat().st_size:
            _refuse_other(path, header)
            _drop_broken_line(path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self.add(header)

    def add(self, data: Mapping[str, Any]) -> None:
        """Append one line, and hand it to the disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_lines(path: Path, schema: str) -> tuple[dict[str, Any], list[Any]]:
    """Return the header and the lines, without a last line that was cut off. Raises ValueError."""
    first, *lines = path.read_text(encoding="utf-8").split("\n")[:-1] or [""]
    header = _header(first, schema, path)
    try:
        return header, [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path}: broken line: {error}") from error


def _header(line: str, schema: str, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}: its first line is no JSON, expected a header of {schema}") from error
    if not isinstance(header, dict) or header.get("schema") != schema:
        raise ValueError(f"{path}: its first line is no header of {schema}")
    return header


def _refuse_other(path: Path, header: Mapping[str, Any]) -> None:
    with path.open(encoding="utf-8") as file:
        before = _header(file.readline(), header["schema"], path)["about"]
    now = header["about"]
    for name in {**before, **now}:
        if name not in _MAY_DIFFER and before.get(name) != now.get(name):
            raise ValueError(
                f"{path}: measured with {name} {before.get(name)}, now it is {now.get(name)}: choose another "
                "--out, or move the file away"
            )
    if not now["commit"] or now["commit"].endswith("+dirty"):
        raise ValueError(
            f"{path}: measured with uncommitted code, which may have changed since: choose another --out, or "
            "move the file away"
        )


def _drop_broken_line(path: Path) -> None:
    """Cut off a last line without an end: it was being written when its benchmark was killed."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
