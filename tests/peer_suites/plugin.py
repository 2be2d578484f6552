"""A pytest plugin that judges a run of a peer's suite by the file that `--expected` names.

The plugin of a suite, `in_place.py`, puts `counted(function)` in the place of the peer's function.
"""

from collections.abc import Callable, Generator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.peer_suites.calls import Calls, counted_by
from tests.peer_suites.judge import Judgement, Outcome, judge, load_expectations, load_numbers, outcome_of

CALLS = pytest.StashKey[Calls]()
NUMBERS = Path(__file__).parent / "numbers.toml"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--expected", type=Path, required=True, help="how the tests end, a TOML file")
    parser.addoption("--select", action="append", help="a pattern of ids of tests that belong to the suite")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Judge(config.getoption("--expected")), "judge of a peer's suite")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are none of the suite's. They are not deselected: the run is complete."""
    patterns = config.getoption("--select") or ["*"]
    items[:] = [item for item in items if any(fnmatchcase(_name(item), each) for each in patterns)]


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a function that makes another one count its calls, for the test that runs."""
    calls = request.node.stash.setdefault(CALLS, Calls())
    return lambda function: counted_by(calls, function)


class Judge:
    """Collects the outcomes of all tests, and decides on the exit status in place of pytest."""

    def __init__(self, path: Path) -> None:
        self.expected = load_expectations(path)
        self.numbers = load_numbers(NUMBERS)
        self.ended: dict[str, Outcome] = {}
        self.failures: dict[str, list[Outcome]] = {}
        self.judgement = Judgement(())
        self.complete = True

    def pytest_deselected(self) -> None:
        self.complete = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        name = _name(item)
        if report.failed and call.excinfo is not None:
            # A test may fail several times: in subtests, in its call and when it ends.
            self.failures.setdefault(name, []).append(outcome_of(name, call.excinfo.value))
        elif report.skipped:
            self.ended.setdefault(name, Outcome(name, "skipped"))
        elif report.when == "call":
            self.ended[name] = _passed(name, item.stash.get(CALLS, Calls()))
        return report

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            failures = [each for found in self.failures.values() for each in found]
            others = [each for name, each in self.ended.items() if name not in self.failures]
            self.judgement = judge([*failures, *others], self.expected, self.numbers, self.complete)
            red = bool(self.judgement.problems)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if red else pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("judgement")
        for how, tests in self.judgement.ended.items():
            terminalreporter.line(f"{len({*tests})} {how}")
        for problem in self.judgement.problems:
            terminalreporter.line(problem, red=True)
        terminalreporter.line(f"{len(self.judgement.problems)} problems")


def _name(item: pytest.Item) -> str:
    """Return the id of a test without the folder of its file, of which pytest shows some part or none."""
    return f"{item.path.name}::{item.nodeid.partition('::')[2]}"


def _passed(name: str, calls: Calls) -> Outcome:
    if calls.refusals:
        return Outcome(name, "refused", messages=tuple(calls.refusals))
    jax.effects_barrier()  # the calls are counted while programs run
    return Outcome(name, "passed" if calls.ran else "apart")
