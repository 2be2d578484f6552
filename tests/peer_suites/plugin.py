"""A pytest plugin that judges a run of a peer's suite by the file that `--expected` names."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.peer_suites.judge import Judgement, Outcome, judge, load_expectations, outcome_of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--expected", type=Path, required=True, help="the failures that are expected, a TOML file"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Judge(config.getoption("--expected")), "judge of a peer's suite")


class Judge:
    """Collects the outcomes of all tests, and decides on the exit status in place of pytest."""

    def __init__(self, path: Path) -> None:
        self.expected = load_expectations(path)
        self.outcomes: dict[str, Outcome] = {}
        self.judgement = Judgement(())
        self.complete = True

    def pytest_deselected(self) -> None:
        self.complete = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        name = item.nodeid.rpartition("/")[2]
        if report.failed and call.excinfo is not None:
            self.outcomes[name] = outcome_of(name, call.excinfo.value)
        elif report.skipped:
            self.outcomes.setdefault(name, Outcome(name, "skipped"))
        elif report.when == "call":
            self.outcomes[name] = Outcome(name, "passed")
        return report

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.judgement = judge(list(self.outcomes.values()), self.expected, self.complete)
            red = bool(self.judgement.problems)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if red else pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("judgement")
        for reason, tests in self.judgement.excused.items():
            terminalreporter.line(f"{len(tests)} failed as expected. {reason}")
        for problem in self.judgement.problems:
            terminalreporter.line(problem, red=True)
        terminalreporter.line(f"{len(self.judgement.problems)} problems")
