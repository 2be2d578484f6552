"""The marker `process`: tests of several devices and of interpreted kernels run in processes made for them.

`@pytest.mark.process(devices=8, TRITON_INTERPRET="1")` names the devices that JAX must have, and variables
that must be set when Python starts. Where this process is not so, a second pytest, in one that is, runs the
test, which keeps its id and its outcome. That process stays for the tests of its file that follow, so that
they share what their module computes once.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any

import pytest

# Interpreted kernels are slow, and at night a property test draws many examples.
_SECONDS_A_TEST = 1800
# What a process takes at most to end once there is nothing more to run.
_SECONDS_TO_END = 60
# The file descriptor over which the second pytest is told what to run.
_DESCRIPTOR = "ATTEST_TESTS_DESCRIPTOR"
_DEVICES = "--xla_force_host_platform_device_count="
_RUNNING: dict[tuple[Any, ...], "_Process"] = {}


class _FailedError(Exception):
    """A failure in the other process; its one argument is all that there is to show."""


class ProcessItem(pytest.Item):
    """A test that another process runs."""

    def __init__(self, *, test: pytest.Item, needs: Mapping[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self._test = test
        self.needs = needs
        self.following = ""
        self.own_markers = test.own_markers
        self.keywords.update(test.keywords)

    def runtest(self) -> None:
        if self.config.pluginmanager.hasplugin(_Served.__name__):
            raise _FailedError(f"The process that was made for this test is not as it needs: {self.needs}.")
        for report in _process(self).run(self.nodeid, self.following):
            for title, text in report.sections:
                self.add_report_section("call", title, text)
            if report.skipped:
                reason = report.longrepr[2].removeprefix("Skipped: ")
                raise pytest.skip.Exception(reason, _use_item_location=True)
            if report.failed:
                raise _FailedError(report.longrepr)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, _FailedError):
            return excinfo.value.args[0]
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        return self._test.reportinfo()


@dataclass(eq=False)
class _Process:
    """A second pytest, on one file, and the connection over which it is told what to run."""

    config: pytest.Config
    file: str
    needs: Mapping[str, Any]
    _output: Any = field(init=False, default_factory=tempfile.TemporaryFile)

    def __post_init__(self) -> None:
        self._connection, theirs = Pipe()
        options = ["-q", "-m", "", "-p", __name__, "-p", "no:cacheprovider", "-p", "no:xdist"]
        if self.config.inipath:
            options += ["-c", str(self.config.inipath)]
        with theirs:
            self._running = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, f"--rootdir={self.config.rootpath}", self.file],
                cwd=self.config.rootpath,
                env={**_environment(self.needs), _DESCRIPTOR: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )

    def run(self, name: str, following: str) -> list[pytest.TestReport]:
        """Return the reports of a test's phases. Raises _FailedError where the process ends instead."""
        reports: list[pytest.TestReport] = []
        try:
            self._connection.send((name, following))
            while self._connection.poll(_SECONDS_A_TEST):
                data = self._connection.recv()
                if data is None:
                    return reports
                report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
                reports.append(report)
            status = f"gave no answer in {_SECONDS_A_TEST} seconds"
            self._running.kill()
            self._running.wait()
        except (EOFError, OSError):
            status = f"ended with status {self._running.wait()}"
        self._output.seek(0)
        said = self._output.read().decode(errors="replace")
        _close(self)
        raise _FailedError(f"The process of this test {status}:\n{said}")

    def close(self) -> None:
        self._connection.close()
        try:
            self._running.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._running.kill()
            self._running.wait()
        self._output.close()


def _environment(needs: Mapping[str, Any]) -> dict[str, str]:
    variables = {name: value for name, value in needs.items() if name != "devices"}
    if "devices" in needs:
        others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICES)]
        # First, since XLA reads none after a word that is no flag.
        variables |= {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join([f"{_DEVICES}{needs['devices']}", *others]),
        }
    return {**os.environ, **variables}


def _process(item: ProcessItem) -> _Process:
    key = item.path, *sorted(item.needs.items())
    if key not in _RUNNING:
        _RUNNING[key] = _Process(item.config, str(item.path), item.needs)
    return _RUNNING[key]


def _close(*processes: _Process) -> None:
    for key, process in list(_RUNNING.items()):
        if process in processes:
            del _RUNNING[key]
            process.close()


def _fits(needs: Mapping[str, Any]) -> bool:
    """Whether a test with these needs can run in this process."""
    if any(os.environ.get(name) != value for name, value in needs.items() if name != "devices"):
        return False
    if "devices" not in needs:
        return True
    import jax

    return jax.device_count() >= needs["devices"]


def _placed(item: pytest.Item) -> pytest.Item:
    needs: dict[str, Any] = {}
    for marker in item.iter_markers("process"):
        needs = {**marker.kwargs, **needs}
    if not needs or _fits(needs):
        return item
    return ProcessItem.from_parent(item.parent, name=item.name, test=item, needs=needs)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that cannot run in this process into others."""
    items[:] = map(_placed, items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Keep the processes of a file until its last test."""
    if isinstance(item, ProcessItem) and isinstance(nextitem, ProcessItem):
        item.following = nextitem.nodeid
    ran = yield
    if nextitem is None or nextitem.path != item.path:
        _close(*_RUNNING.values())
    return ran


def pytest_sessionfinish() -> None:
    """End the processes of a session that was interrupted."""
    _close(*_RUNNING.values())


class _Served:
    """The plugin of the second pytest: runs what it is told, and sends back the reports."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        tests = {item.nodeid: item for item in session.items}
        try:
            while True:
                name, following = self._connection.recv()
                if name not in tests:
                    print(f"{name} was not collected here.")
                    break
                item = tests[name]
                item.ihook.pytest_runtest_protocol(item=item, nextitem=tests.get(following))
                self._connection.send(None)
        except EOFError:
            pass
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(data)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; serve, where this is the second pytest."""
    config.addinivalue_line("markers", "process(devices, **variables): runs in a process that has these")
    descriptor = os.environ.pop(_DESCRIPTOR, None)
    if descriptor is not None:
        os.set_inheritable(int(descriptor), False)
        config.pluginmanager.register(_Served(config, Connection(int(descriptor))), _Served.__name__)
