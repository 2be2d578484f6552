"""The command as a function, in an environment that it may change."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from _pytest.pytester import SysModulesSnapshot

from attest.conformance.cli.commands import main


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _restored_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _modules_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what runs of pytester load, but for their tests: a module loaded twice has other classes."""
    snapshot = SysModulesSnapshot(preserve=lambda name: not name.startswith("test_"))
    monkeypatch.setattr(pytest.Pytester, "_Pytester__take_sys_modules_snapshot", lambda _: snapshot)


@pytest.fixture
def attest(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs the command in this process."""

    def run(*arguments: object) -> Done:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run
