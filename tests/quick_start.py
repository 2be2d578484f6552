"""Follows the README's quick start in an empty folder, with the attest that a Python has installed.

    python -m tests.quick_start PYTHON VERSION

PYTHON: of an environment where attest, its extra `suite` and pytest are installed. VERSION: that attest must
have. It ends with the first command that fails. It needs nothing but the standard library.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.meta.fences import snippets
from tests.own_kernel import KERNEL

_README = Path(__file__).parents[1] / "README.md"


def main(python: str, version: str) -> None:
    """Run the blocks of the page. Raises SystemExit with what failed."""
    blocks = [block for block in snippets(_README) if block.runs]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "my_attention").mkdir()
        (folder / "my_attention" / "__init__.py").write_text(KERNEL)
        for block in blocks:
            if block.title:
                (folder / block.title).write_text(block.text)
        shown = _run(folder, python, "-m", "attest", "--version")
        if shown.strip() != f"attest {version}":
            raise SystemExit(f"attest --version: got {shown.strip()!r}, expected 'attest {version}'")
        for block in blocks:
            if block.language == "bash":
                for line in block.text.splitlines():
                    _run(folder, python, "-m", *shlex.split(line, comments=True))
            elif block.language == "python" and not block.title:
                _run(folder, python, "-c", block.text)
        _run(folder, python, "-m", "attest", "check", "my_attention.attest_subject:subject")
        _run(folder, python, "-m", "pytest", "-q", "test_attention.py")


def _run(folder: Path, python: str, *arguments: str) -> str:
    """Run Python in the folder, and return what it printed."""
    print(f"$ python {shlex.join(arguments)[:100]}", flush=True)
    # Nothing of this process's own environment, which may have another attest.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [python, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}{done.stderr}\nended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
