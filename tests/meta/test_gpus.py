"""The marker `gpu`: without the GPU one line says how many tests are left out, and an id says why."""

import subprocess
from pathlib import Path

import pytest

from tests.meta.processes import python

FILE = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("x", range(3))
def test_any(x):
    pass

@pytest.mark.gpu("9.0")
def test_one():
    pass

def test_none():
    pass
"""


def run(folder: Path, *arguments: str, found: str = "") -> subprocess.CompletedProcess[str]:
    """found: the capabilities of the GPUs that are there, with spaces between."""
    (folder / "test_toy.py").write_text(FILE)
    (folder / "conftest.py").write_text(
        f"from tests import gpus\ngpus._capabilities = lambda: frozenset({found.split()!r})\n"
    )
    options = ("-p", "tests.gpus", "-p", "no:cacheprovider", "-rA")
    return python(folder, "-m", "pytest", *options, *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "two workers"])
def test_a_session_says_once_what_it_leaves_out(tmp_path: Path, workers: tuple[str, ...]) -> None:
    done = run(tmp_path, *workers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("4 tests need a GPU that is not here") == 1
    assert "SKIPPED" not in done.stdout
    assert "1 passed" in done.stdout


def test_one_that_is_named_says_which_gpu_it_needs(tmp_path: Path) -> None:
    done = run(tmp_path, "test_toy.py::test_one", "test_toy.py::test_none")
    assert "needs a GPU of compute capability 9.0; JAX has no GPU here" in done.stdout
    assert "1 passed, 1 skipped" in done.stdout


@pytest.mark.parametrize(
    ("found", "summary"), [("8.0", "4 passed, 1 deselected"), ("8.0 9.0", "5 passed")], ids=["another", "it"]
)
def test_with_a_gpu_its_tests_run(tmp_path: Path, found: str, summary: str) -> None:
    done = run(tmp_path, found=found)
    assert summary in done.stdout
    assert ("1 test needs a GPU that is not here" in done.stdout) == ("deselected" in summary)
