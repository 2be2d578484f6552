"""The tutorial runs as written: its kernel has two bugs and passes once both are fixed."""

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.meta.fences import snippets
from tests.meta.processes import ROOT, python

PAGE = ROOT / "docs" / "tutorial" / "first-kernel.md"
KERNEL, DIAGONAL, QUERY, OUT, TEST = (snippet.text for snippet in snippets(PAGE, "python"))
COMMANDS = [snippet for snippet in snippets(PAGE, "bash") if snippet.runs]
DIAGONAL_CARD, FAILURE = (snippet.text for snippet in snippets(PAGE, "text"))


def attest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "attest", *arguments, JAX_PLATFORMS="cpu")


def follow(folder: Path, number: int) -> str:
    """Run a command of the page; returns what it prints."""
    command = COMMANDS[number]
    arguments = shlex.split(command.text.removeprefix("attest "))
    done = attest(folder, *arguments)
    assert done.returncode == int(command.attributes.get("exit", "0")), done.stdout + done.stderr
    return done.stdout


def status_of_replay(folder: Path, printed: str) -> int:
    """The exit status of the line that replays the first failure."""
    line = next(line for line in printed.splitlines() if "replay: attest" in line)
    return attest(folder, *shlex.split(line.partition("replay: attest ")[2])).returncode


def line_with(text: str, start: str) -> str:
    """The first line of a kernel that begins so."""
    return next(line for line in text.splitlines(keepends=True) if line.strip().startswith(start))


def aligned(kernel: str) -> str:
    """The kernel with the diagonal of step 4."""
    return kernel.replace(line_with(kernel, "visible = jnp.arange"), DIAGONAL)


def with_query(kernel: str) -> str:
    """The kernel with the query of step 5."""
    line = line_with(kernel, "logits = ")
    return kernel.replace(line, QUERY + line)


def with_out(kernel: str) -> str:
    """The kernel with the out of step 5."""
    line = line_with(kernel, "return out")
    return kernel.replace(line, OUT + line)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_kernel.py").write_text(KERNEL)
    return tmp_path


def test_both_bugs_are_found_replayed_and_fixed(folder: Path) -> None:
    kernel = folder / "my_kernel.py"
    wrong_diagonal = follow(folder, 0)
    assert all(line in wrong_diagonal for line in DIAGONAL_CARD.split("  ...\n"))
    assert status_of_replay(folder, wrong_diagonal) == 1

    kernel.write_text(aligned(KERNEL))
    assert status_of_replay(folder, wrong_diagonal) == 0
    poisoned = follow(folder, 1)
    assert FAILURE in poisoned
    assert status_of_replay(folder, poisoned) == 1

    kernel.write_text(with_out(with_query(aligned(KERNEL))))
    assert status_of_replay(folder, poisoned) == 0
    assert "PASS: " in follow(folder, 2)

    kernel.write_text(with_out(with_query(KERNEL)))
    assert status_of_replay(folder, wrong_diagonal) == 1, "the first fix is not needed"
    kernel.write_text(with_query(aligned(KERNEL)))
    assert status_of_replay(folder, poisoned) == 1, "out need not be replaced"
    kernel.write_text(with_out(aligned(KERNEL)).replace(OUT, QUERY.splitlines(keepends=True)[0] + OUT))
    assert status_of_replay(folder, poisoned) == 1, "the query need not be replaced"


def test_the_test_of_the_last_step_runs_what_was_judged() -> None:
    assert "run_conformance_test(subject)" in TEST
    assert compile(TEST, "test_my_kernel.py", "exec")
