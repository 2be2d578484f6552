"""The marker `gpu`: a session without the GPU that tests need leaves them out, and says so in one line.

`@pytest.mark.gpu` needs any GPU, `@pytest.mark.gpu("9.0")` one of that compute capability. A session that
names tests by their ids skips them instead, so that each says which GPU it needs.
"""

import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

_LEFT_OUT = pytest.StashKey[int]()
_GPU_PLATFORMS = {"cuda", "rocm", "gpu"}
# In a process of its own: in this one, JAX would keep most of the GPU's memory from processes of tests.
_PRINT = """
import jax
for device in jax.devices():
    if device.platform == "gpu":
        print(getattr(device, "compute_capability", "unknown"))
"""


@cache
def _capabilities() -> frozenset[str]:
    """Return the compute capabilities of the GPUs that JAX has here."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and _GPU_PLATFORMS.isdisjoint(platforms.split(",")):
        return frozenset()
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", _PRINT], env=environment, capture_output=True, check=False)
    if done.returncode:
        raise pytest.UsageError(f"JAX does not start: {done.stderr.decode(errors='replace')}")
    return frozenset(done.stdout.decode().split())


def _why_not(item: pytest.Item) -> str | None:
    """Return why a test cannot run here for want of a GPU, or None."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return None
    there = _capabilities()
    if there.intersection(marker.args) if marker.args else there:
        return None
    wanted = f"a GPU of compute capability {marker.args[0]}" if marker.args else "a GPU"
    return f"needs {wanted}; JAX has {', '.join(sorted(there)) or 'no GPU'} here"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests whose GPU is not here, or skip them where tests are named."""
    reasons = [_why_not(item) for item in items]
    if any("::" in argument for argument in config.args):
        for item, reason in zip(items, reasons, strict=True):
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
        return
    left_out = [item for item, reason in zip(items, reasons, strict=True) if reason is not None]
    config.hook.pytest_deselected(items=left_out)
    config.stash[_LEFT_OUT] = len(left_out)
    items[:] = [item for item, reason in zip(items, reasons, strict=True) if reason is None]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that started this one, where pytest-xdist runs, what was left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hear it; every worker collects all tests."""
    left_out = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[_LEFT_OUT] = max(left_out, node.config.stash.get(_LEFT_OUT, 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say once how many tests need a GPU."""
    left_out = config.stash.get(_LEFT_OUT, 0)
    if left_out:
        tests = "1 test needs" if left_out == 1 else f"{left_out:,} tests need"
        terminalreporter.write_line(
            f"{tests} a GPU that is not here: not run. Name one by its id to see why."
        )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "gpu(capability): needs a GPU, of this compute capability if any")
