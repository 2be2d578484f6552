"""A runner of GitHub workflows, as far as the workflows of this project need one.

It does the steps of a job in order, with the files and variables of the real runner. `pip` and `gh` are
stand-ins that need no network; actions of GitHub's are noted, and those of artifacts move files.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]

_PIP = """#!/bin/bash
# Install what is named by a folder, without its dependencies; all else goes to the real Python.
if [ "$1 $2 $3" != "-m pip install" ]; then exec "$REAL_PYTHON" "$@"; fi
package="${@: -1}"
echo "pip install $package" >> "$INSTALLED"
case "$package" in *git+*) package="$ROOT" ;; esac
options="--quiet --no-deps --no-build-isolation"
exec "$REAL_PYTHON" -m uv pip install $options --target "$SITE" "${package%\\[suite\\]}"
"""
_GH = """#!/bin/bash
# gh run download RUN --repo REPOSITORY --name NAME --dir FOLDER
[ "$1 $2 ${4} ${6} ${8}" = "run download --repo --name --dir" ] && [ -n "$GH_TOKEN" ] || exit 9
rm -rf "$9" && cp -r "$ARTIFACTS/$7" "$9"
"""


@dataclass
class Step:
    """What became of one step."""

    name: str
    status: int = 0
    log: str = ""
    outputs: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass
class Job:
    """What became of one job."""

    steps: list[Step] = field(default_factory=list[Step])
    summary: str = ""
    used: list[str] = field(default_factory=list[str])

    @property
    def failed(self) -> bool:
        return any(step.status for step in self.steps)

    @property
    def log(self) -> str:
        return "".join(step.log for step in self.steps)


@dataclass
class Runner:
    """The machine of some jobs.

    workspace: the repository. folder: for everything else.
    overrides: inputs of our action, whatever a workflow says.
    """

    workspace: Path
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    github: Mapping[str, Any] = field(default_factory=dict[str, Any])
    overrides: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        for name in ("bin", "artifacts", "temp", "site"):
            (self.folder / name).mkdir(exist_ok=True)
        for name, text in (("python", _PIP), ("gh", _GH)):
            (self.folder / "bin" / name).write_text(text)
            (self.folder / "bin" / name).chmod(0o755)

    @property
    def artifacts(self) -> Path:
        return self.folder / "artifacts"

    @property
    def installed(self) -> list[str]:
        """What pip was asked to install."""
        path = self.folder / "installed.txt"
        return path.read_text().splitlines() if path.exists() else []

    def job(self, workflow: Path, name: str, **contexts: Any) -> Job:
        """Do the steps of a job of a workflow. contexts: such as `matrix`."""
        done = Job()
        steps = yaml.safe_load(workflow.read_text())["jobs"][name]["steps"]
        self._steps(steps, {"github": dict(self.github), "strategy": {"job-index": 0}, **contexts}, done)
        return done

    def _steps(self, steps: Sequence[Mapping[str, Any]], contexts: dict[str, Any], job: Job) -> None:
        contexts = {**contexts, "steps": {}}
        failed = False
        for step in steps:
            names = {**contexts, "success": not failed, "failure": failed, "always": True, "cancelled": False}
            condition = str(step.get("if", "success()")).removeprefix("${{").removesuffix("}}")
            if "(" not in condition:
                condition = f"success() && ({condition})"
            if not value_of(condition, names):
                continue
            given = {
                key: filled(str(text), names)
                for key, text in {**step.get("env", {}), **step.get("with", {})}.items()
            }
            before = len(job.steps)
            if "run" in step:
                job.steps.append(self._run(step, given, job))
                contexts["steps"][step.get("id", "")] = {"outputs": job.steps[-1].outputs}
            else:
                self._use(step["uses"], given, contexts, job)
            failed |= any(each.status for each in job.steps[before:])

    def _run(self, step: Mapping[str, Any], variables: Mapping[str, str], job: Job) -> Step:
        files = {
            name: self.folder / "temp" / name
            for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "GITHUB_ENV")
        }
        for file in files.values():
            file.write_text("")
        script = self.folder / "temp" / "script.sh"
        script.write_text(step["run"])
        shell = (
            ["bash", "--noprofile", "--norc", "-eo", "pipefail"]
            if step.get("shell") == "bash"
            else ["bash", "-e"]
        )
        done = subprocess.run(
            [*shell, str(script)],
            cwd=self.workspace,
            env={**self._environment(), **{k: str(v) for k, v in files.items()}, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        job.summary += files["GITHUB_STEP_SUMMARY"].read_text()
        lines = files["GITHUB_OUTPUT"].read_text().splitlines()
        outputs = dict(line.split("=", 1) for line in lines)
        return Step(step.get("name", step["run"]), done.returncode, done.stdout, outputs)

    def _use(self, action: str, given: Mapping[str, str], contexts: dict[str, Any], job: Job) -> None:
        job.used.append(action)
        name = action.partition("@")[0]
        if name == "OWNER/attest":
            described = yaml.safe_load((ROOT / "action.yml").read_text())
            assert set(given) <= set(described["inputs"]), given
            defaults = {key: each["default"] for key, each in described["inputs"].items()}
            inputs = {**defaults, **given, **self.overrides}
            self._steps(described["runs"]["steps"], {"github": contexts["github"], "inputs": inputs}, job)
        elif name == "actions/upload-artifact":
            shutil.copytree(
                self.workspace / given["path"], self.artifacts / given["name"], dirs_exist_ok=True
            )
        elif name == "actions/download-artifact":
            for found in self.artifacts.iterdir():
                if fnmatch(found.name, given["pattern"]):
                    shutil.copytree(found, self.workspace / given["path"] / found.name, dirs_exist_ok=True)
        else:
            assert name in ("actions/checkout", "actions/setup-python", "actions/cache"), name

    def _environment(self) -> dict[str, str]:
        return {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("GITHUB_", "PYTEST_"))
            },
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder / "site"),
            "REAL_PYTHON": sys.executable,
            "SITE": str(self.folder / "site"),
            "ROOT": str(ROOT),
            "INSTALLED": str(self.folder / "installed.txt"),
            "ARTIFACTS": str(self.artifacts),
            "RUNNER_TEMP": str(self.folder / "temp"),
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_WORKSPACE": str(self.workspace),
            **self.variables,
        }


def filled(text: str, names: Mapping[str, Any]) -> str:
    """The text with the values of its expressions."""

    def written(match: re.Match[str]) -> str:
        value = value_of(match[1], names)
        return str(value).lower() if isinstance(value, bool) else str(value)

    return re.sub(r"\$\{\{(.*?)\}\}", written, text)


_TOKEN = re.compile(r"\s*('[^']*'|&&|\|\||==|!=|!|[()]|[\w][\w.-]*(?:\(\))?)")


def value_of(expression: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression of GitHub's: names, strings, functions without arguments, and operators."""
    tokens = _TOKEN.findall(expression)
    assert "".join(tokens) == re.sub(r"\s+(?=(?:[^']*'[^']*')*[^']*$)", "", expression), expression
    operators = {"&&": " and ", "||": " or ", "!": " not ", "==": "==", "!=": "!=", "(": "(", ")": ")"}
    values: list[Any] = []
    source = ""
    for token in tokens:
        if token in operators:
            source += operators[token]
            continue
        source += f"v[{len(values)}]"
        values.append(token[1:-1] if token[0] == "'" else _looked_up(token.removesuffix("()"), names))
    return eval(source, {"v": values})


def _looked_up(name: str, names: Mapping[str, Any]) -> Any:
    value: Any = names
    for part in name.split("."):
        value = value.get(part, "") if isinstance(value, Mapping) else ""
    return value
