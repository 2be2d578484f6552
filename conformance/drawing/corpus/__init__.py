"""The corpus of known bugs that every run tries again: one JSON file each, with its report."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attest.conformance.cases.case import Case, case_from_json
from attest.conformance.drawing.tables import is_left_out
from attest.conformance.kinds import DRAWN


@dataclass(frozen=True)
class Entry:
    """A case, what went wrong there in whose kernel, and the clause that it broke.

    kind: of the checks that see it, by its table in conformance/running/profiles.toml. because: the defects
    of the catalogue of mutants that are alike.
    """

    name: str
    sources: tuple[str, ...]
    symptom: str
    clause: str
    case: Case
    kind: str
    because: tuple[str, ...] = ()


@cache
def load_corpus() -> tuple[Entry, ...]:
    """Return the entries that are not left out, by file name. Raises ValueError naming a broken file."""
    found = (_read(path) for path in sorted(Path(__file__).parent.glob("*.json")))
    return tuple(entry for entry in found if not is_left_out(entry.because))


def _read(path: Path) -> Entry:
    try:
        data = json.loads(path.read_text())
        case = case_from_json(data["case"])
        kind = data.get("kind", DRAWN.table)
        because = tuple(data.get("because", ()))
        return Entry(path.stem, tuple(data["sources"]), data["symptom"], data["clause"], case, kind, because)
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"corpus entry {path.name}: {type(error).__name__}: {error}") from error
