"""Strictness for every test: no silent promotion in JAX, and in CI the same examples on every run."""

import logging
import os

from hypothesis import HealthCheck, settings

# Read when JAX is first imported, so that tests without JAX do not wait for it; processes started by a test
# inherit them.
os.environ.update(
    JAX_ENABLE_X64="false",
    JAX_NUMPY_DTYPE_PROMOTION="strict",
    JAX_NUMPY_RANK_PROMOTION="raise",
)
# absl and XLA write to stderr of their own accord; only errors are worth a reader's time.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
logging.getLogger("absl").setLevel(logging.ERROR)

_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("dev", deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None, print_blob=True)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
