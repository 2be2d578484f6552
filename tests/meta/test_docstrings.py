"""Docstrings of functions start with an imperative verb of a reviewed list, tests/meta/verbs.toml.

Ruff's D401 passes many first words that are no verbs, such as "Whether", "How" and "What".
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.meta.processes import ROOT

FOLDERS = ("attest", "conformance", "kernels", "reference", "reports")
VERBS = tomllib.loads((ROOT / "tests" / "meta" / "verbs.toml").read_text())["verbs"]
# What is read as an attribute is described by a noun; an overload has the docstring of its function.
NO_FUNCTIONS = {"property", "cached_property", "setter", "deleter", "overload"}
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "noxfile.py", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    if not any(parent.is_symlink() for parent in path.parents)
)


def faults(name: str, source: str) -> Iterator[str]:
    """Yield what to mend in a file: functions whose docstring starts with no verb of the list."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        decorators = {ast.unparse(x).partition("(")[0].rpartition(".")[2] for x in node.decorator_list}
        if text is None or decorators & NO_FUNCTIONS:
            continue
        word = (text.split() or [""])[0].rstrip(".,:;")
        if word not in VERBS:
            yield (
                f"{name}:{node.body[0].lineno}: {node.name}: got {word!r} as the docstring's first word, "
                f"expected an imperative verb. Start with one, as 'Return the rows of ...' for 'The rows of "
                f"...'; if {word!r} is an imperative verb, add it to tests/meta/verbs.toml."
            )


@pytest.mark.parametrize("name", FILES)
def test_the_docstring_of_a_function_starts_with_a_verb(name: str) -> None:
    found = list(faults(name, (ROOT / name).read_text()))
    assert not found, "\n".join(found)


def test_every_folder_is_read() -> None:
    assert {Path(name).parts[0] for name in FILES} == {*FOLDERS, "noxfile.py"}


@pytest.mark.parametrize("verb", ["Return", "Compute"])
def test_a_verb_passes(verb: str) -> None:
    assert not list(faults("a.py", f'def f():\n    """{verb} the rows."""\n'))


@pytest.mark.parametrize(
    "word", ["Whether", "How", "What", "Where", "Which", "The", "A", "Blocks", "Returns", "return", "[B"]
)
@pytest.mark.parametrize("scope", ["", "@jit\n", "async ", "class A:\n  ", "def g():\n  ", "if x:\n  "])
def test_another_word_is_found(scope: str, word: str) -> None:
    (found,) = faults("a.py", f'{scope}def _f(): "{word} rows."\n')
    line = scope.count("\n") + 1
    assert found.startswith(f"a.py:{line}: _f: got {word!r} as the docstring's first word, expected")
    assert found.endswith(f"if {word!r} is an imperative verb, add it to tests/meta/verbs.toml.")


@pytest.mark.parametrize(
    "source",
    [
        'class A:\n  "The rows."\n',
        '"The rows."\n',
        'class A:\n  @property\n  def f(self): "The rows."\n',
        'class A:\n  @functools.cached_property\n  def f(self): "The rows."\n',
        '@overload\ndef f(): "The rows."\n',
        "def f(): ...\n",
    ],
)
def test_what_is_no_function_may_start_with_a_noun(source: str) -> None:
    assert not list(faults("a.py", source))


def test_the_list_is_sorted_and_has_no_verb_twice() -> None:
    assert sorted(set(VERBS)) == VERBS
