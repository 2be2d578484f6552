"""A run on a cluster makes the record of a run without one, whatever becomes of its processes."""

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import Processes, calls_in, members, runs, until

CHECK = ("--examples", 16, "--check", "forward", "--check", "determinism")


def results_of(record: Path) -> dict[str, object]:
    """A record without its times and the machine."""
    found = json.loads(record.read_text())
    for result in found["results"]:
        del result["seconds"]
    return {name: value for name, value in found.items() if name not in ("seconds", "environment")}


def ended(process, status=0) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == status, (out, err)
    assert "Traceback" not in err
    return out, err


def under_way(processes: Processes, record: Path, calls: int = 3) -> subprocess.Popen[str]:
    """A run on two workers that has judged some calls."""
    run = processes.attest("check", "mine:steady", *CHECK, "--json", record, "--cluster", "local:2")
    until(lambda: calls_in(record) >= calls, run)
    return run


def plain(processes: Processes, subject="mine:steady") -> dict[str, object]:
    """The record of the same run in one process."""
    ended(processes.attest("check", subject, *CHECK, "-n", 1, "--json", "plain.json", TEST_PAUSE="0"))
    return results_of(processes.folder / "plain.json")


def test_a_local_cluster_makes_the_record_of_a_run_without_one(processes):
    record = processes.folder / "run.json"
    ended(
        processes.attest(
            "check", "mine:steady", *CHECK, "--cluster", "local:2", "--json", record, TEST_PAUSE="0"
        )
    )
    assert results_of(record) == plain(processes)
    environment = json.loads(record.read_text())["environment"]
    assert environment == json.loads((processes.folder / "plain.json").read_text())["environment"]


def test_a_killed_worker_costs_only_time(processes):
    record = processes.folder / "run.json"
    run = under_way(processes, record)
    members(run, "worker")[0].kill()
    ended(run)
    assert results_of(record) == plain(processes)


def test_a_lost_scheduler_ends_the_run_which_goes_on_without_it(processes):
    record = processes.folder / "run.json"
    run = under_way(processes, record)
    members(run, "scheduler")[0].kill()
    _, err = ended(run, status=1)
    last = err.splitlines()[-1]
    assert last.startswith("attest: the scheduler of --cluster local:2 was lost, judging: ")
    assert last.endswith(f"; the results so far are in {record}, and --resume {record} judges the rest")
    found = json.loads(record.read_text())
    assert not found["complete"]
    assert len(found["results"]) >= 3
    rest = ("check", "mine:steady", *CHECK, "--json", record, "--resume", record)
    ended(processes.attest(*rest, "-n", 1, TEST_PAUSE="0"))
    assert results_of(record) == plain(processes)


def test_a_killed_caller_leaves_no_process_and_goes_on(processes):
    record = processes.folder / "run.json"
    run = under_way(processes, record)
    left = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    run.communicate()
    until(lambda: not any(map(runs, left)))
    done = calls_in(record)
    rest = ("check", "mine:steady", *CHECK, "--json", record, "--resume", record)
    ended(processes.attest(*rest, "--cluster", "local:1", TEST_PAUSE="0"))
    assert done >= 3
    assert results_of(record) == plain(processes)


def test_an_interrupted_run_ends_its_cluster(processes):
    record = processes.folder / "run.json"
    run = under_way(processes, record, calls=1)
    left = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGINT)
    _, err = ended(run, status=1)
    assert err.splitlines()[-1].startswith("attest: interrupted, judging")
    until(lambda: not any(map(runs, left)))


def test_a_call_that_ends_its_worker_twice_is_an_error_and_the_others_are_judged(processes):
    record = processes.folder / "run.json"
    check = ("--examples", 5, "--check", "forward", "--no-shrink")
    ended(
        processes.attest("check", "mine:deadly", *check, "--cluster", "local:6", "--json", record), status=1
    )
    results = json.loads(record.read_text())["results"]
    deadly = [result for result in results if result["case"].get("batch", 1) > 1]
    assert deadly
    assert {result["verdict"] for result in deadly} == {"ERROR"}
    assert all(result["message"].startswith("lost 2 times with a worker") for result in deadly)
    others = [result for result in results if result not in deadly]
    assert others
    assert {result["verdict"] for result in others} <= {"PASS", "INCONCLUSIVE"}


def test_two_callers_share_workers_of_which_one_is_slow(processes):
    address = processes.scheduler({"TEST_PAUSE": "1"}, {"TEST_PAUSE": "0"})
    records = [processes.folder / name for name in ("one.json", "other.json")]
    runs = [
        processes.attest("check", "mine:steady", *CHECK, "--cluster", address, "--json", record)
        for record in records
    ]
    for run in runs:
        ended(run)
    expected = plain(processes)
    assert [results_of(record) for record in records] == [expected, expected]


def test_a_worker_with_other_versions_is_refused(processes, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "jaxlib-0.0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxlib\nVersion: 0.0.1\n")
    address = processes.scheduler({"first": str(other.parent)}, {})
    run = processes.attest(
        "check", "mine:steady", *CHECK, "--cluster", address, "--json", "run.json", TEST_PAUSE="0"
    )
    _, err = ended(run)
    assert "gets no cases: versions: jaxlib: got '0.0.1', expected " in err
    assert results_of(processes.folder / "run.json") == plain(processes)


def test_a_cluster_without_a_worker_that_fits_runs_nothing(processes):
    address = processes.scheduler(
        {"ATTEST_COMMIT": "another"}, {"PYTHONPATH": str(Path(__file__).parents[2])}
    )
    _, err = ended(processes.attest("check", "mine:steady", *CHECK, "--cluster", address), status=1)
    assert "gets no cases: commit: got 'another', expected " in err
    assert "mine:steady: " in err
    assert err.splitlines()[-1] == f"attest: --cluster {address}: no worker fits this run"


def test_workers_with_gpus_alone_run_nothing_that_needs_none(processes):
    address = processes.scheduler({"DASK_DISTRIBUTED__WORKER__RESOURCES": "{'GPU': 1}"})
    _, err = ended(processes.attest("check", "mine:steady", *CHECK, "--cluster", address), status=1)
    assert "gets no cases: declares a GPU, and no subject of this run needs one" in err
    assert err.splitlines()[-1] == f"attest: --cluster {address}: no worker fits this run"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense://x", "local:0", "local:many", ""])
def test_no_cluster_at_an_address_is_one_sentence(processes, address):
    out, err = ended(processes.attest("check", "mine:steady", *CHECK, "--cluster", address), status=1)
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("attest: --cluster")
