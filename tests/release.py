"""Builds the wheel and the sdist, checks their metadata, and follows the README with each, installed alone.

uvx nox -s release -- [--jax 0.6.2] [--out FOLDER] [--tag v0.1.0]
"""

import shlex
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

_ROOT = Path(__file__).parents[1]

Tag = Annotated[str, typer.Option(help="The tag of the release: it must be that of the version.")]
Out = Annotated[Path | None, typer.Option(help="Where the files are kept.")]
Jax = Annotated[
    list[str] | None, typer.Option(help="The version of JAX beside them; repeatable. The newest by default.")
]


def main(tag: Tag = "", out: Out = None, jax: Jax = None) -> None:
    """Build the wheel and the sdist, and try them."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    version = project["version"]
    if tag not in ("", f"v{version}"):
        raise typer.BadParameter(
            f"got {tag!r}, but the tag of version {version} is v{version}", param_hint="--tag"
        )
    with TemporaryDirectory() as name:
        folder = Path(name)
        dist = out or folder / "dist"
        _run("-m", "uv", "build", "--quiet", "--out-dir", dist, _ROOT)
        stem = f"{project['name'].replace('-', '_')}-{version}"
        files = [dist / f"{stem}-py3-none-any.whl", dist / f"{stem}.tar.gz"]
        _run("-m", "twine", "check", "--strict", *files)
        for number, (file, chosen) in enumerate(product(files, jax or [""])):
            print(
                f"{file.name} with {f'jax {chosen}' if chosen else 'the newest jax that it allows'}",
                flush=True,
            )
            python = folder / str(number) / "bin" / "python"
            _run("-m", "uv", "venv", "--quiet", "--python", sys.executable, folder / str(number))
            needed = [f"{file}[suite]", "pytest", *([f"jax=={chosen}"] if chosen else [])]
            _run("-m", "uv", "pip", "install", "--quiet", "--python", python, *needed)
            _run("-m", "tests.quick_start", python, version)


def _run(*arguments: str | Path) -> None:
    """Run Python. Raises SystemExit if it fails; what it printed says why."""
    words = list(map(str, arguments))
    done = subprocess.run([sys.executable, *words], cwd=_ROOT, check=False)
    if done.returncode != 0:
        raise SystemExit(f"failed: python {shlex.join(words)}")


if __name__ == "__main__":
    typer.run(main)
