"""The GitHub action in the repository of examples/github: its steps in order, and what they leave."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.api_of_github import Api
from tests.workflows import ROOT, Job, Runner

EXAMPLE = ROOT / "examples" / "github"
HEAD = "5" * 40
QUICK = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "GITHUB_REPOSITORY": "somebody/my-attention",
}


class Run:
    """The workflows of a pull request that breaks causal order."""

    def __init__(self, folder: Path) -> None:
        self.repository = folder / "repository"
        shutil.copytree(EXAMPLE, self.repository)
        # A folder that Python would take for the package, if it looked into the current folder first.
        (self.repository / "attest").mkdir()
        (self.repository / "attest" / "__init__.py").write_text("raise ImportError('of the repository')")
        kernel = self.repository / "my_attention" / "__init__.py"
        right = kernel.read_text()
        kernel.write_text(right.replace("<= last[:, None]", "< last[:, None]"))
        assert kernel.read_text() != right
        event = folder / "event.json"
        event.write_text(json.dumps({"pull_request": {"number": 7}}))
        self.runner = Runner(
            self.repository,
            folder,
            {**QUICK, "GITHUB_EVENT_PATH": str(event)},
            overrides={"options": "--check forward --feature causal --examples 2 -n 0"},
        )
        workflow = self.repository / ".github" / "workflows" / "attest.yml"
        self.shards = [
            self.runner.job(workflow, "shard", matrix={"shard": shard}, strategy={"job-index": index})
            for index, shard in enumerate(
                yaml.safe_load(workflow.read_text())["jobs"]["shard"]["strategy"]["matrix"]["shard"]
            )
        ]
        self.verdict = self.runner.job(workflow, "verdict")

    def comment(self, api: Api) -> Job:
        self.runner.variables = {**self.runner.variables, "GITHUB_API_URL": api.address}
        self.runner.github = {"token": "secret", "event": {"workflow_run": {"id": 3, "head_sha": HEAD}}}
        return self.runner.job(self.repository / ".github" / "workflows" / "comment.yml", "comment")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("github"))


def test_a_shard_that_finds_the_fault_fails_and_the_joined_run_does(run: Run) -> None:
    assert [job.failed for job in run.shards].count(True) == 1, [job.log for job in run.shards]
    assert run.verdict.failed
    assert run.verdict.steps[-1].outputs["verdict"] == "fail"


def test_every_shard_and_the_joined_run_keep_their_results(run: Run) -> None:
    kept = {path.name: {file.name for file in path.iterdir()} for path in run.runner.artifacts.iterdir()}
    assert set(kept) == {"attest-shard-0", "attest-shard-1", "attest"}
    results = {"record.json", "report.md", "report.html", "junit.xml"}
    assert kept["attest-shard-0"] == kept["attest-shard-1"] == results
    assert kept["attest"] == {*results, "comment.md", "pull-request.txt"}
    outputs = run.verdict.steps[-1].outputs
    assert all(
        (run.repository / outputs[name]).is_file() for name in ("record", "html", "markdown", "comment")
    )


def test_the_summary_explains_the_failure(run: Run) -> None:
    assert run.verdict.summary.startswith("## attest\n\n**")
    assert "### Cause 1 of 1, 3 failures: my\\_attention: out is wrong" in run.verdict.summary
    assert "attest replay" in run.verdict.summary


def test_a_failing_check_is_annotated_at_the_call_of_the_subject(run: Run) -> None:
    (command,) = re.findall("^::error .*$", run.verdict.log, re.MULTILINE)
    line = (
        (run.repository / "my_attention" / "attest_subject.py")
        .read_text()
        .splitlines()
        .index("def call(query: Any, key: Any, value: Any, **options: Any) -> Any:")
    )
    place = f"file=my_attention/attest_subject.py,line={line + 1}"
    title, cause = "my_attention%3A out is wrong", "CAUSE 1 of 1, 3 failures: my_attention: out is wrong"
    assert command.startswith(f"::error title={title},{place}::{cause}%0A")
    assert "%0A  S6: causal" in command


def test_the_package_and_the_action_are_installed(run: Run) -> None:
    assert run.runner.installed[:2] == ["pip install .", f"pip install {ROOT}[suite]"]
    assert all("cache" in "".join(job.used) for job in run.shards)
    assert "cache" not in "".join(run.verdict.used)


def test_one_comment_is_posted_and_then_updated(run: Run) -> None:
    with Api(head=HEAD) as api:
        first = run.comment(api)
        assert not first.failed, first.log
        assert "attest-attention @ git+" in run.runner.installed[-1]
        (body,) = api.comments.values()
        assert body.startswith("<!-- attest comment: attest -->\n## attest\n")
        assert "my\\_attention: out is wrong" in body
        report = run.runner.artifacts / "attest" / "comment.md"
        report.write_text("another")
        assert not run.comment(api).failed
        assert [text.splitlines()[-1] for text in api.comments.values()] == ["another"]
        assert {token for _, token in api.calls} == {"Bearer secret"}


WORKFLOWS = sorted((EXAMPLE / ".github" / "workflows").glob("*.yml"))


def steps(file: Path) -> list[dict]:
    found = yaml.safe_load(file.read_text())
    return (
        found["runs"]["steps"]
        if "runs" in found
        else [s for job in found["jobs"].values() for s in job["steps"]]
    )


@pytest.mark.parametrize("file", [ROOT / "action.yml", *WORKFLOWS], ids=lambda path: path.name)
def test_what_is_used_is_pinned_and_no_expression_is_run(file: Path) -> None:
    for step in steps(file):
        assert ("run" in step) != ("uses" in step)
        assert "${{" not in step.get("run", "")
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}|OWNER/attest@v\d+\.\d+\.\d+", step["uses"])


def test_the_action_has_the_structure_of_one() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert set(action) == {"name", "description", "branding", "inputs", "outputs", "runs"}
    assert action["runs"]["using"] == "composite"
    for given in action["inputs"].values():
        assert set(given) == {"description", "default"}
        assert isinstance(given["default"], str)
    for step in action["runs"]["steps"]:
        assert "uses" in step or step["shell"] == "bash"
    used = set(re.findall(r"inputs\.([a-z]+)", (ROOT / "action.yml").read_text()))
    assert used == set(action["inputs"])


def test_what_runs_code_of_a_pull_request_cannot_write() -> None:
    attest, comment = (yaml.safe_load(file.read_text()) for file in WORKFLOWS)
    assert attest["permissions"] == {"contents": "read"}
    # YAML reads the key `on` as true.
    assert set(attest[True]) == {"push", "pull_request"}
    assert not any("permissions" in job for job in attest["jobs"].values())
    assert set(comment[True]) == {"workflow_run"}
    assert comment["permissions"] == {}
    assert comment["jobs"]["comment"]["permissions"] == {"actions": "read", "pull-requests": "write"}
    assert not any("checkout" in step.get("uses", "") for step in steps(WORKFLOWS[1]))


def test_the_page_has_every_input_and_output() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    page = (ROOT / "docs" / "how-to" / "github.md").read_text()
    rows = set(re.findall(r"^\| `([a-z]+)` \|", page, re.MULTILINE))
    assert rows == {*action["inputs"], *action["outputs"]}
