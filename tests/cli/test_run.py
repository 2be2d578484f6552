"""What the command does with kernels: exit statuses, files, and what it says where."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conformance import gate as gating
from conformance import runner
from conformance.case import Case
from conformance.plan import Task
from conformance.record import Verdict
from conformance.record_file import read_record
from tests import toys

ROOT = Path(__file__).parents[2]
CASES = (Case(q_len=2, kv_len=3, causal=True), Case(q_len=3, kv_len=2, causal=True, head_dim=4, value_dim=4))


@pytest.fixture(autouse=True)
def _small_plan(monkeypatch):
    """Two cases in place of a profile's dozens; workers are processes that would not see this."""
    posed = [Task("", case, ("forward",)) for case in CASES]
    monkeypatch.setattr(runner, "tasks", lambda subject, profile, seed, only: iter(posed))


def question(name: str, case: Case, check: str = "forward") -> str:
    return json.dumps({"subject": f"tests.toys:{name}", "check": check, "case": case.to_json()})


def test_a_right_kernel_passes(attest, tmp_path):
    path = tmp_path / "run.json"
    done = attest("check", "tests.toys:right", "-n", 0, "--json", path)
    assert done.status == 0
    assert done.err == ""
    record = read_record(path)
    assert record.complete
    assert record.status == "pass"
    assert {result.subject for result in record.results} == {"tests.toys:right"}
    assert record.environment["backend"] == "cpu"


def test_a_wrong_kernel_fails_and_says_how_to_replay_it(attest, tmp_path):
    path = tmp_path / "run.json"
    done = attest("check", "tests.toys:top_left", "-n", 0, "--json", path)
    assert done.status == 1
    record = read_record(path)
    (minimal,) = (result for result in record.results if result.minimal)
    assert minimal.case.q_len + minimal.case.kv_len <= 3
    assert "attest replay" in done.out
    again = attest("replay", question("top_left", minimal.case), "-n", 0)
    assert again.status == 1
    assert again.out.startswith("FAIL tests.toys:top_left: forward")


def test_other_forms_of_a_record(attest, tmp_path):
    paths = {name: tmp_path / f"run.{name}" for name in ("json", "junit", "markdown", "html")}
    options = [word for name, path in paths.items() for word in (f"--{name}", path)]
    assert attest("check", "tests.toys:top_left", "-n", 0, *options).status == 1
    first = {name: path.read_bytes() for name, path in paths.items()}
    assert attest("report", paths["json"], *options[2:]).status == 0
    assert {name: path.read_bytes() for name, path in paths.items()} == first
    assert "tests.toys:top_left" in attest("report", paths["json"]).out


def test_shards_merge_into_one_record(attest, tmp_path):
    parts = [tmp_path / f"{number}.json" for number in (1, 2, 3)]
    for number, part in enumerate(parts, start=1):
        attest("check", "tests.toys:right", "-n", 0, "--shard", f"{number}/3", "--json", part)
    merged = tmp_path / "all.json"
    assert attest("merge", *parts, "--json", merged).status == 0
    assert {result.case for result in read_record(merged).results} == set(CASES)
    done = attest("merge", *parts[:2])
    assert done.status == 2
    assert "shards: got 1/3, 2/3, expected 1/3, 2/3, 3/3" in done.err


def test_the_gate_judges_what_runs_here_and_compares_with_a_baseline(attest, tmp_path, monkeypatch):
    known = {"tests.toys:right": toys.right}
    monkeypatch.setattr(gating, "discover", lambda: known)
    monkeypatch.setattr(gating, "find", known.__getitem__)
    path = tmp_path / "base.json"
    assert attest("gate", "-n", 0, "--json", path).status == 0
    assert attest("gate", "-n", 0, "--baseline", path).status == 0
    assert attest("compare", path, path).status == 0
    known["tests.toys:right"] = toys.top_left
    worse = tmp_path / "head.json"
    done = attest("gate", "-n", 0, "--baseline", path, "--json", worse)
    assert done.status == 1
    assert "worse than the baseline" in read_record(worse).problems
    assert attest("compare", path, worse, "--markdown", tmp_path / "compare.md").status == 1
    assert (tmp_path / "compare.md").stat().st_size > 0


