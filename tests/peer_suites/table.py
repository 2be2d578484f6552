"""The table of suites, `suites.toml`: what each needs, and where its tests are."""

import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from sysconfig import get_path
from typing import Any, Literal

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Suite:
    """A suite of a peer.

    requirements: what to install beside the project, the peer first. source: where the tests are: "here",
    beside this file; "wheel", in the installed packages; "sdist", in the sdist of the peer. tests: files
    there. select: patterns of the ids of the tests that belong to the suite; all by default. environment:
    variables that the run needs.
    """

    requirements: tuple[str, ...]
    source: Literal["here", "wheel", "sdist"]
    tests: tuple[str, ...]
    select: tuple[str, ...] = ("*",)
    environment: Mapping[str, str] = field(default_factory=dict)


def load_suites(path: Path = HERE / "suites.toml") -> dict[str, Suite]:
    """Return the suites of the table by their names."""
    tables = tomllib.loads(path.read_text())
    return {name: _suite(table) for name, table in tables.items()}


def test_files(suite: Suite) -> list[Path]:
    """Return the files with the tests of a suite; downloads the sdist of a peer once for each environment."""
    folder = {"here": lambda: HERE, "wheel": _packages, "sdist": lambda: _sdist(suite.requirements[0])}
    files = [folder[suite.source]() / name for name in suite.tests]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{suite.requirements[0]} has no file {', '.join(missing)}")
    return files


def _suite(table: dict[str, Any]) -> Suite:
    given: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in table.items()}
    return Suite(**given)


def _packages() -> Path:
    return Path(get_path("purelib"))


def _sdist(requirement: str) -> Path:
    """Return the folder of an unpacked sdist, in the environment that runs."""
    folder = Path(sys.prefix) / "sdists" / requirement
    if not folder.exists():
        folder.mkdir(parents=True)
        asked = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), requirement]
        subprocess.run([sys.executable, "-m", "pip", "download", *asked], check=True)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return unpacked
