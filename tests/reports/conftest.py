"""Snapshots. `ATTEST_REFRESH_SNAPSHOTS=1 pytest tests/reports` rewrites them: read the diff, then commit."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from attest.conformance.judging import failure
from tests.reports import records

_FOLDER = Path(__file__).parent / "snapshots"
_REFRESH = "ATTEST_REFRESH_SNAPSHOTS"


@pytest.fixture
def own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explanations in fixed words, so that the snapshots show only what reports write."""
    monkeypatch.setattr(failure, "explain", records.explain)


@pytest.fixture
def matches_snapshot() -> Callable[[str, str], None]:
    """Compare a text with the committed file of a name."""

    def check(name: str, text: str) -> None:
        path = _FOLDER / name
        if os.environ.get(_REFRESH):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs: refresh it with {_REFRESH}=1"

    return check
