"""An environment names the device, the versions, the flags, and the commit of attest itself."""

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import jax
import pytest

from attest.conformance.running.environment import (
    commit,
    declared_blocks,
    environment,
    kernel_files,
    own_version,
    today,
)
from attest.conformance.subject import Tiling, find

ROOT = Path(__file__).parents[3]
IDENTITY = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def test_the_blocks_that_subjects_declare():
    tilings = (Tiling({}, 16, 32), Tiling({}, None, 64))
    subjects = {"a": replace(find("xla.attention"), tilings=tilings), "b": find("xla.flash_attention")}
    found = declared_blocks(subjects)
    assert found["a"] == "16x32, allx64"
    assert found["b"].startswith("16x16, 8x32, ")


def test_the_file_of_a_kernel_is_that_of_its_function_or_of_its_subject(monkeypatch, tmp_path):
    here = "tests/conformance/running/test_environment.py"
    right = find("xla.attention")
    calls = {
        "function": test_the_blocks_that_subjects_declare,
        "partial": partial(test_the_blocks_that_subjects_declare),
        "jitted": jax.jit(test_the_blocks_that_subjects_declare),
        f"{__name__}:subject": len,
        "unknown": len,
    }
    monkeypatch.chdir(ROOT)
    files = kernel_files({name: replace(right, call=call) for name, call in calls.items()})
    assert files == dict.fromkeys([name for name in calls if name != "unknown"], here)
    monkeypatch.chdir(tmp_path)
    assert kernel_files({"jitted": replace(right, call=calls["jitted"])}) == {"jitted": str(ROOT / here)}


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True, cwd=folder, env={**os.environ, **IDENTITY})


def committed(folder: Path) -> None:
    """Make a repository of a folder, with its files in one commit."""
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        git(folder, *arguments)


def package(home: Path) -> Path:
    """Lay the packages of attest into a folder, as an installed wheel has them; return the folder."""
    for name in ("conformance", "kernels", "reference", "reports"):
        ignore = shutil.ignore_patterns("__pycache__", "data")
        shutil.copytree(ROOT / name, home / "attest" / name, ignore=ignore)
    for file in ("__init__.py", "__main__.py"):
        shutil.copy(ROOT / "attest" / file, home / "attest" / file)
    return home


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A folder that looks like a checkout of attest, and is not in a repository yet."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("ATTEST_COMMIT", raising=False)
    home = tmp_path / "checkout"
    home.mkdir()
    (home / "pyproject.toml").write_text('[project]\nname = "attest-attention"\nversion = "9.8.7"\n')
    return home


def test_it_names_versions_flags_and_commit(monkeypatch):
    environment()  # XLA must not begin with a flag that it does not know
    monkeypatch.setenv("XLA_FLAGS", "--a_flag")
    monkeypatch.setenv("ATTEST_BLOCKS", "own.toml")
    found = json.loads(json.dumps(environment()))
    assert {"python", "device", "platform", "commit"} <= set(found)
    assert {"jax", "jaxlib", "numpy"} <= set(found["versions"])
    assert found["flags"]["XLA_FLAGS"] == "--a_flag"
    assert found["flags"]["ATTEST_BLOCKS"] == "own.toml"
    assert environment() == environment()


@pytest.mark.parametrize("zone", ["Etc/GMT+12", "Etc/GMT-14"])
def test_the_date_is_the_day_in_utc(zone, monkeypatch):
    """In one of the two, the local day is another one at any time."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", zone)
        time.tzset()
        before, found = datetime.now(UTC).date(), today()
        after = datetime.now(UTC).date()
    time.tzset()
    assert found in (str(before), str(after))


@pytest.mark.found_outside
def test_it_names_our_own_version_and_commit_in_any_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("ATTEST_COMMIT", raising=False)
    (tmp_path / "file").write_text("not ours")
    committed(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = environment()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found["versions"][project["name"]] == project["version"]
    assert found["commit"] == commit(ROOT)
    theirs = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tmp_path, text=True).strip()
    assert theirs not in found["commit"]


@pytest.mark.found_outside
def test_installed_packages_name_the_version_of_their_distribution_and_no_commit(tmp_path):
    """Here inside somebody else's repository, even in its commit, and started from its folder."""
    home = package(tmp_path / "site-packages")
    metadata = home / "attest_attention-4.5.6.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: attest-attention\nVersion: 4.5.6\n")
    committed(tmp_path)
    program = (
        "import json; from attest.conformance.running.environment import environment;"
        " print(json.dumps(environment()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={
            name: value
            for name, value in (os.environ | {"PYTHONPATH": str(home), "JAX_PLATFORMS": "cpu"}).items()
            if name != "ATTEST_COMMIT"
        },
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert (found["versions"]["attest-attention"], found["commit"]) == ("4.5.6", "")


def test_a_checkout_names_its_version_whatever_is_installed(checkout):
    assert own_version(checkout) == "9.8.7"
    (checkout / "pyproject.toml").write_text('[project]\nname = "attest"\nversion = "1"\n')
    assert own_version(checkout) != "1"
    (checkout / "pyproject.toml").write_text("[project")
    assert own_version(checkout) != "9.8.7"


def test_the_commit_is_that_of_the_checkout(checkout):
    assert commit(checkout) == ""
    committed(checkout)
    clean = commit(checkout)
    assert len(clean) == 40
    (checkout / "pyproject.toml").write_text((checkout / "pyproject.toml").read_text() + "\n")
    assert commit(checkout) == f"{clean}+dirty"


@pytest.mark.found_outside
def test_a_copy_inside_another_repository_has_no_commit(checkout, monkeypatch):
    committed(checkout.parent)
    assert commit(checkout) == ""
    # A hook of that repository sets this for all that it starts.
    monkeypatch.setenv("GIT_DIR", str(checkout.parent / ".git"))
    assert commit(checkout) == ""


def test_a_repository_runs_no_program_of_its_own(checkout, tmp_path):
    monitor = checkout / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch '{tmp_path}/has run'\n")
    monitor.chmod(0o755)
    committed(checkout)
    git(checkout, "config", "core.fsmonitor", str(monitor))
    assert len(commit(checkout)) == 40
    assert not (tmp_path / "has run").exists()


def test_the_commit_is_told_where_there_is_no_checkout_or_another(checkout, monkeypatch):
    monkeypatch.setenv("ATTEST_COMMIT", "0123abcd")
    assert commit(checkout.parent) == "0123abcd"
    committed(checkout)
    assert commit(checkout) == "0123abcd"
