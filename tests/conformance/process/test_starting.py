"""Worker processes begin with the variables and the path of this process."""

import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from attest.conformance.process import starting
from attest.conformance.process.workers import Job, perform

ROOT = Path(__file__).parents[3]


def answer(work, argument=None):
    (outcome,) = perform([Job("", work, argument)], {}, 1, 60.0)
    assert not outcome.fault
    return outcome.value


def ran(program, **options):
    """A Python program that ran from the repository's folder."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        **options,
    )


def variable(_subject, name):
    return os.environ.get(name)


def origin(_subject, name):
    return sys.modules[name].__file__


def test_what_is_loaded_ahead_starts_no_thread_and_no_backend():
    """A fork would copy them in whatever state they are."""
    program = (
        "from attest.conformance.process.settings import settle; settle()\n"
        "import attest.conformance.running.preloaded, os, sys, jax\n"
        "from jax._src import xla_bridge\n"
        "print(len(os.listdir('/proc/self/task')), len(xla_bridge._backends), file=sys.stderr)"
    )
    done = ran(program)
    assert done.stderr.split()[-2:] == ["1", "0"]


@pytest.mark.parametrize("name", ["ATTEST_NOTHING", "JAX_ENABLE_CHECKS"])
def test_a_worker_has_the_variables_of_now(monkeypatch, name):
    """The second is read when JAX is imported: the server, which imported it before, cannot serve."""
    assert answer(variable, name) is None
    monkeypatch.setattr(starting._Server, "early", starting._early())
    monkeypatch.setenv(name, "1")
    assert answer(variable, name) == "1"
    assert starting._may_fork() is (name == "ATTEST_NOTHING")


def test_a_worker_begins_without_the_server(monkeypatch):
    def dead(_descriptors):
        raise EOFError

    monkeypatch.setattr(forkserver, "connect_to_new_process", dead)
    monkeypatch.setenv("ATTEST_NOTHING", "2")
    assert answer(variable, "ATTEST_NOTHING") == "2"


def test_a_signal_to_the_group_ends_no_server_before_its_run():
    """The run would take each worker for one that has died with its kernel."""
    program = (
        "import os, signal, time\n"
        "from multiprocessing import forkserver\n"
        "from attest.conformance.process import starting\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "process = starting.start(time.sleep, 2.0)\n"
        "os.killpg(0, signal.SIGTERM)\n"
        "process.join()\n"
        "print(process.exitcode)"
    )
    done = ran(program, process_group=0)
    assert done.stdout.split() == ["0"]


def test_a_worker_imports_nothing_from_the_current_folder(tmp_path):
    (tmp_path / "hypothesis.py").write_text("from pathlib import Path\nPath('has run').touch()\n")
    program = (
        f"import sys; sys.path[:1] = [{str(ROOT)!r}]\n"
        "from tests.conformance.process.test_starting import answer, origin\n"
        "print(answer(origin, 'hypothesis'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith("__init__.py")
    assert not (tmp_path / "has run").exists()
