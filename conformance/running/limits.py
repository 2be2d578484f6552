"""The time limits and counts of a run: the numbers of conformance/running/runner.toml."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def limits() -> Mapping[str, float]:
    """Read the numbers once."""
    return tomllib.loads(Path(__file__).with_name("runner.toml").read_text())
