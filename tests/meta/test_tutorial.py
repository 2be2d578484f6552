"""The tutorial runs as it is written, on fewer cases: its kernel fails, and passes once it is fixed."""

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.meta.fences import snippets
from tests.meta.processes import ROOT, python

PAGE = ROOT / "docs" / "tutorial" / "first-kernel.md"
KERNEL, FIX, TEST = (snippet.text for snippet in snippets(PAGE, "python"))
COMMANDS = [
    snippet.text.removeprefix("attest ").strip() for snippet in snippets(PAGE, "bash") if snippet.runs
]


def attest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "attest", *arguments, JAX_PLATFORMS="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "my_kernel.py").write_text(KERNEL)
    return folder


def test_the_bug_is_found_replayed_and_fixed(folder: Path) -> None:
    found, again = COMMANDS
    red = attest(folder, *found.split(), "--examples", "10", "-n", "0")
    assert red.returncode == 1, red.stderr
    assert "FAIL my_kernel:subject: forward (the simplest failing case that was found)" in red.stdout
    assert "S6: causal" in red.stdout
    line = next(line for line in red.stdout.splitlines() if "replay: attest" in line)
    one = shlex.split(line.partition("replay: attest ")[2])
    assert attest(folder, *one).returncode == 1

    line = next(line for line in KERNEL.splitlines(keepends=True) if "visible = " in line)
    (folder / "my_kernel.py").write_text(KERNEL.replace(line, FIX))
    assert attest(folder, *one).returncode == 0
    green = attest(folder, *again.split(), "--examples", "10", "-n", "0")
    assert green.returncode == 0, green.stdout
    assert "PASS: " in green.stdout


def test_the_test_of_the_last_step_runs_what_was_judged() -> None:
    assert "run_conformance_test(subject)" in TEST
    assert compile(TEST, "test_my_kernel.py", "exec")