def test_an_expected_failure_passes_and_an_unexpected_pass_fails(attest, tmp_path):
    path = tmp_path / "known.toml"
    path.write_text(
        '[[expect]]\nsubject = "tests.toys:top_left"\ncheck = "forward"\nreason = "starts top left"\n'
        'link = "docs/semantics.md"\n'
    )
    options = ("-n", 0, "--expectations", path)
    assert attest("replay", question("top_left", CASES[0]), *options).status == 0
    done = attest("check", "tests.toys:top_left", *options)
    assert done.status == 1
    assert "not a single check passed" in done.out
    path.write_text(path.read_text().replace("top_left", "right"))
    done = attest("replay", question("right", CASES[0]), *options)
    assert done.status == 1
    assert done.out.startswith("XPASS")


MISBEHAVIOUR = {
    "raises": ("forward", "raised RuntimeError: out of luck"),
    "wants_memory": ("forward", "(other workers may hold this memory: -n 1 leaves it to one)"),
    "exits": ("forward", "raised SystemExit: no"),
    "one_query_short": ("forward", "returned out of shape (1, 1, 1, 1), expected (1, 2, 1, 1)"),
    "another_dtype": ("forward", "returned out of dtype float16, expected float32"),
    "nothing": ("forward", "returned out as NoneType, expected an array"),
    "modifies": ("purity", "modified its input query"),
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_misbehaviour_is_one_sentence(attest, name):
    check, sentence = MISBEHAVIOUR[name]
    done = attest("replay", question(name, Case(q_len=2, kv_len=3), check), "-n", 0)
    assert done.status == 1
    assert done.out.startswith(f"FAIL tests.toys:{name}: {check}\n")
    assert sentence in done.out.splitlines()[1]
    assert "Traceback" not in done.out + done.err


def test_a_tracer_of_another_call_is_one_sentence(attest):
    asked = question("hoarder", Case(q_len=2, kv_len=3))
    done = attest("replay", asked, "--check", "forward", "--check", "purity", "-n", 0)
    assert done.status == 1
    failure = done.out[done.out.index("FAIL tests.toys:hoarder: purity") :]
    assert "returned out as a tracer" in failure.splitlines()[1]


def test_what_kernels_print_stays_out_of_the_report(attest):
    done = attest("replay", question("talks", CASES[0]))
    assert done.status == 0
    assert done.out.startswith("PASS tests.toys:talks: forward")
    assert "own words" not in done.out


def test_a_hang_is_one_sentence(attest):
    done = attest("replay", question("hangs", CASES[0]), "--timeout", 1)
    assert done.status == 1
    assert "did not finish within 1 s" in done.out


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_nothing_but_text_off_terminals(attest, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = attest("check", "tests.toys:top_left", "-n", 0)
    assert "\x1b" not in done.out
    assert done.err == ""


def test_list_names_every_subject_and_its_dialect(attest):
    done = attest("list")
    assert done.status == 0
    assert "xla.flash_attention" in done.out
    assert "causal top_left" in done.out


SCRIPT = """
import time
from conformance import Subject

def call(query, key, value):
    time.sleep(600)

slow = Subject("mine.slow", call)
"""


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_a_partial_record(tmp_path, stop):
    """From the folder of the user's own module, with workers, and without an installed command."""
    (tmp_path / "mine.py").write_text(SCRIPT)
    path = tmp_path / "run.json"
    command = [sys.executable, "-m", "conformance", "check", "mine:slow", "-n", "1", "--json", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(stop)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "interrupted, judging" in stderr
    assert str(path) in stderr
    assert "Traceback" not in stderr
    record = read_record(path)
    assert not record.complete
    assert record.note.startswith("interrupted")
    assert record.status == "fail"
    assert all(result.verdict is not Verdict.ERROR for result in record.results)
