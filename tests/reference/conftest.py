"""What other tests have computed is not kept for those of `reference`."""

import pytest

from attest.reference import double_double, judgements


@pytest.fixture(scope="session", autouse=True)
def nothing_is_cached() -> None:
    """Coverage counts the lines that these tests run, which a cache that is filled would spare them."""
    judgements._thresholds.cache_clear()
    double_double._tanh_table.cache_clear()
