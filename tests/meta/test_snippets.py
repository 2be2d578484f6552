"""The snippets of README and docs run: Python in the order of the page, commands of attest on few cases."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.meta.fences import Snippet, snippets
from tests.meta.processes import ROOT, python
from tests.meta.test_third_party_package import KERNEL

# The tutorial has a test of its own, which fixes the kernel between two commands.
TUTORIAL = ROOT / "docs" / "tutorial" / "first-kernel.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages whose snippets take long, and show what the gates and other tests run.
SLOW = [
    ROOT / "docs" / name
    for name in (
        "explanation/pallas-tpu.md",
        "explanation/triton.md",
        "how-to/adapters-peers.md",
        "reference/jax-nn.md",
        "reference/laws.md",
    )
]
LANGUAGES = ("python", "bash", "toml", "json", "yaml", "text")
COMMANDS = ("gate", "check", "replay", "compare", "history", "report", "list", "merge", "compile")
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")

# Options that make a command quick, whatever the page says: how many cases, and in how many processes.
QUICK = {
    "check": {"--examples": "1", "-n": "0"},
    "replay": {"-n": "0"},
    "compile": {"-n": "0"},
}


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


def followed(page: Path) -> list[Snippet]:
    """The snippets that are run or saved."""
    found = [snippet for snippet in snippets(page) if snippet.runs]
    return [snippet for snippet in found if snippet.language in ("python", "bash") or snippet.title]


def commands(snippet: Snippet) -> Iterator[list[str]]:
    """The words of each command, comments left out."""
    for line in snippet.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def quick(words: Sequence[str]) -> list[str]:
    """The arguments of attest, on as few cases as can be, and for one check where none is named.

    Of a kernel of ours that is a refusal, which compiles nothing.
    """
    command, *arguments = words
    for option, value in QUICK.get(command, {}).items():
        if option in arguments:
            arguments[arguments.index(option) + 1] = value
        else:
            arguments += [option, value]
    if command == "check" and "--check" not in arguments:
        arguments += ["--check", "refusal.scale_huge" if arguments[0] == "xla.flash_attention" else "forward"]
    return [command, *arguments]


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_fence_has_a_language_and_data_can_be_read(page: Path) -> None:
    for snippet in snippets(page):
        assert snippet.language in LANGUAGES, snippet.text
        assert set(snippet.attributes) <= {"title", "exit", "norun"}
        if snippet.language == "toml":
            tomllib.loads(snippet.text)
        if snippet.language == "json":
            json.loads(snippet.text)
        if snippet.language == "yaml":
            yaml.safe_load(snippet.text)


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_a_block_that_is_not_run_says_why(page: Path) -> None:
    for snippet in snippets(page):
        if not snippet.runs:
            assert len(snippet.attributes["norun"].split()) > 1, snippet.text
        elif snippet.language == "bash":
            for words in commands(snippet):
                assert "attest" in words, words
                assert words[words.index("attest") + 1] in COMMANDS, words


@pytest.mark.parametrize("pages", ["most", "slow"])
def test_the_snippets_of_every_page_run(pages: str, tmp_path: Path) -> None:
    """In one process, since each would import JAX and compile the same kernels."""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    done = python(tmp_path, "-m", "tests.meta.test_snippets", str(tmp_path), pages, **variables)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_snippets() -> None:
    """So that the tests above cannot pass because they find nothing to run."""
    found = [snippet for page in PAGES for snippet in followed(page)]
    assert sum(snippet.language == "python" for snippet in found) >= 12
    assert sum(snippet.language == "bash" for snippet in found) >= 15
    assert all(followed(page) for page in SLOW)


def follow_all(folder: Path, slow: bool) -> int:
    """Follow each page in a folder of its own below `folder`. Returns how many did not do what they say.

    slow: follow the pages of SLOW, instead of the others.
    """
    failed = 0
    for number, page in enumerate(p for p in PAGES if p != TUTORIAL and (p in SLOW) == slow):
        here = folder / str(number)
        (here / "my_attention").mkdir(parents=True)
        (here / "my_attention" / "__init__.py").write_text(KERNEL)
        os.chdir(here)
        sys.path.insert(0, str(here))
        print(f"=== {title(page)}", flush=True)
        try:
            follow(page)
        except Exception:
            failed += 1
            traceback.print_exc(file=sys.stdout)
        sys.path.remove(str(here))
        for name in [name for name in sys.modules if name.partition(".")[0] == "my_attention"]:
            del sys.modules[name]
    return failed


def follow(page: Path) -> None:
    """Run the snippets of a page in this folder. Raises at the first that does not do what the page says."""
    names: dict[str, Any] = {"__name__": "snippet"}
    for snippet in followed(page):
        if snippet.title:
            Path(snippet.title).parent.mkdir(parents=True, exist_ok=True)
            Path(snippet.title).write_text(snippet.text)
        if snippet.language == "python" and snippet.title:
            runpy.run_path(snippet.title)
        elif snippet.language == "python":
            exec(compile(snippet.text, "<snippet>", "exec"), names)
        elif snippet.language == "bash":
            for words in commands(snippet):
                _attest(words, int(snippet.attributes.get("exit", "0")))


def _attest(words: Sequence[str], expected: int) -> None:
    """Run one command line, in this process unless that would have to start with other variables."""
    from attest.conformance.cli.commands import main

    print("$", *words, flush=True)
    at = words.index("attest")
    arguments = quick(words[at + 1 :])
    variables = dict(word.split("=", 1) for word in words[:at] if ASSIGNMENT.fullmatch(word))
    if not variables.items() <= os.environ.items():
        line = [sys.executable, "-m", "attest", *arguments]
        status = subprocess.run(line, env={**os.environ, **variables}, check=False).returncode
    else:
        status = main(arguments)
    if status != expected:
        raise AssertionError(f"{shlex.join(words)}: exit status {status}, expected {expected}")


if __name__ == "__main__":
    sys.exit(follow_all(Path(sys.argv[1]), slow=sys.argv[2] == "slow"))
