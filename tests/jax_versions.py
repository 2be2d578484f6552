"""The table of docs/reference/jax-versions.md: what the quick gate finds on each version of JAX.

    python -m tests.jax_versions RECORD...

adds the records of the installed version and a replay of the corpus entry that a version of JAX once broke to
docs/evidence/jax-versions.json, and writes the table again. The exit status is 0 if nothing is red. The nox
session `versions` runs it.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any

from attest.conformance.drawing.corpus import load_corpus
from attest.conformance.judging.judge import judge
from attest.conformance.subject import find

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "evidence" / "jax-versions.json"
PAGE = ROOT / "docs" / "reference" / "jax-versions.md"
SUBJECTS = ("xla.flash_attention", "xla.attention")
ENTRY = "27_dropout_mask_and_range_in_one_tile"
GREEN = ("PASS", "INCONCLUSIVE", "UNSUPPORTED")
_HEAD = f"| jax | {' | '.join(f'`{name}`' for name in SUBJECTS)} | corpus 27 | |\n|---|---|---|---|---|\n"


def row(records: Sequence[Mapping[str, Any]], corpus: str) -> tuple[str, dict[str, Any]]:
    """Return the version of JAX of records and its entry in the data: counts of each subject, the verdict."""
    (version,) = {record["environment"]["versions"]["jax"] for record in records}
    counts = {
        result["subject"]: {verdict: count for verdict, count in record["counts"].items() if count}
        for record in records
        for result in record["results"][:1]
    }
    return version, {"counts": counts, "corpus": corpus}


def red(entry: Mapping[str, Any]) -> bool:
    """Return whether a verdict of an entry of the data fails the gate, or a subject of it was not judged."""
    verdicts = {verdict for counts in entry["counts"].values() for verdict in counts}
    return not verdicts | {entry["corpus"]} <= {*GREEN} or set(entry["counts"]) != {*SUBJECTS}


def table(data: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of the page, a row for each version, oldest first."""
    lines = []
    for version, entry in sorted(data.items(), key=lambda item: [int(part) for part in item[0].split(".")]):
        shown = [
            ", ".join(
                f"{count} {verdict}" for verdict, count in sorted(entry["counts"].get(name, {}).items())
            )
            for name in SUBJECTS
        ]
        cells = [version, *(cell or "not run" for cell in shown), entry["corpus"], entry.get("note", "")]
        lines.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(lines)


def with_table(page: str, data: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with its table replaced. Raises ValueError if it has none."""
    before, head, rest = page.partition(_HEAD)
    if not head:
        raise ValueError(f"{PAGE.name} has no table that starts with {_HEAD!r}")
    after = dropwhile(lambda line: line.startswith("|"), rest.splitlines(keepends=True))
    return before + table(data) + "".join(after)


def main(paths: Sequence[str]) -> int:
    """Judge the corpus entry, add it and the records to the data, write the page; 1 if anything is red."""
    (entry,) = (entry for entry in load_corpus() if entry.name == ENTRY)
    (result,) = judge(find(SUBJECTS[0]), entry.case, ("gradients",))
    version, of_version = row([json.loads(Path(path).read_text()) for path in paths], result.verdict.name)
    data = {**json.loads(DATA.read_text()), version: of_version}
    DATA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), data))
    print(f"jax {version}: {'red' if red(of_version) else 'green'}")
    return int(red(of_version))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
