"""The folder and the key of the cache of compiled programs.

A program is compiled for one CPU, so the key has all that a CPU can do, beside the versions of JAX.
"""

import hashlib
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Everything is kept: most programs of the cases compile in less than JAX's limit of a second.
SETTINGS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def prepare(shard: str) -> dict[str, str]:
    """Return the outputs of the step: the folder, the key and the part of it that older caches share.

    GitHub never changes a cache, so each run saves another one, and restores the newest of its prefix.
    """
    folder = Path(os.environ.get("RUNNER_TEMP", ".")) / "attest-jax-cache"
    made_for = "-".join((platform.system(), platform.machine(), _fingerprint(), shard.replace("/", "of")))
    prefix = f"attest-{made_for}-"
    run = "-".join(os.environ.get(name, "0") for name in ("GITHUB_RUN_ID", "GITHUB_RUN_ATTEMPT"))
    return {"cache-folder": str(folder), "cache-prefix": prefix, "cache-key": f"{prefix}{run}"}


def _fingerprint() -> str:
    """Return a name of the CPU's instructions and the versions of JAX."""
    cpu = Path("/proc/cpuinfo")
    found = re.search(r"^(flags|Features)\s*:(.*)$", cpu.read_text() if cpu.exists() else "", re.MULTILINE)
    words = [found[2] if found else platform.processor(), platform.python_version(), _version("jax")]
    return hashlib.sha256(" ".join([*words, _version("jaxlib")]).encode()).hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
