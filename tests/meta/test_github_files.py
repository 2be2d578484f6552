"""The workflows and forms of this repository, and what else a host of repositories reads."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.meta.processes import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*-*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_each_part_has_its_workflow() -> None:
    assert names(WORKFLOWS) == ["docs.yml", "gate.yml", "nightly.yml", "release.yml", "tests.yml"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=names(WORKFLOWS))
def test_actions_are_pinned_by_hash_with_their_version(workflow: Path) -> None:
    used = re.findall(r"uses: (.*)", workflow.read_text())
    assert used
    for action in used:
        assert action == "./" or re.fullmatch(r"[\w-]+/[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=names(WORKFLOWS))
def test_jobs_end_and_may_write_only_what_they_publish(workflow: Path) -> None:
    content = read(workflow)
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        assert job["timeout-minutes"] <= 350
        runs_code = any("run" in step or step.get("uses") == "./" for step in job["steps"])
        assert not (runs_code and "permissions" in job), name


def test_the_sessions_that_workflows_run_exist() -> None:
    sessions = set(
        re.findall(r'^def (\w+)\(session|name="([\w-]+)"', (ROOT / "noxfile.py").read_text(), re.M)
    )
    known = {name for pair in sessions for name in pair if name}
    asked = set(
        read(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]["session"]["strategy"]["matrix"][
            "session"
        ]
    )
    for workflow in WORKFLOWS:
        asked |= set(re.findall(r"nox -s (\w+)", workflow.read_text()))
    assert {"tests", "docs", "release", "nightly", "versions", "minimums", "defects"} <= asked <= known


def test_the_night_judges_the_standard_profile_with_a_new_seed() -> None:
    steps = read(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]["standard"]["steps"]
    (judged,) = (step["with"] for step in steps if step.get("uses") == "./")
    assert judged["profile"] == "standard"
    assert judged["seed"] == "${{ github.run_id }}"


def test_what_is_published_runs_no_code_of_the_project_and_has_attestations() -> None:
    job = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["publish"]
    assert job["permissions"] == {"id-token": "write"}
    assert not any("run" in step for step in job["steps"])
    assert job["steps"][-1]["with"]["attestations"] is True


@pytest.mark.parametrize("form", FORMS, ids=names(FORMS))
def test_each_form_asks_for_the_replay_line(form: Path) -> None:
    fields = {field["id"]: field for field in read(form)["body"]}
    assert "replay line" in " ".join(fields["replay"]["attributes"].values())


def test_the_forms() -> None:
    assert names(FORMS) == ["missed-defect.yml", "new-peer.yml", "wrong-verdict.yml"]


def test_the_version_is_that_of_the_project_wherever_it_stands() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert sections[0] == "Unreleased" or sections[0] == PROJECT["version"]
