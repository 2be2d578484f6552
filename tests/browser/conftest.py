"""The browser and the pages of the suites here; what is imported in functions, other sessions do not have."""

import hashlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def browser() -> Generator[Any]:
    from tests.browser.pages import chromium

    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from tests.browser.pages import written

    return written(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="session")
def axe() -> str:
    from tests.browser.pages import SETTINGS

    script = Path(os.environ["ATTEST_AXE"]).read_bytes()
    assert hashlib.sha256(script).hexdigest() == SETTINGS["axe"]["sha256"]
    return script.decode()
