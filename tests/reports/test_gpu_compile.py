"""The benchmark of compile times: its programs, its file and its table."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from attest.conformance.running import environment as run_environment
from attest.kernels import xla
from benchmarks import gpu_compile
from benchmarks.gpu.contenders import CONTENDERS, KERNELS
from benchmarks.gpu.timing import Absent

TOML = """
contenders = ["our_mosaic_gpu", "tokamax_mosaic"]
peer = "tokamax_mosaic"

[[programs]]
name = "small"
workload = { batch = 1, length = 8, heads = 2, head_dim = 8, causal = true }
forward = { most = 1.5 }
forward_backward = { seconds = 100 }
"""


def test_the_programs_are_workloads_of_known_contenders() -> None:
    data = tomllib.loads(gpu_compile.TARGETS.read_text())
    programs = gpu_compile.read_programs(data)
    assert len({it.title for it in programs}) == len(programs) == 2 * len(data["programs"])
    assert {*data["contenders"], data["peer"]} <= CONTENDERS.keys()
    assert all(set(it.target) in ({"most"}, {"seconds"}) for it in programs)


def test_a_run_times_each_program_and_names_absent_peers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    targets = tmp_path / "compile.toml"
    targets.write_text(TOML)
    monkeypatch.setattr(gpu_compile, "TARGETS", targets)
    monkeypatch.setattr(gpu_compile, "need_gpu", lambda program: None)
    monkeypatch.setattr(run_environment, "environment", lambda: {"commit": "abc"})
    monkeypatch.setitem(sys.modules, KERNELS["mosaic_gpu"], xla)
    gpu_compile.main(tmp_path)
    report = json.loads((tmp_path / "gpu_compile.json").read_text())
    assert [it["direction"] for it in report["programs"]] == ["forward", "forward_backward"]
    for program in report["programs"]:
        assert program["seconds"]["our_mosaic_gpu"] > 0
        assert "runs on gpu" in program["seconds"]["tokamax_mosaic"]["absent"]
    text = (tmp_path / "gpu_compile.md").read_text()
    assert "| <= 1.5x  | absent  |" in text
    assert "| <= 100 s | met     |" in text


@pytest.mark.parametrize(
    ("ours", "outcome"), [(6.0, "1.50x met"), (6.1, "1.52x MISSED"), (Absent("no wheel"), "absent")]
)
def test_the_target_is_a_ratio_to_the_peer(ours: float | Absent, outcome: str) -> None:
    program = gpu_compile.read_programs(tomllib.loads(TOML))[0]
    taken = {"our_mosaic_gpu": ours, "tokamax_mosaic": 4.0}
    text = gpu_compile.as_markdown({"device": "toy"}, [(program, taken)], list(taken), "tokamax_mosaic")
    assert text.splitlines()[-1].split("|")[-2].strip() == outcome
