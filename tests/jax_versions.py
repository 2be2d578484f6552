"""The table of docs/reference/jax-versions.md: what the quick gate finds on each version of JAX.

    python -m tests.jax_versions RECORD...

replays the corpus entry that a version of JAX once broke, and compares its verdict and these records of the
installed version with its data in reports/data/jax_versions.json. That is stale if other verdicts are found,
or other cases judged: it and the table are then written anew. The exit status is 0 if nothing is red, 1 if
something is, and 3 if the data were stale. The nox session `versions` runs it.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from itertools import dropwhile
from pathlib import Path
from typing import Any

from attest.conformance.drawing.corpus import load_corpus
from attest.conformance.running.judge import judge
from attest.conformance.subject import find

ROOT = Path(__file__).parents[1]
DATA = ROOT / "reports" / "data" / "jax_versions.json"
PAGE = ROOT / "docs" / "reference" / "jax-versions.md"
SUBJECTS = ("xla.flash_attention", "xla.attention")
ENTRY = "27_dropout_mask_and_range_in_one_tile"
GREEN = ("PASS", "INCONCLUSIVE", "UNSUPPORTED")
STALE = 3
# What is compared with a record. The rest of it says where it comes from.
FINDINGS = ("counts", "corpus", "judged")
_COLUMNS = ("jax", *(f"`{name}`" for name in SUBJECTS), "corpus 27", "commit", "date", "made on")
_HEAD = f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}\n"


def summary(records: Sequence[Mapping[str, Any]], corpus: str, commit: str, date: str) -> dict[str, Any]:
    """Return what the data keep of the records of one version of JAX and the verdict of the corpus entry.

    judged: a hash of the checks and the cases of each subject. counts: its verdicts.
    """
    by_subject = {record["results"][0]["subject"]: record for record in records}
    (environment, *others) = [record["environment"] for record in records]
    if any(each["versions"] != environment["versions"] for each in others):
        raise ValueError("records: expected one version of each package in all of them")
    return {
        "commit": commit,
        "corpus": corpus,
        "counts": {
            name: {verdict: count for verdict, count in record["counts"].items() if count}
            for name, record in by_subject.items()
        },
        "date": date,
        "judged": {name: _judged(record["results"]) for name, record in by_subject.items()},
        "platform": environment["platform"],
        "processor": environment["processor"],
        "profile": {name: [record["profile"], record["seed"]] for name, record in by_subject.items()},
        "python": environment["python"],
        "versions": environment["versions"],
    }


def _judged(results: Sequence[Mapping[str, Any]]) -> str:
    # A failure is shown by the simplest case that still fails; what was drawn is in `shrunk_from`.
    lines = sorted(f"{each['shrunk_from'] or each['case_id']} {each['check']}" for each in results)
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


def red(entry: Mapping[str, Any]) -> bool:
    """Return whether a verdict of an entry of the data fails the gate, or a subject of it was not judged."""
    verdicts = {verdict for counts in entry["counts"].values() for verdict in counts}
    return not verdicts | {entry["corpus"]} <= {*GREEN} or set(entry["counts"]) != {*SUBJECTS}


def differences(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return what a record says and was not found, one line for each finding; none if it is not stale."""
    return [
        f"{name}: recorded {recorded.get(name, 'nothing')}, found {found[name]}"
        for name in FINDINGS
        if recorded.get(name) != found[name]
    ]


def table(data: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of the page, a row for each version, oldest first."""
    lines: list[str] = []
    for version, entry in sorted(data.items(), key=lambda item: [int(part) for part in item[0].split(".")]):
        shown = [
            ", ".join(
                f"{count} {verdict}" for verdict, count in sorted(entry["counts"].get(name, {}).items())
            )
            for name in SUBJECTS
        ]
        machine = (entry["processor"], entry["platform"], f"Python {entry['python']}")
        made_on = ", ".join(part for part in machine if part)
        source = (f"`{entry['commit'][:10]}`", entry["date"], made_on)
        cells = [version, *(cell or "not run" for cell in shown), entry["corpus"], *source]
        lines.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(lines)


def with_table(page: str, data: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with its table replaced. Raises ValueError if it has none."""
    before, head, rest = page.partition(_HEAD)
    if not head:
        raise ValueError(f"{PAGE.name} has no table that starts with {_HEAD!r}")
    after = dropwhile(lambda line: line.startswith("|"), rest.splitlines(keepends=True))
    return before + table(data) + "".join(after)


def update(found: Mapping[str, Any], data: Path, page: Path) -> int:
    """Compare what was found on a version with its record; if that is stale, write it and the page anew.

    Returns 0 if nothing is red, 1 if something is, 3 if the record was stale.
    """
    version = found["versions"]["jax"]
    recorded: dict[str, Any] = json.loads(data.read_text())
    stale = differences(recorded.get(version, {}), found)
    print(f"jax {version}: {'red' if red(found) else 'green'}")
    if not stale:
        print(f"jax {version}: as recorded at {recorded[version]['commit']}")
        return int(red(found))
    everything = {**recorded, version: found}
    data.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
    page.write_text(with_table(page.read_text(), everything))
    print(f"jax {version}: the record was stale. Commit {data.name} and {page.name}, which are written anew.")
    print(*stale, sep="\n")
    return STALE


def checked_out() -> str:
    """Return the commit that is checked out, "+dirty" if files beside the data and the page differ."""
    ours = [f":!{path.relative_to(ROOT)}" for path in (DATA, PAGE)]
    head = _git("rev-parse", "HEAD")
    return (
        f"{head}+dirty" if _git("status", "--porcelain", "--untracked-files=no", "--", ".", *ours) else head
    )


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main(paths: Sequence[str]) -> int:
    """Judge the corpus entry, and compare it and the records with what is recorded."""
    (entry,) = (entry for entry in load_corpus() if entry.name == ENTRY)
    (result,) = judge(find(SUBJECTS[0]), entry.case, ("gradients",))
    records = [json.loads(Path(path).read_text()) for path in paths]
    date = datetime.now(UTC).date().isoformat()
    return update(summary(records, result.verdict.name, checked_out(), date), DATA, PAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
