"""The size limits of texts that are read and kept: the numbers of conformance/sizes.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Sizes:
    """The limits, as conformance/sizes.toml explains them."""

    record_bytes: int
    line_bytes: int
    request_bytes: int
    expectations_bytes: int
    depth: int
    exception_characters: int
    string_characters: int
    shown_results: int
    sentence_characters: int
    script_numbers: int


@cache
def sizes() -> Sizes:
    """Read the limits once."""
    return Sizes(**tomllib.loads(Path(__file__).with_name("sizes.toml").read_text()))
