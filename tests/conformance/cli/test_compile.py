"""`attest compile` with a compiler that compiles nothing: what is asked of it, and how its answers read."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from attest.conformance.compiling.compiler import Binary, Compiler, Job
from attest.conformance.compiling.compilers.ring import RING_GPU, RING_TPU
from attest.conformance.compiling.compilers.tpu import TPU
from attest.conformance.compiling.devices import all_devices

LIMIT = all_devices()["sm_90"].limits["shared_bytes"]


def taking(registers, spill_bytes, stack_bytes, shared_bytes):
    return Binary(
        {
            "registers": registers,
            "spill_bytes": spill_bytes,
            "stack_bytes": stack_bytes,
            "shared_bytes": shared_bytes,
        }
    )


def fits(source):
    return taking(100, 0, 0, 1024)


def is_greedy_on_sm_90(source):
    return taking(255, 48, 16, LIMIT + 1) if "sm_90" in source else fits(source)


def fills_a_tpu(source):
    return Binary({"scoped_vmem_bytes": 8 * 2**20, "hbm_bytes": 2**44, "code_bytes": 3 * 2**20}, ("slow",))


def dies(source):
    os._exit(3)


def refuses(source):
    raise RuntimeError("no such instruction\nand more")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a fake compiler the only one; its kernels know only the device and the head_dim.

    tpus_asleep: a second one is that of all TPUs, and cannot run.
    """

    # The command sets it where it is not set, and other tests want it as it was.
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "cpu"))

    def install(compile=fits, why_not=lambda: None, launchable=True, tpus_asleep=False):
        def jobs(case, device):
            if not launchable:
                raise ValueError("head_dim: too large\nand more")
            names = ("forward", "backward")
            return [Job(name, {"BLOCK": 64}, f"{name} {device.name} {case.head_dim}") for name in names]

        theirs = TPU.devices if tpus_asleep else frozenset()
        found = [Compiler("fake", frozenset(all_devices()) - theirs, why_not, jobs, compile)]
        if tpus_asleep:
            found.append(Compiler("asleep", theirs, lambda: "it is asleep", jobs, compile))
        monkeypatch.setattr("attest.conformance.compiling.matrix.all_compilers", lambda: found)

    return install


def test_all_fits(attest, fake, tmp_path: Path):
    fake()
    done = attest("compile", "-n", 0, "--json", tmp_path / "matrix.json")
    assert done.status == 0, done.err
    assert "PASS" in done.out
    assert "100/255" in done.out
    document = json.loads((tmp_path / "matrix.json").read_text())
    assert (document["schema"], document["status"]) == ("attest.compile/2", "pass")
    assert document["left_out"] == []
    # Cells that are the same to the compiler are compiled once: 2 kernels, for 5 GPUs with 3 head dims, a TPU
    # with 4 and 3 with 1.
    assert document["compilations"] == 44 < len(document["results"])


def test_what_fails_is_told_first_and_with_numbers(attest, fake, tmp_path: Path):
    fake(is_greedy_on_sm_90)
    arguments = ("--kernel", "forward", "--head-dim", "64", "--json", tmp_path / "matrix.json")
    done = attest("compile", "-n", 0, *arguments)
    assert done.status == 1
    first = done.out.splitlines()[0]
    assert first.startswith("FAIL fake forward sm_90 typical bfloat16 head_dim=64: spills 48 bytes")
    assert f"takes {LIMIT + 1} bytes of shared memory, sm_90 has {LIMIT}" in first
    document = json.loads((tmp_path / "matrix.json").read_text())
    assert document["status"] == "fail"
    assert document["narrowed"] == "--kernel forward --head-dim 64"
    spread = RING_GPU.devices | RING_TPU.devices
    assert {result["target"] for result in document["results"]} == set(all_devices()) - spread - {
        "v6e",
        "v5p",
        "tpu7x",
    }
    (failed,) = (result for result in document["results"] if result["status"] == "fail")
    assert failed == {
        "compiler": "fake",
        "kernel": "forward",
        "target": "sm_90",
        "set": "typical",
        "features": ["causal", "gqa"],
        "head_dim": 64,
        "dtype": "bfloat16",
        "configuration": {"BLOCK": 64},
        "status": "fail",
        "faults": failed["faults"],
        "error": "",
        "taken": {"registers": 255, "spill_bytes": 48, "stack_bytes": 16, "shared_bytes": LIMIT + 1},
        "notes": [],
        "limits": dict(all_devices()["sm_90"].limits),
        "seconds": failed["seconds"],
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--target", "gfx942", "--target", "sm_80"), {"target": {"gfx942", "sm_80"}}),
        (("--kernel", "backward"), {"kernel": {"backward"}}),
        (("--feature", "bias"), {"set": {"bias", "everything", "all_but_dropout"}}),
        (("--feature", "bias", "--feature", "causal"), {"set": {"everything", "all_but_dropout"}}),
        (("--feature", "bias", "--feature", "dropout"), {"set": {"everything"}}),
        (("--head-dim", "64", "--head-dim", "256"), {"head_dim": {64, 256}}),
        (("--dtype", "float32"), {"dtype": {"float32"}}),
    ],
)
def test_filters(attest, fake, tmp_path: Path, arguments, expected):
    fake()
    assert attest("compile", "-n", 0, *arguments, "--json", tmp_path / "matrix.json").status == 0
    results = json.loads((tmp_path / "matrix.json").read_text())["results"]
    for name, values in expected.items():
        assert {result[name] for result in results} == values


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--profile", "slow"), "--profile: got 'slow', expected one of quick, full"),
        (("--target", "sm_1"), "--target: got 'sm_1', expected one of sm_80"),
        (("--kernel", "sideways"), "--kernel: got 'sideways', expected one of backward, forward"),
        (("--feature", "magic"), "--feature: got 'magic'"),
        (("--dtype", "int8"), "--dtype: got 'int8'"),
        (("--head-dim", "7"), "nothing fits --head-dim 7 in the profile quick"),
        (("--json", "/nowhere/matrix.json"), "/nowhere does not exist"),
    ],
)
def test_what_makes_no_sense(attest, fake, arguments, expected):
    fake()
    done = attest("compile", "-n", 0, *arguments)
    assert (done.status, done.out) == (2, "")
    assert expected in done.err
    assert done.err.count("\n") == 1


