"""Strictness for every test: no silent promotion in JAX, and in CI the same examples on every run.

Tests that nightly.toml names are marked `nightly`. Coverage is of `reference`, by the tests that reach all of
it: tracing would make the others half as slow again.
"""

import logging
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import annotated

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

# Without bytecode each process that a test starts would compile JAX and the project again, for two seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

annotated.install()

pytest_plugins = ["tests.gpus", "tests.own_process"]

_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("dev", deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile(
    "ci", settings.get_profile("dev"), max_examples=50, derandomize=True, database=None, print_blob=True
)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

# Tests that reach every line of `reference`, which is all that they are traced for.
_COVERING = (
    "tests/reference/",
    "tests/conformance/judging/",
    "tests/conformance/subjects/test_row_maximum_subject.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Stop the first of the two tracers that pytest-cov starts in a worker of pytest-xdist.

    The marker `no_cover` pauses only the second, and the first would trace in its place.
    """
    plugin = session.config.pluginmanager.getplugin("_cov")
    if plugin is not None and plugin.cov_controller and hasattr(session.config, "workerinput"):
        plugin.cov_controller.cov.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of nightly.toml; where all tests are collected, every pattern must find some."""
    if config.pluginmanager.hasplugin("pytest_cov"):
        for item in items:
            if not item.nodeid.startswith(_COVERING):
                item.add_marker("no_cover")
    names = {item: item.nodeid for item in items}
    started = {item: name for item, name in names.items() if item.get_closest_marker("process")}
    for group in tomllib.loads((Path(__file__).parent / "nightly.toml").read_text())["moved"]:
        able = started if group.get("in_processes", False) else names
        patterns = {
            pattern: _matching(pattern, able) for pattern in (*group["tests"], *group.get("stay", ()))
        }
        for pattern, found in patterns.items():
            if not found and not config.option.file_or_dir:
                raise pytest.UsageError(f"tests/nightly.toml: {pattern!r} is the id of no test")
        staying = {item for pattern in group.get("stay", ()) for item in patterns[pattern]}
        moved = {item: None for pattern in group["tests"] for item in patterns[pattern]}
        if "every" in group:
            staying.update(_sample((x for x in moved if not x.get_closest_marker("nightly")), group["every"]))
            staying.update(item for item in moved if item.get_closest_marker("gpu"))
        for item in moved.keys() - staying:
            item.add_marker("nightly")


def _sample(items: Iterable[pytest.Item], every: int) -> Iterator[pytest.Item]:
    """Yield the first of the tests of each function, and each so many after it."""
    counted = Counter[str]()
    for item in items:
        function = item.nodeid.partition("[")[0]
        if counted[function] % every == 0:
            yield item
        counted[function] += 1


def _matching(pattern: str, items: dict[pytest.Item, str]) -> list[pytest.Item]:
    expression, first = re.compile(".*".join(map(re.escape, pattern.split("*")))), pattern.partition("*")[0]
    return [item for item, name in items.items() if name.startswith(first) and expression.fullmatch(name)]
