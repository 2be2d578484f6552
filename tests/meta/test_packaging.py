"""What is installed: the same from a checkout, from an sdist and from a ZIP without links."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests import annotated
from tests.core_alone import CALLS, load
from tests.meta.processes import ROOT, python

PACKAGES = ("conformance", "kernels", "reference", "reports")
# What no wheel holds: records and reports of benchmarks, tests and pages.
LEFT_OUT = ("data", "baselines", "benchmarks", "tests", "docs")


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)


def built(folder: Path, out: Path, kind: str) -> Path:
    """Builds a wheel or an sdist of a folder, with what is installed here."""
    done = run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", out, cwd=folder)
    assert done.returncode == 0, done.stderr
    (file,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return file


def listed(wheel: Path) -> list[str]:
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the checkout as git has them, links as links."""
    folder = tmp_path_factory.mktemp("sources")
    done = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in done.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(sources, tmp_path_factory.mktemp("wheel"), "wheel")


def test_a_wheel_holds_the_code_and_its_tables_and_nothing_else(sources: Path, wheel: Path) -> None:
    names = listed(wheel)
    expected = [
        f"attest/{file.relative_to(sources)}"
        for package in PACKAGES
        for file in (sources / package).rglob("*")
        if file.is_file() and "data" not in file.relative_to(sources).parts
    ]
    own = ["attest/__init__.py", "attest/__main__.py", "attest/py.typed"]
    assert names == sorted([*expected, *own])
    assert not [name for name in names if set(LEFT_OUT) & set(Path(name).parts)]
    assert wheel.stat().st_size < 2_000_000


def test_the_wheel_of_an_sdist_is_the_same(sources: Path, wheel: Path, tmp_path: Path) -> None:
    archive = built(sources, tmp_path / "sdist", "sdist")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.glob("attest_attention-*")
    assert listed(built(folder, tmp_path / "again", "wheel")) == listed(wheel)


def test_the_wheel_of_a_zip_without_links_is_the_same(sources: Path, wheel: Path, tmp_path: Path) -> None:
    """Where links cannot be stored they become files that hold the path."""
    folder = tmp_path / "zip"
    shutil.copytree(sources, folder, symlinks=True)
    for name in PACKAGES:
        (folder / "attest" / name).unlink()
        (folder / "attest" / name).write_text(f"../{name}")
    assert listed(built(folder, tmp_path / "out", "wheel")) == listed(wheel)


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_it_stands_beside_hugging_face_s_kernels(wheel: Path, first: str, tmp_path: Path) -> None:
    """PyPI's `kernels` has the name of a folder of ours."""
    install = (sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path)
    order = {"ours": [str(wheel)], "theirs": ["kernels"]}
    for whose in sorted(order, key=lambda name: name != first):
        done = run(*install, *order[whose], cwd=tmp_path)
        if done.returncode and whose == "theirs":
            pytest.skip(f"PyPI's kernels cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
    code = (
        "import importlib.util as u, attest.kernels;"
        "print(attest.kernels.__file__); print(u.find_spec('kernels').origin);"
        "print(attest.flash_attention.__module__)"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    ours, theirs, module = done.stdout.split()
    assert (ours, theirs) == (
        str(tmp_path / "attest" / "kernels" / "__init__.py"),
        str(tmp_path / "kernels" / "__init__.py"),
    )
    assert module == "attest.kernels.attention"
    assert "attest" not in Path(theirs).read_text()


# What jax 0.6.1 lacks where absl is not installed, and a finder that knows what the core installs alone.
CORE_ALONE = """
import re, sys
from importlib.metadata import distribution, packages_distributions
from importlib.metadata import PackageNotFoundError
from packaging.requirements import Requirement

installed, waiting = set(), ["attest-attention"]
while waiting:
    name = re.sub("[-_.]+", "-", waiting.pop()).lower()
    if name in installed:
        continue
    try:
        needed = [*map(Requirement, distribution(name).requires or [])]
    except PackageNotFoundError:
        continue  # For another platform.
    installed.add(name)
    waiting += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
normal = lambda name: re.sub("[-_.]+", "-", name).lower()
others = {
    package
    for package, names in packages_distributions().items()
    if not installed & set(map(normal, names)) and package not in ("attest", "tests")
}

class OnlyTheCore:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in others:
            raise ModuleNotFoundError(f"No module named {name!r}: the core does not install it", name=name)

for name in [name for name in sys.modules if name.partition(".")[0] in others]:
    del sys.modules[name]
sys.meta_path.insert(0, OnlyTheCore())
import jax
sys.modules["jax.export"] = None

from tests.core_alone import main
main()
"""


@pytest.mark.found_outside
def test_the_core_alone_is_enough_to_call_every_public_function() -> None:
    done = python(ROOT, "-W", "error", "-c", CORE_ALONE, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": as the oracle\n") == len(CALLS)


def test_each_public_function_of_the_kernels_is_called_with_the_core_alone() -> None:
    called = {(each.__module__, getattr(each, "__name__", "")) for each in map(load, CALLS)}
    public = {
        (module, name)
        for module, names in annotated.PUBLIC.items()
        for name in names
        if module.startswith("attest.kernels") and name.islower()
    }
    assert public - called == set()
