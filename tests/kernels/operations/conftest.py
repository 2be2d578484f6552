"""No test of operations reads or writes the user's cache folder."""

from collections.abc import Iterator

import pytest

from attest.kernels.operations import functions


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path, monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("ATTEST_CACHE_DIR", str(tmp_path / "cache"))
    functions.default_executor.cache_clear()
    yield
    functions.default_executor.cache_clear()
