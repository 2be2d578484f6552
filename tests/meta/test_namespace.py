"""One namespace: nothing is importable twice, and importing costs nothing that is not used."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import attest

ROOT = Path(__file__).parents[2]
PACKAGES = ("conformance", "kernels", "reference", "reports")
# What no import of the package, of the oracle or of the plugin may load.
COSTLY = ("jax", "hypothesis", "typer", "rich", "jinja2", "matplotlib", "msgspec", "triton", "jaxtyping")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_bare_name_is_refused(name: str) -> None:
    """It would load every module a second time, as other classes."""
    refused = python(f"import {name}")
    assert refused.returncode == 1
    assert f"ImportError: import attest.{name}: {name} alone is a second copy" in refused.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_the_link_is_the_folder(name: str) -> None:
    link = ROOT / "attest" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


@pytest.mark.parametrize("name", ["attest", "attest.reference", "attest.conformance.pytest_plugin"])
def test_an_import_loads_nothing_that_it_does_not_use(name: str) -> None:
    code = f"import sys, {name}; print([m for m in {COSTLY!r} if m in sys.modules])"
    assert python(code).stdout.strip() == "[]"


@pytest.mark.parametrize("name", attest.__all__)
def test_a_public_name_is_what_its_module_has(name: str) -> None:
    thing = getattr(attest, name)
    assert thing is getattr(importlib.import_module(attest._HOMES[name]), name)
    assert name in dir(attest)
    assert thing.__doc__


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'attest' has no attribute 'flash'"):
        attest.flash  # noqa: B018


def test_without_its_extra_the_command_says_which_to_install() -> None:
    """As where the core alone is installed: neither library can be found."""
    code = """
import importlib.util, runpy, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("typer", "rich") else found(name, *more)
sys.argv = ["attest", "list"]
runpy.run_module("attest", run_name="__main__")
"""
    done = python(code)
    assert done.returncode == 2
    assert done.stderr == (
        'attest: needs rich, typer: install the extra suite, pip install "attest-attention[suite]"\n'
    )


def test_without_its_extra_a_name_of_the_suite_says_which_to_install() -> None:
    code = """
import sys
sys.modules["msgspec"] = None
from attest import flash_attention
from attest import run_conformance_test
"""
    done = python(code)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: attest.run_conformance_test needs the package msgspec, which is not installed: "
        'install the extra suite, pip install "attest-attention[suite]"'
    )


def test_the_type_checker_is_told_of_every_package() -> None:
    """It follows no links: `attest` alone would be two files, and no errors. nox counts what it has seen."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert sorted(settings["include"]) == ["attest", *(f"attest/{name}" for name in PACKAGES), "benchmarks"]
