"""Does the suite see real bugs? Each defect of groups/kernels.toml is planted in a copy of our kernel."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from attest.conformance.mutants.catalogue import Mutant, load, source_of
from attest.conformance.mutants.planted_package import plant, run_planted
from tests.meta.processes import ROOT, python, tokens

DEFECTS = load("kernels")
HOPPER = "pallas.mosaic_gpu"
ON_GPU = (HOPPER, "triton.cuda")

# Lowers the cases of {folder: question} for CUDA, each with its folder's kernels; prints what went wrong.
LOWER = """
import json, os, sys
import attest, jax
from attest.conformance.cases.build import build
from attest.conformance.cases.case import case_from_json
from attest.conformance.judging.execute import call_of, differentiated, forward_and_gradients, to_jax
from attest.conformance.text import describe
from attest.conformance.subject import find

for folder, question in json.loads(sys.argv[1]).items():
    for name in [name for name in sys.modules if name.startswith("attest.kernels")]:
        del sys.modules[name]
    attest.__path__.insert(0, os.path.join(folder, "attest"))
    try:
        subject, case = find(question["subject"]), case_from_json(question["case"])
        built = build(case, subject.semantics)
        call = call_of(built)
        wanted = differentiated(subject, call) if question["check"] == "gradients" else ()
        run = jax.jit(forward_and_gradients(subject, case.tiling, call.options, wanted))
        arguments = to_jax({**call.arrays, "d_out": built.cotangents.out, "d_lse": built.cotangents.lse})
        d_out, d_lse = arguments.pop("d_out"), arguments.pop("d_lse")
        program = jax.export.export(run, platforms=["cuda"])(arguments, d_out, d_lse).mlir_module()
        assert "mosaic_gpu" in program, "launches no kernel"
        assert sys.modules["attest.kernels"].__file__.startswith(folder), "not the defective kernels"
    except Exception as error:
        print(folder, describe(error))
    del attest.__path__[0]
"""


def judged(site: Path, subject: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """attest, with the kernels of `site` before the project's own, in a process where the subject can run."""
    return run_planted(subject, site, "-m", "attest", *arguments)


def options(subject: str, feature: str, check: str) -> list[str]:
    quick = ["--dtype", "float32", "--examples", "6", "-n", "0"]
    return ["check", subject, "--feature", feature, "--check", check, *quick]


def question(defect: Mutant, case: dict[str, Any]) -> dict[str, Any]:
    return {"subject": defect.subject, "check": defect.check, "case": case}


@cache
def why_no_gpu(subject: str) -> str:
    """Why kernels for a GPU cannot run here, "" if they can; this process itself takes no GPU."""
    code = (
        "import jax; from attest.conformance.subject import find; "
        f"print(find({subject!r}).why_not_here(jax.default_backend()) or '')"
    )
    done = python(ROOT, "-c", code, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_what_a_defect_replaces_is_there_once(name: str) -> None:
    defect = DEFECTS[name]
    for edit in defect.edits:
        assert source_of(defect, edit.file) != (ROOT / edit.file).read_text()
        assert edit.planted


def found_by_search(defect: Mutant, site: Path) -> dict[str, Any]:
    """The simplest case on which the suite fails, having drawn its own, as JSON."""
    subject = defect.subject
    asked = options(subject, defect.feature, defect.check)
    red = judged(site, subject, *asked, "--json", str(site / "red.json"))
    assert red.returncode == 1, red.stdout + red.stderr
    assert "attest replay" in red.stdout
    results = json.loads((site / "red.json").read_text())["results"]
    # At most two: a failure of precision may be shown beside that of the clause.
    minimal = min(
        (result for result in results if result["minimal"]), key=lambda result: tokens(result["case"])
    )
    assert minimal["verdict"] == "FAIL"
    assert defect.clause in minimal["clauses"]
    case = minimal["case"]
    assert tokens(case) <= defect.tokens, case
    return case


def found_by_case(defect: Mutant, site: Path) -> dict[str, Any]:
    """The defect's own case, on which the suite fails for the reason that the defect gives."""
    asked = json.dumps(question(defect, defect.case))
    red = judged(site, defect.subject, "replay", asked)
    assert red.returncode == 1, red.stdout + red.stderr
    verdict, message, *details = (line.strip() for line in red.stdout.splitlines())
    assert verdict == f"FAIL {defect.subject}: {defect.check}"
    assert message.startswith(defect.message), red.stdout
    broken = [line.partition(":")[0] for line in details]
    assert defect.clause in broken
    return defect.case


def needs_of(defect: Mutant) -> list[pytest.MarkDecorator]:
    """The marker of a defect whose kernel runs on a GPU."""
    subject = defect.subject
    if subject.startswith(HOPPER):
        return [pytest.mark.gpu("9.0")]
    return [pytest.mark.gpu] if subject.startswith(ON_GPU) else []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_of(defect)) for name, defect in sorted(DEFECTS.items())]
)
def test_a_planted_defect_turns_the_suite_red(name: str, tmp_path: Path) -> None:
    defect = DEFECTS[name]
    subject = defect.subject
    if subject.startswith(ON_GPU) and why_no_gpu(subject):
        pytest.skip(why_no_gpu(subject))
    home = plant(defect, tmp_path)
    case = (found_by_case if defect.case else found_by_search)(defect, tmp_path)
    for edit in defect.edits:
        (home / edit.file).write_text((ROOT / edit.file).read_text())
    replayed = judged(tmp_path, subject, "replay", json.dumps(question(defect, case)))
    assert replayed.returncode == 0, replayed.stdout


def test_the_hopper_kernels_lower_for_cuda_with_each_defect(tmp_path: Path) -> None:
    """Where none of them can run, that a defect is one of values, and no error of Python's or of Pallas's."""
    asked: dict[str, Any] = {}
    for name, defect in DEFECTS.items():
        if defect.subject.startswith(HOPPER):
            plant(defect, tmp_path / name)
            asked[str(tmp_path / name)] = question(defect, defect.case)
    assert asked
    command = [sys.executable, "-c", LOWER, json.dumps(asked)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
