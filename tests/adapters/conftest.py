"""Model libraries promote dtypes and ranks; no test reads or writes the user's cache folder."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from attest.kernels.operations import functions


@pytest.fixture(autouse=True)
def promotion_of_model_libraries() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ATTEST_CACHE_DIR", str(tmp_path / "cache"))
    functions.default_executor.cache_clear()
    yield
    functions.default_executor.cache_clear()
