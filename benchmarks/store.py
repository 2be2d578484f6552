"""Measures how large records of many results are, and what it takes to merge and compare them.

    python -m benchmarks.store --results 1000000 --json FILE

The records are made from a baseline: `benchmarks/many_results.py`. Each command is a process of its own,
whose time includes its start; memory is the largest resident set.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from attest.conformance.records.record_file import write_lines
from attest.conformance.running.environment import environment
from benchmarks.many_results import Many


def main(
    results: Annotated[list[int], typer.Option(min=1, help="Results of each record; repeatable.")],
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Measure, print the table, and write the file."""
    rows: list[dict[str, Any]] = []
    for count in results:
        rows += _measured(count)
    if json_path is not None:
        json_path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


def _measured(count: int) -> list[dict[str, Any]]:
    """Return what each command takes on records of so many results."""
    with tempfile.TemporaryDirectory() as folder:
        base, head = (Path(folder) / f"{name}.jsonl.gz" for name in ("base", "head"))
        write_lines(Many(count, seed=0, failing=False).lines(), base)
        write_lines(Many(count, seed=1, failing=True).lines(), head)
        size = base.stat().st_size
        print(f"{count} results: {size / 1e6:.1f} MB, {size / count:.0f} bytes a result", flush=True)
        return [
            {"results": count, "bytes": size, **_run(command, folder)}
            for command in (
                ("compare", str(base), str(head), "--json", f"{folder}/comparison.json"),
                ("report", str(base), "--markdown", f"{folder}/report.md"),
                ("merge", str(base), "--json", f"{folder}/merged.jsonl.gz"),
            )
        ]


def _run(command: tuple[str, ...], folder: str) -> dict[str, Any]:
    """Return the seconds and the largest memory of a command of `attest`."""
    began = time.monotonic()
    with Path(folder, "output").open("w") as output:
        process = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "attest", *command],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
            ],
        )
        _, status, used = os.wait4(process, 0)
    seconds = time.monotonic() - began
    last = Path(folder, "output").read_text(encoding="utf-8").splitlines()[-1:]
    print(
        f"  {command[0]}: {seconds:.1f} s, {used.ru_maxrss / 2**20:.2f} GiB, exit"
        f" {os.waitstatus_to_exitcode(status)}: {' '.join(last)[:100]}",
        flush=True,
    )
    return {"command": command[0], "seconds": round(seconds, 2), "gib": round(used.ru_maxrss / 2**20, 3)}


if __name__ == "__main__":
    typer.run(main)
