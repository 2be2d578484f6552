"""Nothing that comes from outside runs code unasked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attest.conformance.cases.case import Case
from tests.conformance.cli.processes import ROOT

EVIL = "from pathlib import Path\nPath(__file__).with_name('has run').touch()\nsubject = 3\n"
LINE = json.dumps({"subject": "evil:subject", "check": "forward", "case": Case(q_len=2).to_json()})


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A folder whose modules say when they run; one of them has the name of a library."""
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "jinja2.py").write_text(EVIL)
    return tmp_path


def attest_in(
    folder: Path, *arguments: object, program: str = "-m attest"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program.split(), *map(str, arguments)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def record_of_evil(folder: Path) -> Path:
    from attest.conformance.record import Result, RunRecord, Verdict
    from attest.conformance.records.record_file import write_record

    path = folder / "run.json"
    failure = Result("evil:subject", "forward", (), Case(q_len=2), Verdict.FAIL)
    write_record(RunRecord("quick", 0, (failure,)), path)
    return path


@pytest.mark.parametrize("inline", [True, False])
def test_a_replay_line_runs_no_module(evil, inline):
    (evil / "line.json").write_text(LINE)
    done = attest_in(evil, "replay", LINE if inline else "line.json")
    assert done.returncode == 2
    assert (
        "subject 'evil:subject' is a module that would be imported: if you trust it, add --allow-import"
        in done.stderr
    )
    assert not (evil / "has run").exists()


@pytest.mark.parametrize("options", [("--allow-import",), ("--subject", "evil:subject")])
def test_a_replay_line_runs_a_module_if_it_may(evil, options):
    done = attest_in(evil, "replay", LINE, *options)
    assert done.returncode == 2
    assert "evil:subject is a int" in done.stderr
    assert (evil / "has run").exists()


def test_a_record_runs_no_module_and_no_other_command_sees_the_folder(evil):
    path = record_of_evil(evil)
    for command in (("report", path), ("compare", path, path), ("merge", path), ("list",)):
        done = attest_in(evil, *command)
        assert done.returncode in (0, 1), done.stderr
        assert "Traceback" not in done.stderr
    assert not (evil / "has run").exists()


def test_the_gate_does_not_see_the_folder(evil):
    """`evil` is installed nowhere: only the folder has it."""
    (evil / "evil-1.dist-info").mkdir()
    (evil / "evil-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    (evil / "evil-1.dist-info" / "entry_points.txt").write_text("[attest.subjects]\nevil = evil:subject\n")
    done = attest_in(evil, "gate", "--baseline", "nothing.json")
    assert done.returncode == 2
    assert "evil" not in attest_in(evil, "list").stdout
    assert not (evil / "has run").exists()


def test_the_folder_of_the_checkout_stays_on_the_path():
    """Uninstalled, the command is there and nowhere else."""
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            "import attest.conformance.process.settings as p, os, sys; sys.path[0] = os.getcwd();"
            "p.hide_folder(); print(sys.path[0] == os.getcwd())",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "GeneratorExit"])
def test_a_module_that_ends_the_process_is_one_sentence(attest, tmp_path, monkeypatch, kind):
    name = f"ends_by_{kind.lower()}"
    (tmp_path / f"{name}.py").write_text(f"raise {kind}('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = attest("check", f"{name}:subject")
    assert (done.status, done.out) == (2, "")
    assert done.err == f"attest: a subject cannot be loaded: its module raised {kind}: no\n"
