"""Model libraries promote dtypes and ranks; no test reads or writes the user's cache folder.

The libraries are in the dependency group adapters. Where one is not installed, its tests are left out.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from attest.kernels.operations import functions

_NEEDS = {
    "test_flax_linen.py": ("flax",),
    "test_flax_nnx.py": ("flax",),
    "test_equinox.py": ("equinox",),
    "test_training.py": ("flax", "equinox"),
}
collect_ignore = [file for file, packages in _NEEDS.items() if None in map(find_spec, packages)]


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
