"""The environment of a run: device, versions, flags and commit, without a timestamp."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("attest", "jax", "jaxlib", "numpy", "ml_dtypes", "hypothesis", "triton", "jax-triton")
_FLAGS = ("XLA_", "JAX_", "TRITON_", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_GIT_SECONDS = 10.0


def environment() -> dict[str, Any]:
    """Return what may differ between two runs of the same kernels, for their records."""
    devices = jax.devices()
    return {
        "backend": jax.default_backend(),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "flags": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_FLAGS)},
        "commit": _commit(Path.cwd()),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """The model of the processor where the system has it: its instruction set decides the last bits."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _commit(folder: Path) -> str:
    """The commit that is checked out, "+dirty" if files differ from it; "" outside a checkout.

    The variable ATTEST_COMMIT holds it where the files were copied there without their history.
    """
    copied = os.environ.get("ATTEST_COMMIT", "")
    head = _git(folder, ("rev-parse", "HEAD"))
    if copied or not head:
        return copied
    return f"{head}+dirty" if _git(folder, ("status", "--porcelain", "--untracked-files=no")) else head


def _git(folder: Path, arguments: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            # A repository can make `git status` run a program, which may be somebody else's.
            ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
