"""The package that the README describes: built, installed, found by its entry point, and judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attest.conformance.judging.malformed import MALFORMED
from tests.meta.fences import snippets
from tests.meta.processes import ROOT, python, tokens
from tests.own_kernel import KERNEL

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "how-to" / "your-own-kernel.md"

PYPROJECT = """
[project]
name = "my-attention"
version = "1.0"

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["my_attention"]
"""

# What a run says of the refusals of the package, by check.
REFUSALS = """
import json
from attest.conformance.checks.refusal import CHECKS
from attest.conformance.running.judge import judge
from attest.conformance.running.plan import Restriction, load_profile, tasks
from my_attention.attest_subject import subject

names = tuple(check.name for check in CHECKS if check.applies(subject) is None)
planned = tasks(subject, load_profile("quick"), 0, Restriction(checks=names))
results = [result for task in planned for result in judge(subject, task.case, task.checks)]
print(json.dumps({result.check: result.verdict.value for result in results}))
"""


def code_blocks(page: Path, language: str) -> list[str]:
    return [snippet.text for snippet in snippets(page, language)]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder where the package is installed, its test beside it."""
    source = tmp_path_factory.mktemp("source")
    declaration, test, _ = code_blocks(README, "python")
    _, limits, *_ = code_blocks(PAGE, "python")
    (entry_point,) = code_blocks(PAGE, "toml")
    package = source / "my_attention"
    package.mkdir()
    (package / "__init__.py").write_text(KERNEL)
    (package / "attest_subject.py").write_text(declaration)
    (source / "pyproject.toml").write_text(PYPROJECT + entry_point)
    installed = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(installed), str(source)], check=True, cwd=source)
    (installed / "test_attention.py").write_text(test)
    (installed / "limits.py").write_text(limits)
    return installed


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a module, or code after `-c`, with the package installed."""
    return python(site, *(() if arguments[0] == "-c" else ("-m",)), *arguments)


def test_the_declaration_is_short() -> None:
    declaration, test, _ = code_blocks(README, "python")
    assert len(declaration.splitlines()) + len(test.splitlines()) < 30


def test_the_call_in_the_readme_runs(site: Path) -> None:
    *_, call = code_blocks(README, "python")
    called = run(site, "-c", f"{call}\nprint(out.shape)")
    assert called.stdout.strip() == "(2, 256, 8, 64)", called.stderr


def test_it_is_listed_by_its_entry_point(site: Path) -> None:
    listed = run(site, "attest", "list")
    assert listed.returncode == 0, listed.stderr
    assert "my_attention" in listed.stdout


def test_its_test_passes(site: Path) -> None:
    tested = run(site, "pytest", "-q", "-p", "no:cacheprovider", "test_attention.py")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "1 passed" in tested.stdout


def test_it_passes_every_refusal_that_it_is_asked(site: Path) -> None:
    """One line of validation: what is malformed PASSes, what is not declared is UNSUPPORTED."""
    judged = run(site, "-c", REFUSALS)
    assert judged.returncode == 0, judged.stderr
    verdicts = json.loads(judged.stdout)
    expected = {
        name: "PASS" if name.removeprefix("refusal.") in MALFORMED else "UNSUPPORTED" for name in verdicts
    }
    assert verdicts == expected
    assert {"refusal.key_batch", "refusal.scale_huge", "refusal.undeclared_window"} <= set(verdicts)


def test_the_limits_on_the_page_can_be_declared(site: Path) -> None:
    imports = "from limits import limited; from attest.conformance.cli.catalogue import limits"
    code = f"{imports}; print(list(limits(limited)))"
    declared = run(site, "-c", code)
    assert declared.returncode == 0, declared.stderr
    assert "not bias and mask in one call" in declared.stdout
    assert "dropout seeds of 32 bits" in declared.stdout


def test_a_defect_in_it_is_found_and_replays(site: Path) -> None:
    package = site / "my_attention" / "__init__.py"
    correct = package.read_text()
    package.write_text(correct.replace("<= jnp.arange(rows)", "< jnp.arange(rows)"))
    try:
        record = site / "run.json"
        options = ("--feature", "causal", "--check", "forward", "--examples", "4", "-n", "0")
        checked = run(site, "attest", "check", "my_attention", *options, "--json", str(record))
        assert checked.returncode == 1, checked.stdout + checked.stderr
        # A failure of meaning and one that precision could explain have a simplest case each.
        minimal = [r["case"] for r in json.loads(record.read_text())["results"] if r["minimal"]]
        case = min(minimal, key=tokens)
        assert tokens(case) <= 3
        question = {"subject": "my_attention", "check": "forward", "case": case}
        replayed = run(site, "attest", "replay", json.dumps(question))
        assert replayed.returncode == 1
    finally:
        package.write_text(correct)
    replayed = run(site, "attest", "replay", json.dumps(question))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
