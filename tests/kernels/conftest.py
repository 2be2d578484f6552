"""S19: no test leaves the interpreter with an access outside the arrays that nobody asked about."""

from collections.abc import Generator

import pytest

try:
    from attest.kernels.triton.target import INTERPRETED
except ModuleNotFoundError:  # Triton is an extra, and the other kernels are tested without it.
    INTERPRETED = False


@pytest.fixture(autouse=True)
def no_access_outside_the_arrays() -> Generator[None]:
    yield
    if INTERPRETED:
        from attest.kernels.triton.memory import drain_violations

        assert [str(violation) for violation in drain_violations()] == []
