"""The marker `process`: each test runs where it can, under its own id, and its outcome is the session's."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.meta.processes import python

FILE = """
import os
import pytest

STARTED = pytest.mark.process(NEEDED="1")
count = iter(range(9))


@pytest.fixture(scope="module")
def once():
    return next(count)


@STARTED
@pytest.mark.parametrize("name", ["a", "b"])
def test_there(name, once):
    assert os.environ["NEEDED"] == "1"
    assert once == 0
    assert os.getpid() != int(os.environ["PARENT"])


def test_here():
    assert "NEEDED" not in os.environ


@STARTED
def test_wrong():
    print("said before")
    four = 4
    assert four == 5


@STARTED
def test_skipped():
    pytest.skip("for a reason")


@STARTED
def test_dies():
    os._exit(3)


@STARTED
def test_after_it():
    pass


@pytest.mark.process(OTHER="2")
@STARTED
def test_both():
    assert (os.environ["NEEDED"], os.environ["OTHER"]) == ("1", "2")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_toy.py").write_text(FILE)
    (tmp_path / "conftest.py").write_text("import os\nos.environ.setdefault('PARENT', str(os.getpid()))\n")
    return tmp_path


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    options = ("-p", "tests.own_process", "-p", "no:cacheprovider", "-rA")
    return python(
        folder, "-m", "pytest", *options, *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", **variables
    )


def outcomes(printed: str) -> dict[str, str]:
    """By the name of a test, or by the reason of a skip."""
    found = re.findall(r"^(PASSED|FAILED|SKIPPED) .*test_toy\.py(?:::(\S+)|:\d+: (.*))", printed, re.M)
    return {name or reason: outcome for outcome, name, reason in found}


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "two workers"])
def test_each_test_has_its_outcome(folder: Path, workers: tuple[str, ...]) -> None:
    done = run(folder, *workers)
    assert outcomes(done.stdout) == {
        **dict.fromkeys(
            ("test_there[a]", "test_there[b]", "test_here", "test_after_it", "test_both"), "PASSED"
        ),
        **dict.fromkeys(("test_wrong", "test_dies"), "FAILED"),
        "for a reason": "SKIPPED",
    }, done.stdout + done.stderr
    assert done.returncode == 1
    # The traceback and the output of the other process, and how the one that died ended.
    assert "E       assert 4 == 5" in done.stdout
    assert "said before" in done.stdout
    assert "The process of this test ended with status 3" in done.stdout


def test_one_is_selected_by_its_id(folder: Path) -> None:
    done = run(folder, "test_toy.py::test_there[b]")
    assert outcomes(done.stdout) == {"test_there[b]": "PASSED"}, done.stdout


def test_where_the_process_is_as_it_must_be_none_is_started(folder: Path) -> None:
    done = run(folder, "test_toy.py::test_dies", NEEDED="1")
    assert done.returncode == 3


def test_a_file_that_cannot_be_collected_there_is_shown(folder: Path) -> None:
    (folder / "test_toy.py").write_text(
        f"{FILE}\nif 'NEEDED' in os.environ:\n    raise ValueError('not there')\n"
    )
    done = run(folder, "test_toy.py::test_after_it")
    assert outcomes(done.stdout) == {"test_after_it": "FAILED"}
    assert "ValueError: not there" in done.stdout


def test_no_process_is_started_by_one_that_was_started(folder: Path) -> None:
    """One that unsets what a test needs would else start others without end."""
    (folder / "conftest.py").write_text("import os\nos.environ.pop('NEEDED', None)\n")
    done = run(folder, "test_toy.py::test_after_it")
    assert outcomes(done.stdout) == {"test_after_it": "FAILED"}
    assert "is not as it needs: {'NEEDED': '1'}" in done.stdout


def test_one_that_hangs_is_ended_and_the_next_runs(folder: Path) -> None:
    (folder / "conftest.py").write_text("from tests import own_process\nown_process._SECONDS_A_TEST = 10\n")
    (folder / "test_toy.py").write_text(
        "import time, pytest\n"
        "pytestmark = pytest.mark.process(NEEDED='1')\n"
        "def test_hangs():\n"
        "    time.sleep(600)\n"
        "def test_next():\n"
        "    pass\n"
    )
    done = run(folder)
    assert outcomes(done.stdout) == {"test_hangs": "FAILED", "test_next": "PASSED"}, done.stdout
    assert "The process of this test gave no answer in 10 seconds" in done.stdout


def test_devices_are_those_of_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text(
        "import jax, pytest\n"
        "@pytest.mark.process(devices=3)\n"
        "def test_three():\n"
        "    assert jax.device_count('cpu') == 3\n"
    )
    done = run(tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=1")
    assert outcomes(done.stdout) == {"test_three": "PASSED"}, done.stdout
