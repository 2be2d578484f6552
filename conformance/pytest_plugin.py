"""The pytest plugin: two options and one fixture for suites that judge kernels.

    def test_my_kernel(attest_conformance):
        attest_conformance(my_subject)

Loading it imports neither NumPy nor JAX.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attest.conformance.record import RunRecord
    from attest.conformance.subject import Subject


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options: the profile and the seed."""
    group = parser.getgroup("attest", "conformance of attention kernels")
    group.addoption(
        "--attest-profile",
        default="quick",
        help="how many cases to judge: quick (the default), standard or nightly",
    )
    group.addoption("--attest-seed", type=int, default=0, help="of the drawn cases (default: 0)")


@pytest.fixture
def attest_conformance(request: pytest.FixtureRequest) -> "Callable[..., RunRecord]":
    """Return a function that holds a Subject to everything it declares, as `run_conformance_test` does.

    Each check is reported as a subtest of its own where this pytest has subtests; otherwise the test fails
    with all explanations. It returns the record. `expectations`: TOML files or folders of known failures.
    """

    def conform(subject: "Subject", expectations: Sequence[Path] = ()) -> "RunRecord":
        from attest.conformance.running.plan import profile_names
        from attest.conformance.testing import conformance_record, failures_by_check

        options: Any = request.config.option
        profile, seed = options.attest_profile, options.attest_seed
        if profile not in profile_names():
            pytest.fail(
                f"--attest-profile: got {profile!r}, expected {', '.join(profile_names())}", pytrace=False
            )
        record = conformance_record(subject, profile, seed, expectations)
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
