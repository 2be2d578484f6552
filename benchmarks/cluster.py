"""Measures how the speed of a run grows with the workers of a local cluster, beside a run without one.

    python -m benchmarks.cluster --workers 1 --workers 2 --json FILE

For each number of workers, `attest check --workers N` and `attest check --cluster local:N` judge the same
cases in turn. A rate is results a second, by the time in the record: without the start of the cluster.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from attest.conformance.running.environment import environment


def main(
    workers: Annotated[list[int], typer.Option(min=1, help="Numbers of workers; repeatable.")],
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    examples: Annotated[int, typer.Option(min=1, help="Cases of each run.")] = 48,
    subject: str = "xla.flash_attention",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rates here.")] = None,
) -> None:
    """Measure, print the table, and write the file."""
    rows = [measured(subject, examples, count, repeats) for count in workers]
    for row in rows:
        print(
            f"{row['workers']:>3} workers: {row['processes']:.2f} results/s as processes,"
            f" {row['cluster']:.2f} on a cluster, ratio {row['ratio']:.3f}"
        )
    if json_path is not None:
        found = {"subject": subject, "environment": environment(), "rows": rows}
        json_path.write_text(json.dumps(found, indent=1) + "\n")


def measured(subject: str, examples: int, workers: int, repeats: int) -> dict[str, Any]:
    """Return the rates of some workers as processes and on a cluster, medians of runs that alternate."""
    kinds = {"processes": ("--workers", str(workers)), "cluster": ("--cluster", f"local:{workers}")}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, options in kinds.items():
            rates[name].append(_rate(subject, examples, options))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    ratios = [ours / base for ours, base in zip(rates["cluster"], rates["processes"], strict=True)]
    return {"workers": workers, **medians, "ratio": statistics.median(ratios), "runs": rates}


def _rate(subject: str, examples: int, options: tuple[str, ...]) -> float:
    """Return the results a second of one run, by the time that its record gives."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        command = [sys.executable, "-m", "attest", "check", subject, "--examples", str(examples)]
        began = time.monotonic()
        done = subprocess.run(
            [*command, "--check", "forward", "--check", "gradients", *options, "--json", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(options)}: {done.stderr}")
        record = json.loads(path.read_text())
        whole = time.monotonic() - began
        print(f"{' '.join(options)}: {record['seconds']} s of {whole:.1f} s", file=sys.stderr)
        return len(record["results"]) / record["seconds"]


if __name__ == "__main__":
    typer.run(main)
