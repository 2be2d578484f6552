"""The tables that cases are drawn from."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def drawing() -> dict[str, Any]:
    """Return the tables of conformance/drawing/drawing.toml."""
    return tomllib.loads(Path(__file__).with_name("drawing.toml").read_text(encoding="utf-8"))
