"""The API pages have an entry for each public name, which mkdocstrings fills from the source."""

import ast
import re
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests.meta.processes import ROOT

PAGES = ROOT / "docs" / "reference"
ADAPTERS = ROOT / "kernels" / "adapters"


def entries(page: str) -> list[str]:
    """Return the names behind the `:::` of a page."""
    return re.findall(r"^::: (\S+)$", (PAGES / page).read_text(), flags=re.MULTILINE)


def public_names(module: Path) -> list[str]:
    """Return the functions and classes that a module offers: those of `__all__`, or its own."""
    body = ast.parse(module.read_text()).body
    for statement in body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    defined = [each.name for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    return sorted({name for name in defined if not name.startswith("_")})


def public_adapters() -> list[Path]:
    """Return the modules that no other adapter imports: users import these."""
    modules = [file for file in sorted(ADAPTERS.glob("*.py")) if file.stem != "__init__"]
    shared = re.findall(
        r"^from attest\.kernels\.adapters\.(\w+) import", "".join(map(Path.read_text, modules)), re.M
    )
    return [file for file in modules if file.stem not in shared]


@pytest.mark.parametrize(
    ("module", "page"),
    [
        ("attest", "api.md"),
        ("attest.kernels.operations", "api-operations.md"),
        ("attest.kernels.ring", "api-ring.md"),
    ],
)
def test_every_public_name_is_on_its_page(module: str, page: str) -> None:
    # Where a module and a function share a name, both this and mkdocstrings take the module.
    shown = list(map(resolve_name, entries(page)))
    names = import_module(module).__all__
    assert names
    assert [name for name in names if not any(getattr(import_module(module), name) is x for x in shown)] == []


@pytest.mark.parametrize("module", public_adapters(), ids=lambda module: module.stem)
def test_every_function_of_an_adapter_is_on_the_page(module: Path) -> None:
    shown = entries("api-adapters.md")
    expected = [f"attest.kernels.adapters.{module.stem}.{name}" for name in public_names(module)]
    assert expected
    assert [name for name in expected if name not in shown] == []