def test_a_compiler_that_cannot_run_here_says_why(attest, fake):
    fake(why_not=lambda: "it is asleep")
    done = attest("compile", "-n", 0)
    assert (done.status, done.err) == (2, "attest: fake cannot compile: it is asleep\n")


def test_a_compiler_that_cannot_run_leaves_its_devices_out_and_says_so(attest, fake, tmp_path: Path):
    fake(tpus_asleep=True)
    done = attest("compile", "-n", 0, "--json", tmp_path / "matrix.json")
    assert done.status == 0
    sentence = "not compiled for tpu7x, v5e, v5p, v6e: asleep cannot compile: it is asleep"
    assert sentence in done.out.splitlines()
    assert json.loads((tmp_path / "matrix.json").read_text())["left_out"] == [sentence]


def test_a_device_that_is_asked_for_is_never_left_out(attest, fake):
    fake(tpus_asleep=True)
    done = attest("compile", "-n", 0, "--target", "v5e", "--target", "sm_90")
    assert (done.status, done.err) == (2, "attest: asleep cannot compile: it is asleep\n")
    assert attest("compile", "-n", 0, "--target", "sm_90").out.count("not compiled") == 0


def test_every_compiler_has_its_own_columns(attest, fake):
    fake(fills_a_tpu)
    done = attest("compile", "-n", 0, "--target", "v5e", "--head-dim", 64, "--kernel", "forward")
    assert done.status == 1
    limit = all_devices()["v5e"].limits["hbm_bytes"]
    assert f"takes {2**44} bytes of HBM, v5e has {limit}" in done.out.splitlines()[0]
    header = next(line for line in done.out.splitlines() if line.startswith("fake"))
    assert header.split() == ["fake", "kernel", "compiled", "scoped", "vmem", "hbm", "code"]
    row = next(line for line in done.out.splitlines() if line.startswith("v5e"))
    assert row.split() == ["v5e", "forward", "1/1", "50%", "102400%", "3.0", "MiB"]


def test_estimates_stand_beside_the_matrix_and_say_what_they_are(attest, fake, tmp_path: Path):
    fake()
    arguments = ("--target", "v5e", "--head-dim", 128, "--json", tmp_path / "matrix.json")
    done = attest("compile", "-n", 0, *arguments)
    assert "Estimates, not measurements" in done.out
    assert "no peak published" in done.out
    estimates = json.loads((tmp_path / "matrix.json").read_text())["estimates"]
    assert "nothing is measured" in estimates["what"]
    typical = [row for row in estimates["rows"] if row["set"] == "typical" and row["dtype"] == "bfloat16"]
    assert [row["pass"] for row in typical] == ["forward", "backward"]
    assert typical[1]["flops"] == 2.5 * typical[0]["flops"]
    # 197 TFLOP/s are the peak of a v5e.
    assert typical[0]["bound_by"] == "compute"
    assert typical[0]["least_seconds"] == pytest.approx(typical[0]["flops"] / 197e12)
    (unpublished, _) = (row for row in estimates["rows"] if row["dtype"] == "float32")
    assert unpublished["least_seconds"] is unpublished["bound_by"] is None


@pytest.mark.parametrize(
    ("compile", "workers", "expected"),
    [
        (refuses, 0, "does not compile: no such instruction"),
        (dies, 1, "does not compile: the compiler died with exit status 3"),
    ],
)
def test_a_compiler_that_gives_up(attest, fake, compile, workers, expected):
    fake(compile)
    arguments = ("--kernel", "forward", "--head-dim", "64", "--target", "sm_90")
    done = attest("compile", "-n", workers, *arguments)
    assert done.status == 1
    assert expected in done.out.splitlines()[0]
    assert "0/1" in done.out


def test_what_cannot_be_launched_fails(attest, fake):
    fake(launchable=False)
    done = attest("compile", "-n", 0, "--head-dim", "64", "--target", "sm_90")
    assert done.status == 1
    assert "does not compile: its launch raised ValueError: head_dim: too large" in done.out.splitlines()[0]
