"""Baselines: records of whole runs that passed, kept as FOLDER/DEVICE/PROFILE/SUBJECT.jsonl.

    python3 -m attest.reports.baselines make triton.cuda pallas.mosaic_gpu
    python3 -m attest.reports.baselines keep RECORD...

`make` judges subjects on the machine at hand, then keeps their records. It needs neither an installed project
nor a network. Set ATTEST_COMMIT to the commit where the files were copied without their history. `keep` files
records that `attest check --json` wrote, of any schema. Both write to reports/data/baselines of the checkout.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from attest.conformance.files import FileError, write_text
from attest.conformance.record import RunRecord
from attest.conformance.records.baseline_file import baseline_text
from attest.conformance.records.record_file import read_record

FOLDER = Path("reports", "data", "baselines")  # of the checkout that the command is started in
ENDING = ".jsonl"
PROFILES = ("standard", "production")

Folder = Annotated[Path, typer.Option(help="Where baselines are kept.")]

app = typer.Typer(add_completion=False, rich_markup_mode=None, help=(__doc__ or "").partition("\n")[0])


@app.command()
def make(
    subjects: Annotated[list[str], typer.Argument(help="Names from `attest list`.")],
    profile: Annotated[list[str] | None, typer.Option(help="Profiles; standard and production.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that run kernels.")] = None,
    folder: Folder = FOLDER,
) -> None:
    """Judge subjects on this machine, each in each profile, and keep the records of runs that passed."""
    if fault := commit_fault(_commit_here()):
        raise SystemExit(f"no baseline can be made here: {fault}")
    failed: list[str] = []
    for subject in subjects:
        for name in profile or PROFILES:
            with tempfile.TemporaryDirectory() as scratch:
                record = Path(scratch) / "record.json"
                done = subprocess.run(check_command(subject, name, workers, record), check=False)
                if done.returncode == 0:
                    _keep([record], folder)
                else:
                    failed.append(f"{subject} in the profile {name}, exit status {done.returncode}")
    if failed:
        raise SystemExit(f"not kept: {'; '.join(failed)}")


@app.command()
def keep(
    records: Annotated[list[Path], typer.Argument(help="Files that attest check --json wrote.")],
    folder: Folder = FOLDER,
) -> None:
    """Keep records as baselines."""
    _keep(records, folder)


def check_command(subject: str, profile: str, workers: int | None, record: Path) -> list[str]:
    """Return the command that judges a subject in a profile and writes its record."""
    options = [] if workers is None else ["--workers", str(workers)]
    command = [sys.executable, "-m", "attest", "check", subject, "--profile", profile, *options]
    return [*command, "--json", str(record)]


def place(record: RunRecord) -> Path:
    """Return where a record is kept, below the folder: DEVICE/PROFILE/SUBJECT.jsonl.

    Raises ValueError, in one clause, for a record that is no whole run of one subject that passed, of a known
    commit.
    """
    subjects = {result.subject for result in record.results}
    device = record.environment.get("device")
    fault = commit_fault(record.environment.get("commit"))
    faults = (
        (record.status != "pass", "the run did not pass"),
        (bool(record.narrowed), f"the run was narrowed by {record.narrowed}"),
        (record.shard != (1, 1), "the run is one shard of several"),
        (len(subjects) != 1, f"the run is of {len(subjects)} subjects, expected 1"),
        (not isinstance(device, str) or not device, "its environment names no device"),
        (bool(fault), fault),
    )
    for wrong, what in faults:
        if wrong:
            raise ValueError(what)
    (subject,) = subjects
    return Path("-".join(str(device).lower().split())) / record.profile / f"{subject}{ENDING}"


def commit_fault(commit: object) -> str:
    """Return why a run of a commit cannot be a baseline, in one clause; "" if it can."""
    if not isinstance(commit, str) or not commit:
        return "the commit is unknown: set ATTEST_COMMIT where there is no checkout"
    return "the code has changes that are not committed" if commit.endswith("+dirty") else ""


def _commit_here() -> str:
    """Return the commit that a run here would name; asked in a process of its own, which frees the device."""
    code = "from attest.conformance.running.environment import environment; print(environment()['commit'])"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def _keep(records: Sequence[Path], folder: Path) -> None:
    """Write each record as a baseline; end with one sentence at the first that cannot be kept."""
    for path in records:
        try:
            record = read_record(path)
        except ValueError as error:
            raise SystemExit(str(error)) from error
        try:
            kept = folder / place(record)
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_text(kept, baseline_text(record))
        except ValueError as error:
            raise SystemExit(f"{path}: not kept as a baseline: {error}") from error
        except (FileError, OSError) as error:
            raise SystemExit(str(error)) from error
        print(kept)


if __name__ == "__main__":
    app()
