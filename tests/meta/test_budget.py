"""The budget of the project's CI: its parts are those of the nox session `tests`, and they fit."""

import re
import tomllib

from tests.meta.processes import ROOT

MINUTES = tomllib.loads((ROOT / "tests" / "budget.toml").read_text())["minutes"]
# What a change may wait for: 20 minutes of two cores.
TOTAL = 40


def test_the_parts_fit_the_whole() -> None:
    assert sum(MINUTES.values()) <= TOTAL
    assert min(MINUTES.values()) > 0


def test_the_parts_are_those_of_the_session() -> None:
    parts = re.findall(r'_part\(session, "([^"]+)"\)', (ROOT / "noxfile.py").read_text())
    assert parts == list(MINUTES)
