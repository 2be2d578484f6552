"""The baselines that are kept: each is a whole run of one subject on one device, with nothing red in it."""

from pathlib import Path

import pytest

from attest.conformance.records.record_file import read_record
from attest.reports.baselines import place
from attest.reports.compare import compare_records

FOLDER = Path(__file__).parents[2] / "reports" / "data" / "baselines"
KEPT = sorted(file for file in FOLDER.rglob("*") if file.is_file())

pytestmark = pytest.mark.skipif(not KEPT, reason="reports/data/baselines holds no record yet")


@pytest.mark.parametrize("path", KEPT, ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_baseline_is_a_whole_run_that_passed(path: Path) -> None:
    assert FOLDER / place(read_record(path)) == path


@pytest.mark.parametrize("path", KEPT, ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_baseline_is_not_worse_than_itself(path: Path) -> None:
    record = read_record(path)
    assert not compare_records(record, record).regressed
