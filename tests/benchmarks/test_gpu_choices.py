"""Rows of the table of choices, made from a benchmark."""

import tomllib
from pathlib import Path

import pytest

from attest.conformance.tuning.workload import Workload
from attest.kernels.choice import fastest
from benchmarks import choices
from benchmarks.record import Absent, Entry, ReportFile, Result, Row, Run, Samples
from benchmarks.workload import FORWARD, FORWARD_BACKWARD

ABOUT = {"device": "GPU of tests", "commit": "abc", "date": "2026-11-25"}
CAUSAL = Workload(2, 16, 4, 8, key_heads=2, causal=True)
HEAD = "# A table.\n\nmargin = 0.1\n\n[octaves]\nheads = 1.0\n\n"
OTHER = '[[calls]]\nname = "x"\ndevice = "{}"\ncommit = "c"\ndate = "d"\n' + (
    'sizes = {{ bytes = 2, group = 1.5, features = ["causal"] }}\nmilliseconds = {{ xla = [1, 2] }}\n'
)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    file = ReportFile(tmp_path / "rows.jsonl", Run(**ABOUT, versions={}))
    contenders = ("our_triton", "our_xla", "our_auto", "cudnn", "our_mosaic_gpu", "our_mosaic_gpu_default")
    for direction, factor in ((FORWARD, 1.0), (FORWARD_BACKWARD, 3.0)):
        row = Row("causal", direction, {x: Entry(x, CAUSAL) for x in contenders})
        times = {x: Samples((1e-3 * factor * (i + 1),)) for i, x in enumerate(contenders)}
        file.add(Result(row, times | {"our_mosaic_gpu": Absent("no such GPU")}))
        alone = Row("alone", direction, {"our_triton": Entry("our_triton", CAUSAL)})
        file.add(Result(alone, {"our_triton": Samples((1e-3,))}))
    return file.path


def test_rows_are_those_of_our_implementations(measured: Path, tmp_path: Path) -> None:
    table = tmp_path / "choices.toml"
    table.write_text(HEAD + OTHER.format("another GPU") + OTHER.format("GPU of tests"))
    choices.main(measured, table)
    assert table.read_text().startswith(HEAD + "[[calls]]")
    other, row = tomllib.loads(table.read_text())["calls"]
    assert other == tomllib.loads(OTHER.format("another GPU"))["calls"][0]
    assert row.pop("sizes") == {
        "bytes": 2,
        "heads": 8,
        "queries": 16,
        "keys": 16,
        "width": 16,
        "group": 2.0,
        "features": ["causal"],
    }
    assert row == {**ABOUT, "name": "causal", "milliseconds": {"triton": [1.0, 3.0], "xla": [2.0, 6.0]}}


def test_the_table_is_as_the_program_writes_it(measured: Path, tmp_path: Path) -> None:
    table = tmp_path / "choices.toml"
    table.write_text(fastest.TABLE.read_text())
    choices.main(measured, table)
    assert table.read_text().startswith(fastest.TABLE.read_text())
