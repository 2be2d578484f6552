"""The pytest plugin: a marker, fixtures and options for suites that judge kernels.

    @pytest.mark.attest(my_subject)
    def test_my_kernel(): ...

has one item for each check and each row of cases; `-k`, `-x`, `--lf` and xdist choose among them.

    def test_my_kernel(attest_conformance):
        attest_conformance(my_subject)

judges everything in one test. Loading this module imports neither NumPy nor JAX.
"""

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attest.conformance.pytest_items import AttestCase
    from attest.conformance.record import RunRecord
    from attest.conformance.subject import Subject

_MARKER = (
    "attest(subject, profile=None, seed=None, expectations=()): judge an attention kernel, in one item for"
    " each check and each row of cases. subject: an attest.Subject, or its name. expectations: TOML files of"
    " expected failures, relative to the test file. Options on the command line come first."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("attest", "conformance of attention kernels")
    group.addoption(
        "--attest-profile",
        help="how many cases to test: quick (the default), standard, nightly or production",
    )
    group.addoption("--attest-seed", type=int, help="of the drawn cases (default: 0)")
    group.addoption(
        "--attest-expectations",
        action="append",
        default=[],
        metavar="PATH",
        help="a TOML file of expected failures, or a folder of such files; repeatable",
    )
    group.addoption(
        "--attest-shrink",
        type=int,
        default=20,
        metavar="CALLS",
        help="call the kernel so often, at most, to simplify the first failure of each check (default: 20)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one item for each check and row of a marked function."""
    marker = metafunc.definition.get_closest_marker("attest")
    if marker is None:
        return
    config = metafunc.config
    items = _planned(metafunc, marker)
    if isinstance(items, str):  # raised here, so that no other exception is shown beside it
        pytest.fail(f"{metafunc.definition.name}: attest: {items}", pytrace=False)
    grouped = config.pluginmanager.hasplugin("xdist")
    digits = len(str(items[-1].row))
    rows = [f"row{item.row:0{digits}}" for item in items]
    if "attest_case" not in metafunc.fixturenames:
        metafunc.fixturenames.append("attest_case")
    metafunc.parametrize(
        "attest_case",
        [
            pytest.param(
                item,
                id=f"{item.id}-{row}",
                # One process judges a row, so that what it compiles is shared.
                marks=[pytest.mark.xdist_group(f"{metafunc.definition.nodeid}-{row}")] if grouped else [],
            )
            for item, row in zip(items, rows, strict=True)
        ],
        indirect=True,
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse the marker where pytest makes no items of it, which would pass without being judged."""
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("attest") is not None:
            call: Any = getattr(item, "callspec", None)
            if call is None or "attest_case" not in call.params:
                reason = "methods of unittest.TestCase cannot have this marker: use a function"
                raise pytest.UsageError(f"{item.nodeid}: attest: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run the body of a marked function, which may skip, then judge the item."""
    called = yield
    if pyfuncitem.get_closest_marker("attest") is not None:
        # Of the call, not of the fixture: pytest drops a fixture that no argument names.
        case: Any = pyfuncitem.callspec.params["attest_case"]
        _judge(pyfuncitem, case)
    return called


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report skipped items at their test, not in this file."""
    report = yield
    skipped = report.longrepr
    if isinstance(skipped, tuple) and skipped[0] == __file__:
        path, line, _ = item.reportinfo()
        report.longrepr = (str(path), (line or 0) + 1, skipped[2])
    return report


def _planned(metafunc: pytest.Metafunc, marker: pytest.Mark) -> "list[AttestCase] | str":
    """Return the items of a marked function, or in one sentence why there are none."""
    from attest.conformance.pytest_items import Options, marked_subject, planned_items

    options: Any = metafunc.config.option
    given = Options(
        options.attest_profile,
        options.attest_seed,
        _files(metafunc.config),
        max(options.attest_shrink, 0),
    )
    try:
        folder = metafunc.definition.path.parent
        return planned_items(marked_subject(marker.args, dict(marker.kwargs), folder, given))
    except (LookupError, TypeError, ValueError) as error:
        return str(error.args[0])
    except (SystemExit, GeneratorExit) as error:
        return f"the module of the subject raised {type(error).__name__}"


def _files(config: pytest.Config) -> tuple[Path, ...]:
    """Return the files of expectations that the command line names."""
    files: list[str] = config.option.attest_expectations
    return tuple(config.invocation_params.dir / file for file in files)


def _judge(function: pytest.Function, item: "AttestCase") -> None:
    from attest.conformance.pytest_items import judge_item
    from attest.conformance.testing import remember_judged, was_judged

    if not was_judged(item.subject):
        warning = remember_judged(item.subject)
        if warning is not None:
            function.warn(warning)
    judged = judge_item(item)
    if judged.outcome == "failed":
        pytest.fail(judged.text, pytrace=False)
    if judged.outcome == "skipped":
        pytest.skip(judged.text)
    if judged.outcome == "xfailed":
        pytest.xfail(judged.text)


@pytest.fixture
def attest_case(request: pytest.FixtureRequest) -> "AttestCase":
    """Return the item of a function with the marker `attest`: its check, subject, dtype, features and row."""
    case = getattr(request, "param", None)
    if case is None:
        pytest.fail("attest_case: the test has no marker @pytest.mark.attest(subject)", pytrace=False)
    return case


@pytest.fixture
def attest_conformance(request: pytest.FixtureRequest) -> "Callable[..., RunRecord]":
    """Return a function that holds a Subject to everything it declares, as `run_conformance_test` does.

    Each check is reported as a subtest of its own where this pytest has subtests; otherwise the test fails
    with all explanations. It returns the record. `expectations`: TOML files or folders of expected failures.
    """

    def conform(subject: "Subject", expectations: Sequence[Path] = ()) -> "RunRecord":
        from attest.conformance.running.plan import profile_names
        from attest.conformance.testing import conformance_record, failures_by_check

        options: Any = request.config.option
        profile, seed = options.attest_profile or "quick", options.attest_seed or 0
        if profile not in profile_names():
            pytest.fail(
                f"--attest-profile: got {profile!r}, expected {', '.join(profile_names())}", pytrace=False
            )
        known = [*expectations, *_files(request.config)]
        record = conformance_record(subject, profile, seed, known)
        failures = failures_by_check(record)
        subtests = _subtests(request)
        if subtests is None:
            explanations = [*failures.values()]
        else:
            explanations = []
            for check in sorted({result.check for result in record.results}):
                with subtests.test(msg=check):
                    if check in failures:
                        pytest.fail(failures[check], pytrace=False)
        explanations += record.problems
        if explanations:
            pytest.fail("\n\n".join([f"{subject.name} does not conform", *explanations]), pytrace=False)
        return record

    return conform


def _subtests(request: pytest.FixtureRequest) -> Any:
    try:
        return request.getfixturevalue("subtests")
    except pytest.FixtureLookupError:
        return None
