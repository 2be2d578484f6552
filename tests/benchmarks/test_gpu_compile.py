"""The benchmark of compile times: its programs, its file and its table."""

import json
import sys
from pathlib import Path

import pytest

from attest.kernels import xla
from benchmarks import gpu_compile, runner, targets
from benchmarks.contenders import CONTENDERS, KERNELS
from benchmarks.record import OURS, Absent, Result, Samples
from benchmarks.targets import TO_COMPILE, read_programs
from tests.benchmarks.test_gpu_rows import anywhere

TOML = """
contenders = ["our_mosaic_gpu", "tokamax_mosaic"]
peer = "tokamax_mosaic"

[[programs]]
name = "small"
workload = { batch = 1, length = 8, heads = 2, head_dim = 8, causal = true }
forward = { most = 1.5 }
forward_backward = { seconds = 100 }
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "compile.toml"
    file.write_text(TOML)
    return file


def test_the_programs_are_workloads_of_known_contenders() -> None:
    rows = read_programs()
    assert len({it.title for it in rows}) == len(rows)
    for it in rows:
        assert it.unit == TO_COMPILE
        assert {entry.contender for entry in it.entries.values()} <= CONTENDERS.keys()
        assert [target.other in (*it.entries, "") for target in it.targets] == [True]


def test_a_run_times_each_program_and_names_absent_peers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, toml: Path
) -> None:
    anywhere(monkeypatch)
    monkeypatch.setitem(sys.modules, KERNELS["mosaic_gpu"], xla)
    runner.run(gpu_compile.benchmark(read_programs(toml)), tmp_path)
    _, *rows = map(json.loads, (tmp_path / "gpu_compile.jsonl").read_text().splitlines())
    assert [it["direction"] for it in rows] == ["forward", "forward_backward"]
    for ours, theirs in (row["entries"] for row in rows):
        assert ours["contender"] == "our_mosaic_gpu"
        assert ours["samples"][0] > 0
        assert "runs on gpu" in theirs["absent"]
    text = (tmp_path / "gpu_compile.md").read_text()
    assert "| <= 1.5x | absent  |" in text
    assert "| <= 100  | met     |" in text


@pytest.mark.parametrize(
    ("ours", "outcome"), [(Samples((6.0,)), "met"), (Samples((6.1,)), "missed"), (Absent("no"), "absent")]
)
def test_the_target_is_a_ratio_to_the_peer(ours: Samples | Absent, outcome: str, toml: Path) -> None:
    row, *_ = read_programs(toml)
    result = Result(row, {OURS: ours, "tokamax_mosaic": Samples((4.0,))})
    assert [result.outcome(target) for target in row.targets] == [outcome]


def test_the_target_may_be_seconds(toml: Path) -> None:
    _, row = read_programs(toml)
    for value, outcome in ((100.0, "met"), (100.1, "missed")):
        result = Result(row, {OURS: Samples((value,)), "tokamax_mosaic": Absent("no wheel")})
        assert [result.outcome(target) for target in row.targets] == [outcome]


def test_a_file_of_programs_names_its_peer_among_the_contenders() -> None:
    data = targets.read(targets.FOLDER / "compile.toml")
    assert data["peer"] in data["contenders"][1:]
