"""Model libraries promote dtypes and ranks; no test reads or writes the user's cache folder.

The libraries are in the dependency group adapters. Where one is not installed, its tests are left out.
"""

from collections.abc import Iterator
from importlib.util import find_spec

import jax
import pytest

from tests.kernels.operations.conftest import own_cache_folder

_NEEDS = {
    "test_flax_linen.py": ("flax",),
    "test_flax_nnx.py": ("flax",),
    "test_equinox.py": ("equinox",),
    "test_training.py": ("flax", "equinox"),
}
# A fixture of every test here.
__all__ = ["own_cache_folder"]

collect_ignore = [file for file, packages in _NEEDS.items() if None in map(find_spec, packages)]


@pytest.fixture(autouse=True)
def promotion_of_model_libraries() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
