"""The environment of a tuned configuration beside the call: device, driver, versions and our own source.

A configuration that was tuned in another environment is never read.
"""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("jax", "jaxlib", "triton", "jax_triton", "libtpu")
_SOURCE = Path(__file__).parents[1]
_SUFFIXES = (".py", ".toml")


def environment(device: Any = None) -> dict[str, str]:
    """Return the environment of a JAX device, by default the first one, as readable names and values."""
    device = jax.devices()[0] if device is None else device
    return {
        "device": f"{device.platform} {device.device_kind}",
        "driver": " ".join(str(device.client.platform_version).split()),
        **_versions(),
        "source": source_hash(),
    }


@cache
def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def source_hash() -> str:
    """Return a hash of the source and the tables of all kernels, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    files = (path for path in _SOURCE.rglob("*") if path.suffix in _SUFFIXES)
    for path in sorted(files, key=lambda path: path.relative_to(_SOURCE).as_posix()):
        digest.update(path.relative_to(_SOURCE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
