"""The steps of the GitHub action: which command runs, what is reported, and what a wrong input says."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.ci import annotations, cache, inputs, run, workflow
from attest.conformance.ci.__main__ import main
from attest.conformance.ci.inputs import Inputs
from attest.conformance.record import Result, RunRecord, Verdict
from attest.conformance.records.record_file import write_record
from tests import toys

FAIL = Result(
    "tests.toys:top_left", "forward", ("S6",), Case(causal=True), Verdict.FAIL, message="is wrong\n%"
)
FOUND = RunRecord("quick", 0, (FAIL,))


@pytest.fixture(autouse=True)
def _no_runner(monkeypatch, tmp_path):
    """The files of a runner in a folder of the test's own, and no inputs."""
    for name in [*inputs.os.environ]:
        if name.startswith(("ATTEST_", "GITHUB_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"):
        monkeypatch.setenv(name, str(tmp_path / name))


def given(monkeypatch, **values: str) -> Inputs:
    for name, value in values.items():
        monkeypatch.setenv(f"ATTEST_{name.upper()}", value)
    return inputs.read_inputs()


def shown(command: list[str]) -> str:
    """A command without the outputs, which are always the same."""
    outputs = re.escape(
        "--json attest-results/record.json --junit attest-results/junit.xml"
        " --markdown attest-results/report.md --html attest-results/report.html"
    )
    return re.sub(f" {outputs}", " OUT", " ".join(command))


COMMANDS = {
    "gate --profile quick --seed 0 --shard 1/1 OUT": {},
    "check a.b --profile standard --seed 3 --shard 2/4 OUT -n 2": {
        "subject": "a.b",
        "profile": "standard",
        "seed": "3",
        "shard": "2/4",
        "options": "-n 2",
    },
    "check m:x --profile quick --seed 0 --shard 1/1 --expectations e.toml --expectations f.toml OUT": {
        "subject": "m:x\n",
        "expectations": "e.toml\nf.toml",
    },
    "gate --subject a --subject b.* --profile quick --seed 0 --shard 1/1 OUT": {"subject": "a b.*"},
    "gate --subject a.* --profile quick --seed 0 --shard 1/1 OUT": {"subject": "a.*"},
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_inputs_name_the_command(monkeypatch, command):
    assert shown(given(monkeypatch, **COMMANDS[command]).command()) == command


def test_records_are_merged(monkeypatch, tmp_path):
    for number in (2, 1):
        (tmp_path / f"s{number}.json").touch()
    command = given(monkeypatch, records="s*.json", subject="a", options="-n 2").command()
    assert shown(command) == "merge s1.json s2.json OUT"


WRONG = {
    "subject: got 'm:x' beside others, expected names of `attest list`: give": {"subject": "a m:x"},
    "records: no file matches none/*.json: has a shard written its record?": {"records": "none/*.json"},
    "profile: got 'a\\nb', expected one line": {"profile": "a\nb"},
    "comment: got 'yes', expected true or false": {"comment": "yes"},
    "options: No closing quotation": {"options": "'"},
    "folder /dev/null/x: Not a directory": {"folder": "/dev/null/x"},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_wrong_input_is_one_annotation(monkeypatch, capsys, sentence):
    for name, value in WRONG[sentence].items():
        monkeypatch.setenv(f"ATTEST_{name.upper()}", value)
    assert main(["run"]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"::error title=attest::{sentence}")


def test_an_unknown_step_is_one_annotation(capsys):
    assert main(["walk"]) == 2
    assert (
        "got walk, expected python -P -m attest.conformance.ci prepare | run | comment"
        in capsys.readouterr().out
    )


def test_a_value_cannot_end_its_line(capsys):
    workflow.annotate("error", "100 %\r\n::x::", "a:b,c", "d,e.py", 3)
    assert capsys.readouterr().out == "::error title=a%3Ab%2Cc,file=d%2Ce.py,line=3::100 %25%0D%0A::x::\n"
    with pytest.raises(workflow.StepError, match="output x: got 'a"):
        workflow.set_outputs({"x": "a\nverdict=pass"})


def test_no_command_of_a_kernel_is_obeyed(capfd):
    with workflow.no_commands():
        print("::error::of a kernel")
    first, _, last = capfd.readouterr().out.splitlines()
    token = first.removeprefix("::stop-commands::")
    assert last == f"::{token}::"
    assert len(token) == 32


def stands_in(monkeypatch, record: RunRecord, *statuses: int) -> list[list[str]]:
    """Let `attest` write a record and reports, and end with these statuses, one after the other."""
    calls: list[list[str]] = []

    def attest(given: Inputs, arguments: list[str]) -> tuple[int, str]:
        calls.append(arguments)
        if arguments[0] == "compare":
            Path(arguments[-1]).write_text("compared")
        else:
            write_record(record, given.file("json"))
            given.file("markdown").write_text("reported")
        return statuses[len(calls) - 1], "its last line"

    monkeypatch.setattr(run, "_attest", attest)
    return calls


def outputs(tmp_path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (tmp_path / "GITHUB_OUTPUT").read_text().splitlines())


def pull_request(monkeypatch, tmp_path: Path, number: object) -> None:
    (tmp_path / "event.json").write_text(json.dumps({"pull_request": {"number": number}}))
    monkeypatch.setenv("GITHUB_EVENT_PATH", str(tmp_path / "event.json"))


def test_a_passing_run_is_reported(monkeypatch, tmp_path, capsys):
    stands_in(monkeypatch, replace(FOUND, results=(replace(FAIL, verdict=Verdict.PASS),)), 0)
    assert run.run(Inputs(title="kernels")) == 0
    assert outputs(tmp_path) == {
        "verdict": "pass",
        "folder": "attest-results",
        "record": "attest-results/record.json",
        "html": "",
        "markdown": "attest-results/report.md",
        "comment": "",
    }
    assert (tmp_path / "GITHUB_STEP_SUMMARY").read_text() == "## kernels\n\nreported\n"
    assert "::error" not in capsys.readouterr().out


def test_a_comparison_comes_first_and_is_the_comment(monkeypatch, tmp_path, capsys):
    pull_request(monkeypatch, tmp_path, 12)
    calls = stands_in(monkeypatch, replace(FOUND, results=()), 0, 1)
    assert run.run(Inputs(baseline="base.json")) == 1
    assert calls[1][:3] == ["compare", "base.json", "attest-results/record.json"]
    assert outputs(tmp_path)["verdict"] == "fail"
    assert (tmp_path / "GITHUB_STEP_SUMMARY").read_text() == "## attest\n\ncompared\nreported\n"
    assert Path("attest-results/comment.md").read_text() == "compared"
    assert Path("attest-results/pull-request.txt").read_text() == "12\n"
    assert "::error title=attest::worse than the baseline base.json" in capsys.readouterr().out


def test_a_shard_is_neither_compared_nor_posted(monkeypatch, tmp_path):
    pull_request(monkeypatch, tmp_path, 12)
    calls = stands_in(monkeypatch, FOUND, 1)
    run.run(Inputs(baseline="base.json", shard="1/2"))
    assert len(calls) == 1
    assert outputs(tmp_path)["comment"] == ""


@pytest.mark.parametrize("number", ["1; rm -rf", None, 0, {"a": 1}])
def test_only_a_number_names_a_pull_request(monkeypatch, tmp_path, number):
    pull_request(monkeypatch, tmp_path, number)
    stands_in(monkeypatch, FOUND, 1)
    run.run(Inputs())
    assert not Path("attest-results/comment.md").exists()


def test_results_of_an_earlier_run_are_removed(monkeypatch, tmp_path):
    pull_request(monkeypatch, tmp_path, 12)
    stands_in(monkeypatch, FOUND, 1, 1)
    run.run(Inputs(baseline="base.json"))
    monkeypatch.setattr(run, "_attest", lambda *_: (2, "no such subject"))
    assert run.run(Inputs()) == 2
    assert not list(Path("attest-results").iterdir())


def test_a_command_that_cannot_run_is_annotated_with_what_it_says(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert run.run(Inputs(subjects=("no.such.kernel",))) == 2
    assert outputs(tmp_path)["verdict"] == "error"
    said = capfd.readouterr().out
    assert "::error title=attest::attest: unknown subject 'no.such.kernel'" in said


def test_the_compiled_programs_go_to_the_cache_of_the_action_alone(monkeypatch):
    seen: list[dict[str, str]] = []
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)

    class Ended:
        returncode, stderr = -9, iter(())

        def __init__(self, _line, env, **_):
            seen.append(env)

        def __enter__(self):
            return self

        def __exit__(self, *_): ...

    monkeypatch.setattr(run.subprocess, "Popen", Ended)
    run.run(Inputs(cache="here"))
    assert run.run(Inputs()) == 2
    assert seen[0]["JAX_COMPILATION_CACHE_DIR"] == "here"
    assert seen[0]["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    assert "JAX_COMPILATION_CACHE_DIR" not in seen[1]


def test_a_cache_is_of_one_processor_and_shard(monkeypatch):
    monkeypatch.setenv("GITHUB_RUN_ID", "77")
    monkeypatch.setenv("RUNNER_TEMP", "/tmp/runner")
    first = cache.prepare("1/2")
    assert first["cache-folder"] == "/tmp/runner/attest-jax-cache"
    assert first["cache-key"] == f"{first['cache-prefix']}77-0"
    assert "," not in first["cache-key"]  # GitHub refuses it there
    assert cache.prepare("2/2")["cache-prefix"] != first["cache-prefix"]
    monkeypatch.setattr(cache, "version", lambda _: "another")
    assert cache.prepare("1/2")["cache-prefix"] != first["cache-prefix"]


def test_annotations_are_at_the_call_and_name_what_else_fails(tmp_path):
    record = replace(
        FOUND, problems=("stale expectation",), results=(FAIL, replace(FAIL, subject="no:where"))
    )
    write_record(record, tmp_path / "record.json")
    root = Path(toys.__file__).parents[1]
    elsewhere, here, other = annotations.annotations(tmp_path / "record.json", root)
    line = toys.top_left.call.__code__.co_firstlineno
    assert (here.file, here.line) == ("tests/toys.py", line)
    assert here.title == "tests.toys:top_left: forward is wrong"
    assert "S6: causal" in here.message
    assert "--subject=tests.toys:top_left" in here.message
    assert (elsewhere.file, elsewhere.line) == ("", 0)
    assert other.message == "stale expectation"
    outside, *_ = annotations.annotations(tmp_path / "record.json", tmp_path)
    assert outside.file == ""


def test_an_exception_is_annotated_at_its_line_in_the_repository(tmp_path):
    (tmp_path / "kernel.py").touch()
    frames = "at kernel.py:7 in attention: x\nat kernel.py:12 in inner: y\nat gone.py:3 in f: z"
    raised = replace(FAIL, message=f"raised ValueError: no\n{frames}\nat /elsewhere/lib.py:9 in g: z")
    late = replace(FAIL, check="lse", verdict=Verdict.TIMEOUT, phase="running")
    write_record(replace(FOUND, results=(raised, late)), tmp_path / "record.json")
    here, other = annotations.annotations(tmp_path / "record.json", tmp_path)
    assert (here.file, here.line) == ("kernel.py", 12)
    assert here.title == "tests.toys:top_left: forward raised ValueError: no"
    assert other.message == "timed out: 1 case"


def test_no_more_annotations_than_github_shows(tmp_path):
    results = tuple(replace(FAIL, check=f"check{number:02}") for number in range(15))
    write_record(replace(FOUND, results=results), tmp_path / "record.json")
    found = [*annotations.annotations(tmp_path / "record.json", tmp_path)]
    assert len(found) == 10
    assert found[-1].message == "causes that are not shown here: 6"


def test_two_of_the_steps_need_no_package():
    """The workflow that comments installs attest without its dependencies."""
    code = (
        "import sys, attest.conformance.ci.__main__, attest.conformance.ci.comment;"
        "print([m for m in ('jax', 'numpy', 'msgspec', 'typer', 'ml_dtypes') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
