"""The files and commands by which a step of a GitHub workflow talks to its runner."""

import json
import os
import secrets
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# GitHub drops a job summary that is larger than 1 MiB; those of several steps add up.
SUMMARY_BYTES = 500_000
# An annotation shows its first lines; GitHub cuts what is longer than 64 KiB.
_MESSAGE_CHARACTERS = 4_000


class StepError(Exception):
    """A step cannot do its work; the message is one sentence."""


def set_outputs(outputs: Mapping[str, str]) -> None:
    """Set outputs of the step. Raises StepError for a value of several lines."""
    for name, value in outputs.items():
        if "\n" in value or "\r" in value:
            raise StepError(f"output {name}: got {value!r}, expected one line")
    _append("GITHUB_OUTPUT", "".join(f"{name}={value}\n" for name, value in outputs.items()))


def add_summary(markdown: str) -> None:
    """Add Markdown to the summary of the job."""
    _append("GITHUB_STEP_SUMMARY", markdown.encode()[:SUMMARY_BYTES].decode(errors="ignore") + "\n")


def annotate(level: str, message: str, title: str, file: str = "", line: int = 0) -> None:
    """Print the command that annotates a file, or the run if there is no file. level: error or warning."""
    values = {"title": title, "file": file, "line": str(line) if file else ""}
    properties = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in values.items() if value)
    short = message if len(message) <= _MESSAGE_CHARACTERS else f"{message[:_MESSAGE_CHARACTERS]}\n..."
    print(f"::{level} {properties}::{_escaped(short)}", flush=True)


@contextmanager
def no_commands() -> Generator[None]:
    """Keep the runner from obeying what is printed within the block: kernels print what they like."""
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}", flush=True)
    try:
        yield
    finally:
        print(f"::{token}::", flush=True)


def event() -> dict[str, Any]:
    """Return what started the workflow; empty outside of one."""
    path = os.environ.get("GITHUB_EVENT_PATH", "")
    if not path or not Path(path).is_file():
        return {}
    found = json.loads(Path(path).read_text())
    return found if isinstance(found, dict) else {}


def _append(variable: str, text: str) -> None:
    """Append to a file of the runner's; print where there is none, so that a step can be tried by hand."""
    path = os.environ.get(variable, "")
    if not path:
        sys.stdout.write(text)
        return
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def _escaped(text: str, also: str = "") -> str:
    return "".join(f"%{ord(c):02X}" if c in f"%\r\n{also}" else c for c in text)
