"""The session `release` refuses what is not of the version; what it runs is the README's quick start."""

import sys

import pytest

from tests import quick_start
from tests.meta.fences import snippets
from tests.meta.processes import ROOT, python


def test_a_tag_of_another_version_is_refused() -> None:
    done = python(ROOT, "-m", "tests.release", "--tag", "v9.9.9")
    assert done.returncode == 2
    assert "got 'v9.9.9', but the tag of version 0.1.0 is v0.1.0" in " ".join(
        done.stderr.replace("│", "").split()
    )


def test_an_attest_of_another_version_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"^attest --version: got 'attest \S+', expected 'attest 9.9.9'$"):
        quick_start.main(sys.executable, "9.9.9")


def test_the_quick_start_has_commands_a_call_and_a_test_of_one_s_own_kernel() -> None:
    blocks = [block for block in snippets(ROOT / "README.md") if block.runs]
    assert [
        block.language for block in blocks if not block.title and block.language in ("bash", "python")
    ] == [
        "bash",
        "python",
    ]
    assert {block.title for block in blocks if block.title} == {
        "my_attention/attest_subject.py",
        "test_attention.py",
    }
