"""The baselines that are kept: each is a whole run of one subject on one device, with nothing red in it."""

from pathlib import Path

import pytest

from attest.conformance.record_file import read_record
from attest.reports.compare import compare_records

FOLDER = Path(__file__).parents[2] / "reports" / "baselines"
KEPT = sorted(FOLDER.glob("*/*/*.json"))  # device, profile, subject

pytestmark = pytest.mark.skipif(not KEPT, reason="reports/baselines holds no record yet")


@pytest.mark.parametrize("path", KEPT, ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_baseline_is_a_whole_run_that_passed(path: Path) -> None:
    record = read_record(path)
    assert record.status == "pass"
    assert record.narrowed == ""
    assert record.shard == (1, 1)
    assert {result.subject for result in record.results} == {path.stem}
    device = "-".join(record.environment["device"].lower().split())
    assert (device, record.profile) == (path.parents[1].name, path.parent.name)
    assert record.environment["commit"], "unknown: set ATTEST_COMMIT where there is no checkout"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_baseline_is_not_worse_than_itself(path: Path) -> None:
    record = read_record(path)
    assert not compare_records(record, record).regressed
