"""Does the suite see real bugs? Each defect of planted_defects.toml is planted in a copy of our kernel."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEFECTS = tomllib.loads((Path(__file__).parent / "planted_defects.toml").read_text())
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def judged(site: Path, subject: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """attest, with the kernels of `site` before the project's own, in a process where the subject can run."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "NO_COLOR": "1",
        "TRITON_INTERPRET": "1" if subject == "triton.interpret" else "0",
        "PJRT_NPROC": "8",  # what the interpreter of TPU kernels needs
    }
    command = [sys.executable, "-m", "conformance", *arguments]
    return subprocess.run(command, cwd=site, env=environment, capture_output=True, check=False, text=True)


def options(subject: str, feature: str, check: str) -> list[str]:
    quick = ["--dtype", "float32", "--examples", "6", "-n", "0"]
    return ["check", subject, "--feature", feature, "--check", check, *quick]


@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_a_planted_defect_turns_the_suite_red(name: str, tmp_path: Path) -> None:
    defect = DEFECTS[name]
    if defect.get("nightly") and not NIGHTLY:
        pytest.skip("planted nightly: set HYPOTHESIS_PROFILE=nightly")
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / defect["file"]
    correct = source.read_text()
    assert correct.count(defect["correct"]) == 1, "the kernel has changed: plant the defect anew"
    source.write_text(correct.replace(defect["correct"], defect["planted"]))

    subject = defect.get("subject", "xla.flash_attention")
    asked = options(subject, defect["feature"], defect["check"])
    red = judged(tmp_path, subject, *asked, "--json", str(tmp_path / "red.json"))
    assert red.returncode == 1, red.stdout + red.stderr
    assert "attest replay" in red.stdout
    results = json.loads((tmp_path / "red.json").read_text())["results"]
    (minimal,) = [result for result in results if result["minimal"]]
    assert minimal["verdict"] == "FAIL"
    assert {defect["clause"]} <= set(minimal["clauses"]) if "clause" in defect else minimal["clauses"]
    case = minimal["case"]
    assert case.get("q_len", 1) + case.get("kv_len", 1) <= defect["tokens"], case

    source.write_text(correct)
    question = {"subject": subject, "check": defect["check"], "case": case}
    replayed = judged(tmp_path, subject, "replay", json.dumps(question))
    assert replayed.returncode == 0, replayed.stdout
