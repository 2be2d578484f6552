"""The time limits and counts of a run: the numbers of conformance/process/limits.toml."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def limits() -> Mapping[str, float]:
    """Read the numbers once."""
    return tomllib.loads(Path(__file__).with_name("limits.toml").read_text())
