"""Parts of SQL that every module of the store writes."""

from pathlib import Path


def quoted(path: Path) -> str:
    """Return a path as a literal of SQL."""
    return "'" + str(path).replace("'", "''") + "'"
