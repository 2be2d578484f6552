"""The tables that cases are drawn from. For an ablation, what was made for some defects is left out."""

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

# The choices of a row whose values are classes of sizes.
_CLASSES = ("lengths", "batches", "heads", "head_dims")
_LEFT_OUT = set[str]()  # defects


def drawing() -> dict[str, Any]:
    """Return the tables of conformance/drawing/drawing.toml, without what is left out.

    edges: by number, so that the others keep theirs.
    """
    return _without(frozenset(_LEFT_OUT))


def leave_out(defects: Iterable[str]) -> None:
    """Leave out of all plans what was made for some of these defects.

    For a process of its own, before anything is drawn there: rows and cases are kept.
    """
    _LEFT_OUT.update(defects)


def is_left_out(because: Iterable[str]) -> bool:
    """Return whether what was made for these defects is left out."""
    return not _LEFT_OUT.isdisjoint(because)


@cache
def _without(defects: frozenset[str]) -> dict[str, Any]:
    tables = tomllib.loads(Path(__file__).with_name("drawing.toml").read_text(encoding="utf-8"))
    gone = {name for name, because in tables.pop("because").items() if defects & set(because)}
    for choice in _CLASSES:
        tables[choice] = {name: table for name, table in tables[choice].items() if name not in gone}
    tables["edges"] = {
        number: _listed(table)
        for number, table in enumerate(tables["edges"])
        if defects.isdisjoint(table.get("because", ()))
    }
    tables["together"] = [
        table["facts"]
        for table in tables["together"]
        if defects.isdisjoint(table.get("because", ())) and gone.isdisjoint(table["facts"])
    ]
    return tables


def _listed(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a listed case. TOML has no null: a side of a window that has no end is "open"."""
    fields = {name: value for name, value in table.items() if name != "because"}
    if "window" in fields:
        fields["window"] = [None if side == "open" else side for side in fields["window"]]
    return fields
