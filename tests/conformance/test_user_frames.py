"""An exception of a kernel says in which line of the user's files it was raised."""

import linecache
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import pytest

from attest import Subject
from attest.conformance.cases.case import Case
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge
from attest.conformance.user_frames import raised, user_frames

HERE = "tests/conformance/test_user_frames.py"


def fails():
    return jnp.einsum("bd,dk->bk", jnp.zeros((2, 3)), jnp.zeros((2, 3)))


def caught(call) -> Exception:
    with pytest.raises(Exception) as found:  # noqa: PT011 - any
        call()
    return found.value


def test_the_last_line_is_the_users_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    *_, last = user_frames(caught(fails))
    assert last.startswith(f"at {HERE}:")
    assert last.endswith(' in fails: return jnp.einsum("bd,dk->bk", jnp.zeros((2, 3)), jnp.zeros((2, 3)))')


def test_no_frame_is_of_jax_or_of_the_suite():
    subject = Subject(name="raises", call=lambda query, key, value: fails())
    (result,) = judge(subject, Case(), ("forward",))
    assert result.verdict is Verdict.FAIL
    said, *frames = result.message.splitlines()
    assert said.startswith("raised ")
    frames = [line for line in frames if line.startswith("at ")]
    assert frames
    assert all(HERE in line for line in frames)


def test_code_that_is_installed_shows_its_frames_if_there_are_no_others(tmp_path, monkeypatch):
    file = tmp_path / "theirs" / "kernel.py"
    source = "def attention():\n    raise ValueError('no')\n"
    linecache.cache[str(file)] = (len(source), None, source.splitlines(keepends=True), str(file))
    module = ModuleType("theirs")
    exec(compile(source, str(file), "exec"), module.__dict__)
    monkeypatch.setattr("attest.conformance.user_frames._PACKAGES", (tmp_path, Path(__file__).parent))
    *_, last = user_frames(caught(module.attention))
    assert last.endswith("kernel.py:2 in attention: raise ValueError('no')")


def test_an_exception_without_frames_is_its_text():
    assert raised(ValueError("no"), " (advice)") == "raised ValueError: no (advice)"
