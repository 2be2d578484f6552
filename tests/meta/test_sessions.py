"""What the nox sessions install and run, seen without installing or running it."""

import importlib.util
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.meta.processes import ROOT

pytest.importorskip("nox")

# What users install of ours, by the name that the session gives it.
ENVIRONMENTS = ("core", "suite", "triton")


class Session:
    """A session of nox that notes what it is asked to install and to run."""

    def __init__(self) -> None:
        self.installed: list[tuple[str, ...]] = []
        self.commands: list[tuple[str, ...]] = []
        self.env: dict[str, str] = {}
        self.posargs: list[str] = []
        self.virtualenv = SimpleNamespace(location="venv")

    def install(self, *arguments: str) -> None:
        self.installed.append(arguments)

    def run(self, *arguments: str, **options: Any) -> None:
        self.commands.append(arguments)


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def noted(run: Callable[..., None], *arguments: str) -> Session:
    session = Session()
    run(session, *arguments)
    return session


@pytest.mark.found_outside
def test_versions_installs_each_requirement_but_jax(noxfile: ModuleType) -> None:
    session = noted(noxfile.versions.func, "0.8.0")
    installed = {Requirement(each).name: str(Requirement(each).specifier) for each in session.installed[0]}
    project = noxfile.nox.project.load_toml(ROOT / "pyproject.toml")["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["suite"]]
    assert {*installed} == {Requirement(each).name for each in needed}
    assert (installed["jax"], installed["jaxlib"]) == ("==0.8.0", "==0.8.0")


@pytest.mark.found_outside
@pytest.mark.parametrize("installed", ENVIRONMENTS)
def test_minimums_installs_what_users_do_with_the_lowest_jax(installed: str, noxfile: ModuleType) -> None:
    session = noted(noxfile.minimums.func, installed)
    extras = {"core": ".", "suite": ".[suite]", "triton": ".[suite,triton]"}[installed]
    lowest = "jax==0.11.2" if installed == "triton" else "jax==0.6.1"
    for arguments in session.installed:
        assert {"--resolution", "lowest-direct", lowest, "--editable", extras} <= {*arguments}
    # Before anything is installed that users do not have.
    assert session.commands[0][-1] == "tests.core_alone"
    assert set(session.installed[0]) == {"--resolution", "lowest-direct", lowest, "--editable", extras}
    assert (len(session.installed) == 1) == (installed == "core")


def test_minimums_has_each_extra(noxfile: ModuleType) -> None:
    extras = noxfile.nox.project.load_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    assert set(ENVIRONMENTS) == {"core", *extras} == set(noxfile._INSTALLED)


def test_the_tests_that_minimums_names_exist(noxfile: ModuleType) -> None:
    named = (*noxfile._TESTS_OF_THE_SUITE, *noxfile._TESTS_OF_TRITON)
    assert [name for name in named if not (ROOT / name).exists()] == []
