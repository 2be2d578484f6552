"""The corpus of known bugs that every run tries again: one JSON file each, with its report."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attest.conformance.cases.case import Case, case_from_json
from attest.conformance.kinds import DRAWN


@dataclass(frozen=True)
class Entry:
    """A case, what went wrong there in whose kernel, and the clause that it broke.

    kind: of the checks that see it, by its table in conformance/running/profiles.toml.
    """

    name: str
    sources: tuple[str, ...]
    symptom: str
    clause: str
    case: Case
    kind: str


@cache
def load_corpus() -> tuple[Entry, ...]:
    """Return every entry, by file name. Raises ValueError naming a file that is broken."""
    return tuple(_read(path) for path in sorted(Path(__file__).parent.glob("*.json")))


def _read(path: Path) -> Entry:
    try:
        data = json.loads(path.read_text())
        case = case_from_json(data["case"])
        kind = data.get("kind", DRAWN.table)
        return Entry(path.stem, tuple(data["sources"]), data["symptom"], data["clause"], case, kind)
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"corpus entry {path.name}: {type(error).__name__}: {error}") from error
